"""The process from which planners of queries are forked: who asks, who asks nonsense, and who finds it gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.streams.spark import planner_client
from penstock.streams.spark.session import RUNNER, Planners
from tests.waiting import LIMIT_S, until


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a name longer than a socket's may be, and with spaces in it."""
    with tempfile.TemporaryDirectory(prefix="a folder with a long name " * 6) as found:
        yield Path(found)


@pytest.fixture
def planners(folder: Path) -> Iterator[Planners]:
    found = Planners(folder)
    yield found
    found.end()


def ask(planners: Planners, spark: socket.socket, *, secret: str = "s") -> subprocess.CompletedProcess[bytes]:
    """What Spark does: start "Python", and wait for a connection of the planner."""
    port = spark.getsockname()[1]
    environment = {"PYTHON_WORKER_FACTORY_PORT": str(port), "PYTHON_WORKER_FACTORY_SECRET": secret}
    return subprocess.run(
        [planners.python, "-m", RUNNER],
        env={"PATH": os.environ["PATH"], **environment},
        timeout=LIMIT_S,
        check=False,
        stdout=subprocess.DEVNULL,
    )


def listening() -> socket.socket:
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    found.listen()
    found.settimeout(LIMIT_S)
    return found


def greeted(spark: socket.socket) -> tuple[socket.socket, int]:
    """The planner's connection and process id, after it showed its secret."""
    planner, _ = spark.accept()
    stream = planner.makefile("rb")
    assert stream.read(int.from_bytes(stream.read(4), "big")) == b"s"
    planner.sendall((2).to_bytes(4, "big") + b"ok")
    return planner, int.from_bytes(stream.read(4), "big")


def test_a_planner_is_forked_with_what_spark_gave_it_and_ends_with_its_query(planners: Planners):
    with listening() as spark:
        done = ask(planners, spark)
        assert done.returncode == 0
        planner, pid = greeted(spark)
        found = psutil.Process(pid)
        assert found.ppid() == planners.pid
        planner.close()
        found.wait(LIMIT_S)
    assert psutil.Process(planners.pid).status() != psutil.STATUS_ZOMBIE


def test_who_asks_nonsense_is_left_alone_and_the_next_one_is_served(planners: Planners, folder: Path):
    for nonsense in (b"", b"\0\0", b"\xff" * 8, (5).to_bytes(8, "big") + b"abc"):
        with socket.socket(socket.AF_UNIX) as client:
            opened = os.open(folder, os.O_RDONLY)
            client.connect(f"/proc/self/fd/{opened}/{planner_client.SOCKET}")
            os.close(opened)
            client.sendall(nonsense)
    with listening() as spark:
        assert ask(planners, spark).returncode == 0
        greeted(spark)[0].close()


def test_it_ends_with_who_started_it(folder: Path):
    program = (
        "from pathlib import Path; from penstock.streams.spark.session import Planners; import os, signal\n"
    )
    program += f"print(Planners(Path({str(folder)!r})).pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    until(lambda: not psutil.pid_exists(int(done.stdout)), "its end: it outlives its engine")


def test_without_a_host_spark_gets_a_python_of_its_own(folder: Path):
    planners = Planners(folder)
    psutil.Process(planners.pid).kill()
    planners.end()
    with listening() as spark:
        assert ask(planners, spark, secret="").returncode not in (
            None,
            0,
        )  # the runner itself, with no secret
    asked = [sys.executable, "-I", "-S", planner_client.__file__, str(folder / "gone"), sys.executable]
    done = subprocess.run([*asked, "-c", "print('cold')"], capture_output=True, text=True, check=True)
    assert done.stdout == "cold\n"


def test_what_is_no_query_is_python(planners: Planners):
    done = subprocess.run([planners.python, "-c", "print(1 + 1)"], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"
