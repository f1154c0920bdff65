"""Claims about the process that Python workers are forked from: that Spark gives it up ends nobody else's work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import until

# What Spark does with a daemon: it starts one, has two workers forked, gives work to one of them, and gives the
# daemon up. It says who there is, and ends when it is told to.
SPARK = """
import os, socket, struct, subprocess, sys

command = [sys.executable, "-m", "penstock.streams.spark.worker_daemon", "pyspark.worker"]
daemon = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
(length,) = struct.unpack("!i", daemon.stdout.read(4))
address = daemon.stdout.read(length)
found = [daemon.pid]
workers = [socket.socket(socket.AF_UNIX) for _ in range(2)]
for worker in workers:
    worker.connect(address)
    found += struct.unpack("!i", worker.recv(4, socket.MSG_WAITALL))
workers[0].sendall(b"part")
daemon.terminate()
daemon.stdin.close()
print(*found, flush=True)
sys.stdin.read()
"""
CANCELLED = "cancelled while it waits for its worker"


class Job:
    """A Spark job with one Python worker, in a thread of its own; its result, or what ended it."""

    def __init__(self, context: Any, group: str, work: Any) -> None:
        from pyspark import InheritableThread

        self.result: Any = None
        self._context, self._group = context, group
        self._rows = context.parallelize([0], 1).map(work)
        self._thread = InheritableThread(self._run)
        self._thread.start()

    def _run(self) -> None:
        # As Spark does it for each streaming query.
        self._context.setJobGroup(self._group, "", interruptOnCancel=True)
        try:
            self.result = self._rows.collect()
        except Exception as error:
            self.result = error

    def ended(self) -> Any:
        """What came of it."""
        self._thread.join()
        return self.result


@pytest.fixture
def context(spark: Any) -> Iterator[Any]:
    """Spark's, with a daemon of its own and so without workers that idle: it is known by its environment."""
    found = spark.sparkContext
    found.environment["PENSTOCK_TEST_DAEMON"] = "1"
    try:
        yield found
    finally:
        del found.environment["PENSTOCK_TEST_DAEMON"]


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def waits_for_a_worker(context: Any) -> bool:
    """Whether a thread of the JVM has asked the daemon for a worker, and listens for its answer."""
    for stack in context._jvm.java.lang.Thread.getAllStackTraces().values():
        frames = [f"{frame.getClassName()}.{frame.getMethodName()}" for frame in stack]
        asks = any("PythonWorkerFactory.createWorker" in frame for frame in frames)
        if asks and any("SelectorImpl.select" in frame for frame in frames):
            return True
    return False


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_job_that_is_cancelled_while_it_waits_for_a_worker_ends_no_other(
    context: Any, tmp_path: Path
) -> None:
    """Plan: one job's worker is busy; the daemon stands still; another job asks it for a worker and is cancelled.

    Spark takes the interrupted wait for a daemon that is lost, ends it, and starts another one.
    """
    asked, answer = tmp_path / "asked", tmp_path / "answer"
    os.mkfifo(asked)
    os.mkfifo(answer)

    def work(_: int) -> tuple[int, str]:
        asked.write_text(f"{os.getpid()} {os.getppid()}")
        with answer.open() as file:
            said = file.readline()
        for stream in (sys.stdout, sys.stderr) * 3:
            print("it may print", file=stream, flush=True)
        return os.getpid(), said

    with answer.open("r+b", buffering=0) as answers:
        busy = Job(context, "busy", work)
        worker, daemon = map(int, asked.read_text().split())
        with standing_still(daemon):
            waiting = Job(context, CANCELLED, lambda n: n)
            until(lambda: waits_for_a_worker(context), "the other job to ask for a worker")
            context.cancelJobGroup(CANCELLED)
            assert "cancelled" in str(waiting.ended())
            until(lambda: not waits_for_a_worker(context), "Spark to give the daemon up")
        after = Job(context, "after", lambda n: os.getppid())
        assert after.ended() not in ([daemon], [worker]), "Spark has started another daemon"
        answers.write(b"here\n")
        assert busy.ended() == [(worker, "here\n")]


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """The path of a socket may have 107 bytes, which pytest's own folders can exceed."""
    with tempfile.TemporaryDirectory(prefix="sock") as folder:
        yield Path(folder)


@pytest.mark.spark
@pytest.mark.slow
def test_a_worker_that_hangs_ends_with_spark_also_where_its_daemon_was_given_up(socket_folder: Path) -> None:
    environment = {
        **os.environ,
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_WORKER_FACTORY_SOCK_DIR": str(socket_folder),
        "SPARK_REUSE_WORKER": "1",
    }
    command = [sys.executable, "-c", SPARK]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as spark:
        assert spark.stdin is not None and spark.stdout is not None
        left = [psutil.Process(int(pid)) for pid in spark.stdout.readline().split()]
        until(lambda: not list(socket_folder.iterdir()), "the daemon to take no more")
        assert all(runs(process) for process in left)
        left[1].suspend()
        spark.kill()
    until(lambda: not any(runs(process) for process in left), lambda: f"the end of {left}")
