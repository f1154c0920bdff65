"""The container's Spark session, tuned for many small queries: what a micro-batch costs is decided here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import penstock
from penstock.streams.bus.spark_source import PenstockSource
from penstock.streams.engine.class_archive import archive_options, spark_home
from penstock.streams.engine.java import require_java
from penstock.streams.engine.planner_host import LOG_VARIABLE
from penstock.streams.engine.planners import OPENED, Planners
from penstock.streams.engine.warm_up import warm_up

# Hadoop's local file system forks `chmod` and friends for every log file; this manager writes them directly.
CHECKPOINT_FILES = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
END_S = 20
_planners: dict[str, Planners] = {}  # by the id of the session's application
# macOS has the smallest place for a socket's path; Spark names them /.<UUID>.sock.
SOCKET_PATH_CHARS_MAX, SOCKET_NAME_CHARS = 103, 43
# Spark tells every error of a batch five times, with traces of Java and Python. What a user has to know is in
# the task's error; the rest goes to a file, for whoever looks for a fault in the engine itself.
SPARK_LOG = "spark.log"
LOG_SETTINGS = """\
rootLogger.level = error
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
rootLogger.appenderRef.file.ref = file
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {log}
appender.file.filePattern = {log}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{yy/MM/dd HH:mm:ss}} %p %c{{1}}: %m%n%ex
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 8MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 1
"""


def build_session(
    app_name: str,
    cores: int,
    scratch: Path,
    *,
    heap_mb: int = 1024,
    master: str = "",
    is_shared: bool = True,
    recorded: Path | None = None,
) -> SparkSession:
    """A session that has run its first batch: local, or with executors of another Spark (`master`).

    `scratch` holds what may be lost: Spark's own checkpoints are never read again. Executors elsewhere must
    see the folders of bus, rows and packages under the same paths. A session that is not shared has one
    query: a process from which planners of queries are forked would only take memory. With `recorded`, the
    classes it loads are written there when its JVM ends. What Spark says of errors is in `scratch/spark.log`.
    """
    java = require_java()
    scratch.mkdir(parents=True, exist_ok=True)
    os.environ[LOG_VARIABLE] = str((scratch / SPARK_LOG).absolute())
    os.environ["SPARK_HOME"] = str(spark_home(java, scratch, is_recorded=recorded is not None))
    # Executors elsewhere start their workers with the same name, and have no file of ours.
    has_planners = is_shared and not master and (OPENED.exists() or _fits_sockets(scratch))
    planners = Planners(_temporary(scratch)) if has_planners else None
    os.environ["PYSPARK_PYTHON"] = str(planners.python) if planners else sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder: SparkSession.Builder = SparkSession.builder.appName(app_name)
    builder = _elsewhere(builder, master, cores) if master else _here(builder, cores, scratch)
    session = (
        builder.config("spark.driver.memory", f"{heap_mb}m")
        .config(
            "spark.driver.extraJavaOptions", f"{_java_options(scratch)} {archive_options(java, recorded)}"
        )
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.local.dir", str(scratch / "spark"))
        .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
        # The oldest batch first. Between pools of the fair mode the name decides: the last ones starve.
        .config("spark.scheduler.mode", "FIFO")
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.streaming.checkpointFileManagerClass", CHECKPOINT_FILES)
        .config("spark.sql.streaming.minBatchesToRetain", "2")
        .config("spark.sql.streaming.numRecentProgressUpdates", "5")
        .config("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "20000")
        .config("spark.python.daemon.module", "penstock.streams.engine.worker_daemon")
        .getOrCreate()
    )
    if planners:
        _planners[session.sparkContext.applicationId] = planners
    session.sparkContext.setLogLevel("ERROR")
    session.dataSource.register(PenstockSource)
    warm_up(session, scratch / "warm-up")
    return session


def _here(builder: SparkSession.Builder, cores: int, scratch: Path) -> SparkSession.Builder:
    # Spark would otherwise resolve the host's name, which may not answer on a laptop without a network.
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return (
        builder.master(f"local[{cores}]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.task.maxFailures", "1")
        # Over TCP a worker waits 40 ms for an acknowledgement in every batch (measured: 141 and 102 ms).
        .config("spark.python.unix.domain.socket.enabled", str(_fits_sockets(scratch)).lower())
        .config("spark.python.unix.domain.socket.dir", str(_temporary(scratch)))
    )


def _temporary(scratch: Path) -> Path:
    folder = (scratch / "tmp").absolute()
    folder.mkdir(exist_ok=True)
    return folder


def _fits_sockets(scratch: Path) -> bool:
    """Whether the names of sockets in there are short enough for the operating system."""
    return len(os.fsencode(_temporary(scratch))) + SOCKET_NAME_CHARS <= SOCKET_PATH_CHARS_MAX


def _elsewhere(builder: SparkSession.Builder, master: str, cores: int) -> SparkSession.Builder:
    """Executors of another Spark. They import this package from where it lies here, unless they have it."""
    if "127.0.0.1" in master or "localhost" in master:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        builder = builder.config("spark.driver.host", "127.0.0.1")
    return (
        builder.master(master)
        .config("spark.cores.max", str(cores))
        .config("spark.executor.memory", "512m")
        .config("spark.executorEnv.PYTHONPATH", str(Path(penstock.__file__).parent.parent))
        # A step that is repeated changes nothing, so a lost executor is no failure of the task.
        .config("spark.task.maxFailures", "4")
    )


def end_session(session: SparkSession, *, wait_s: float = END_S) -> None:
    """Stop it, and wait until its JVM is gone: a command that has ended leaves nothing behind."""
    gateway: Any = session.sparkContext._gateway
    planners = _planners.pop(session.sparkContext.applicationId, None)
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    try:
        gateway.proc.wait(timeout=wait_s)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait()
    if planners:
        planners.end()


def _java_options(scratch: Path) -> str:
    # A killed JVM leaves its temporary files; they belong into our folder, not into everybody's.
    temporary = _temporary(scratch)
    logging, log = scratch / "log4j2.properties", (scratch / SPARK_LOG).absolute()
    logging.write_text(LOG_SETTINGS.format(log=str(log).replace("\\", "\\\\")))
    return (
        f'-XX:+UseSerialGC -XX:TieredStopAtLevel=1 "-Djava.io.tmpdir={temporary}" '
        f'"-Dlog4j2.configurationFile={logging}"'
    )
