"""A real Kafka broker for tests and benches: its jars by name from Maven Central, one process on loopback.

`python -m tests.kafka` fetches the jars and tells where they are, or why there are none.
"""

from __future__ import annotations

import base64
import fcntl
import importlib.metadata
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = "4.1.0"
JARS = ROOT / ".cache" / "kafka" / VERSION
MODULES = (("org.apache.kafka", "kafka_2.13", VERSION), ("org.slf4j", "slf4j-simple", "1.7.36"))
CONNECTOR = ("org.apache.spark", "spark-sql-kafka-0-10_2.13")  # in the version of the PySpark that is here
FETCH_S_MAX, START_S_MAX = 100, 60


class NoBroker(Exception):
    """Why no broker can be started here."""


class KafkaServer:
    """One running broker. Each `new_place()` is a bus of its own on it."""

    def __init__(self, folder: Path, port: int, command: list[str]) -> None:
        self.address, self._port, self._folder, self._command = f"127.0.0.1:{port}", port, folder, command
        self._process: subprocess.Popen[bytes] | None = None
        self._run, self._numbers = uuid.uuid4().hex[:6], itertools.count(1)

    def start(self) -> None:
        """Start it on what is in its folder, and wait until it answers."""
        said = self._folder / "broker.txt"
        with said.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output, cwd=self._folder)
        _wait_for(self._process, self._port, said)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def pid(self) -> int:
        """The broker's process."""
        assert self._process is not None, "it does not run"
        return self._process.pid

    def new_place(self) -> str:
        """What `open_log` takes: topics under a prefix that nobody else has."""
        return f"kafka://{self.address}/t{self._run}-{next(self._numbers)}-"

    def freeze(self) -> None:
        """Let it answer nobody."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)


@contextmanager
def kafka_server() -> Iterator[KafkaServer]:
    """Start one; it ends with the block. NoBroker if there are no jars and they cannot be fetched."""
    jars = fetch_jars()
    with tempfile.TemporaryDirectory(prefix="kafka-") as name:
        folder = Path(name)
        broker, controller = _free_ports(2)
        settings = folder / "server.properties"
        settings.write_text(_settings(folder, broker, controller), encoding="utf-8")
        _format(folder / "data")
        server = KafkaServer(folder, broker, [*_java(jars), "kafka.Kafka", str(settings)])
        try:
            server.start()
            yield server
        finally:
            server.kill()  # nothing on it is needed again, so it need not end in good order


def fetch_jars() -> Path:
    """The folder of the broker's jars; fetched once per version with the Ivy that PySpark brings."""
    return _fetched(JARS, MODULES)


def fetch_connector() -> Path:
    """The folder of Spark's own Kafka connector, which PySpark does not bring."""
    version = importlib.metadata.version("pyspark")
    return _fetched(JARS.with_name(f"connector-{version}"), [(*CONNECTOR, version)])


def _fetched(jars: Path, modules: Sequence[tuple[str, str, str]]) -> Path:
    if jars.exists():
        return jars
    jars.parent.mkdir(parents=True, exist_ok=True)
    with (jars.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not jars.exists():
            unfinished = jars.with_name(f"{jars.name}.new")
            shutil.rmtree(unfinished, ignore_errors=True)
            for module in modules:
                _resolve(module, unfinished)
            unfinished.rename(jars)
    return jars


def _resolve(module: tuple[str, str, str], into: Path) -> None:
    found = importlib.util.find_spec("pyspark")
    ivy = (
        next((Path(found.origin).parent / "jars").glob("ivy-*.jar"), None) if found and found.origin else None
    )
    if ivy is None:
        raise NoBroker("PySpark, whose Ivy fetches the broker, is not installed")
    pattern = f"{into}/[artifact]-[revision].[ext]"
    cache = JARS.parent / "ivy"
    command = [*(_java_command(), "-jar", str(ivy), "-cache", str(cache), "-dependency", *module)]
    command += ["-confs", "default", "-types", "jar", "bundle", "-retrieve", pattern]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=FETCH_S_MAX)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoBroker(f"{':'.join(module)} could not be fetched: {error}") from error
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if "error" in line.lower() or "not found" in line]
        raise NoBroker(
            f"{':'.join(module)} could not be fetched: {' '.join(lines[:3]) or done.stderr[-300:]}"
        )


def _java_command() -> str:
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else "java"


def _java(jars: Path) -> list[str]:
    quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
    # It lives for minutes at most: a compiler that works less long is worth more than one that works better.
    small = ("-Xmx400m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
    return [_java_command(), *small, quiet, "-cp", f"{jars}/*"]


def _settings(folder: Path, broker: int, controller: int) -> str:
    settings = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listeners": f"PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{broker}",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "log.dirs": folder / "data",
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 1,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "transaction.state.log.num.partitions": 2,
        # A transaction whose producer died ends soon after its time, not up to 10 s later.
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": 500,
        "log.retention.check.interval.ms": 500,
        "log.initial.task.delay.ms": 500,
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def _format(data: Path) -> None:
    """What `StorageTool format` writes, without a JVM that takes seconds to start."""
    cluster, directory = (base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=") for _ in range(2))
    data.mkdir()
    lines = ("version=1", "node.id=1", f"cluster.id={cluster}", f"directory.id={directory}")
    (data / "meta.properties").write_text("\n".join(lines) + "\n")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:  # all open at once, so that no two are the same
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_for(process: subprocess.Popen[bytes], port: int, said: Path) -> None:
    begin = time.monotonic()
    while time.monotonic() - begin < START_S_MAX:
        if process.poll() is not None:
            break
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise NoBroker(f"the broker did not start: {said.read_text(errors='replace')[-1000:]}")


if __name__ == "__main__":
    try:
        print(f"kafka: the broker's jars are in {fetch_jars().relative_to(ROOT)}")
    except NoBroker as reason:
        print(f"kafka: tests with a broker will be skipped: {reason}", file=sys.stderr)
