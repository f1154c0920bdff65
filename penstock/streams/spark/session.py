"""The container's Spark session, tuned for many small queries with cheap micro-batches."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import penstock
from penstock.core.system_clock import sleep_ms
from penstock.jobs.config import JobConfig
from penstock.jobs.tasks import single_task
from penstock.streams.bus.log import CategorySpec
from penstock.streams.data_plane import StreamDataPlane, find_inputs, find_outputs, own_interval
from penstock.streams.dsl.injector import Injector
from penstock.streams.places import open_log, open_rows
from penstock.streams.spark import planner_client
from penstock.streams.spark.java import archive_options, require_java, spark_home
from penstock.streams.spark.planner_client import SOCKET
from penstock.streams.spark.planner_host import LOG_VARIABLE
from penstock.streams.spark.query import start_query
from penstock.streams.spark.source import PenstockSource
from penstock.streams.step.step import TaskDescriptor

SOURCE = CategorySpec(
    name="in",
    partitions=1,
    columns=(("word", "string"), ("ts", "bigint")),
    format="json",
    watermark="injector",
    ts_column="ts",
)
SPEC = single_task(
    "warm-up",
    "warm-up",
    JobConfig.from_stored(
        {
            "name": "warm-up",
            "pipeline": "warm-up",
            "kind": "stateless",
            "package": {"name": "warm-up", "version": "0", "hash": "0", "entry": "none"},
            "partitions": 1,
            "lineage": 0,
            "inputs": [{"category": "in"}],
            "outputs": [
                {
                    "stream": "out",
                    "category": "out",
                    "partitions": 2,
                    "columns": [["word", "string"]],
                    "internal": False,
                }
            ],
            "plan": {
                "stages": [
                    {"op": "filter", "expr": "length(trim(word)) > 0"},
                    {"op": "select", "columns": [["word", "lower(trim(word))", "string"]]},
                ],
                "key": "word",
            },
        }
    ),
)


def warm_up(session: SparkSession, folder: Path) -> None:
    """Run one batch with records in it. `folder` is used for it and removed."""
    shutil.rmtree(folder, ignore_errors=True)
    task = _prepare(folder)
    query = start_query(session, task, checkpoint=folder / "checkpoint" / "spark", trigger_ms=100)
    while query.isActive and query.lastProgress is None:
        sleep_ms(50)
    query.stop()
    shutil.rmtree(folder, ignore_errors=True)


def _prepare(folder: Path) -> TaskDescriptor:
    bus, place = f"embedded:{folder / 'bus'}", f"sqlite:{folder / 'rows'}"
    log, rows = open_log(bus), open_rows(place)
    log.create(SOURCE)
    config = SPEC.config
    StreamDataPlane(log, rows).prepare(SPEC.job, SPEC.birth, config)
    outputs = find_outputs(log, SPEC.job, config)
    interval, _ = own_interval(SPEC, 0, shard_epoch=1, rows=rows, log=log, outputs=outputs)
    Injector(log, "in", "warm-up", epoch=1).publish(
        ["a", "b"], [1, 2], [b'{"word": " One ", "ts": 1}', b'{"word": "two", "ts": 2}']
    )
    return TaskDescriptor(
        spec=SPEC,
        bus=bus,
        rows=place,
        package_folder="",
        intervals=(interval,),
        inputs=find_inputs(log, config),
        outputs=outputs,
    )


# Hadoop's local file system forks `chmod` and friends for every log file; this manager writes them directly.
CHECKPOINT_FILES = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
END_S = 20
_planners: dict[str, Planners] = {}  # by the id of the session's application
# macOS has the smallest place for a socket's path; Spark names them /.<UUID>.sock.
SOCKET_PATH_CHARS_MAX, SOCKET_NAME_CHARS = 103, 43
# Spark logs every error of a batch five times, with Java and Python tracebacks. The task's error has what
# users need; the rest goes to a file, to debug the engine.
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
    """A session that has run its first batch: local, or with executors of another Spark cluster (`master`).

    `scratch` has temporary files only: Spark's own checkpoints are never read again. Remote executors must
    see the folders of bus, rows and packages under the same paths. A session that is not shared has one
    query, so a planner host would only take memory. With `recorded`, the loaded classes are written there
    when the JVM ends. Spark's error log is `scratch/spark.log`.
    """
    java = require_java()
    scratch.mkdir(parents=True, exist_ok=True)
    os.environ[LOG_VARIABLE] = str((scratch / SPARK_LOG).absolute())
    os.environ["SPARK_HOME"] = str(spark_home(java, scratch, is_recorded=recorded is not None))
    # Remote executors start workers under the same name of Python, and do not have this script.
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
        # The oldest batch first. FAIR orders equal pools by name, so the last ones starve.
        .config("spark.scheduler.mode", "FIFO")
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.streaming.checkpointFileManagerClass", CHECKPOINT_FILES)
        .config("spark.sql.streaming.minBatchesToRetain", "2")
        .config("spark.sql.streaming.numRecentProgressUpdates", "5")
        .config("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "20000")
        .config("spark.python.daemon.module", "penstock.streams.spark.worker_daemon")
        .getOrCreate()
    )
    if planners:
        _planners[session.sparkContext.applicationId] = planners
    session.sparkContext.setLogLevel("ERROR")
    session.dataSource.register(PenstockSource)
    warm_up(session, scratch / "warm-up")
    return session


def _here(builder: SparkSession.Builder, cores: int, scratch: Path) -> SparkSession.Builder:
    # Otherwise Spark resolves the host name, which may fail on a laptop without a network.
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
    """Whether paths of sockets in `scratch` are short enough for the operating system."""
    return len(os.fsencode(_temporary(scratch))) + SOCKET_NAME_CHARS <= SOCKET_PATH_CHARS_MAX


def _elsewhere(builder: SparkSession.Builder, master: str, cores: int) -> SparkSession.Builder:
    """Executors of another Spark cluster. They import this package from its path here, or their own copy."""
    if "127.0.0.1" in master or "localhost" in master:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        builder = builder.config("spark.driver.host", "127.0.0.1")
    return (
        builder.master(master)
        .config("spark.cores.max", str(cores))
        .config("spark.executor.memory", "512m")
        .config("spark.executorEnv.PYTHONPATH", str(Path(penstock.__file__).parent.parent))
        # Steps are idempotent, so a lost executor is not a failure of the task.
        .config("spark.task.maxFailures", "4")
    )


def end_session(session: SparkSession, *, wait_s: float = END_S) -> None:
    """Stop the session and wait until its JVM has ended."""
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
    # A killed JVM leaves temporary files: keep them in our folder, not in /tmp.
    temporary = _temporary(scratch)
    logging, log = scratch / "log4j2.properties", (scratch / SPARK_LOG).absolute()
    logging.write_text(LOG_SETTINGS.format(log=str(log).replace("\\", "\\\\")))
    return (
        f'-XX:+UseSerialGC -XX:TieredStopAtLevel=1 "-Djava.io.tmpdir={temporary}" '
        f'"-Dlog4j2.configurationFile={logging}"'
    )


RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"
PLANNERS_END_S = 5
OPENED = Path("/proc/self/fd")  # on Linux: short paths of open files
PYTHON_SCRIPT = """\
#!/bin/sh
# Spark's Python. The process that Spark starts for each query is forked from the planner host.
if [ "$2" = {runner} ]; then
    exec {python} -I -S {client} {folder} {python} "$@"
fi
# Short-lived processes that inspect a source: use our daemon instead of Spark's.
if [ "$2" = pyspark.daemon ]; then
    shift 2
    exec {python} -m penstock.streams.spark.worker_daemon "$@"
fi
exec {python} "$@"
"""


class Planners:
    """The planner host of one session, and the Python script by which Spark uses it.

    If the host dies, queries start without it, more slowly.
    """

    def __init__(self, folder: Path) -> None:
        (folder / SOCKET).unlink(missing_ok=True)
        self.python = folder / "python"
        names = {"runner": RUNNER, "python": sys.executable, "client": planner_client.__file__}
        self.python.write_text(
            PYTHON_SCRIPT.format(
                **{name: shlex.quote(str(value)) for name, value in {**names, "folder": folder}.items()}
            )
        )
        self.python.chmod(0o700)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            _bind(listener, folder)
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.streams.spark.planner_host", str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )

    @property
    def pid(self) -> int:
        """The host's process id."""
        return self._process.pid

    def end(self) -> None:
        """Stop the host and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=PLANNERS_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _bind(listener: socket.socket, folder: Path) -> None:
    """Bind a socket in this folder, whose path may exceed the limit of socket paths."""
    if not OPENED.exists():
        listener.bind(str(folder / SOCKET))
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        listener.bind(str(OPENED / str(opened) / SOCKET))
    finally:
        os.close(opened)
