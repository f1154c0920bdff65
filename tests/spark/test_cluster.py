"""Tasks on another Spark: a real standalone master with two workers, executors in processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

from tests.kin import kill_all, kin_of
from tests.waiting import until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]


def a_free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def daemon(folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_WORKER_DIR": str(folder / name),
        "PYTHONPATH": str(ROOT),
    }
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [str(home / "bin" / "spark-class"), *arguments], env=environment, stdout=log, stderr=log
        )


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A master and two workers with one core each, on loopback."""
    tmp_path = tmp_path_factory.mktemp("spark")
    port = a_free_port()
    url = f"spark://127.0.0.1:{port}"
    started = [
        daemon(
            tmp_path,
            "master",
            "org.apache.spark.deploy.master.Master",
            *("--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"),
        )
    ]
    try:
        for number in range(2):
            started.append(
                daemon(
                    tmp_path,
                    f"worker{number}",
                    "org.apache.spark.deploy.worker.Worker",
                    *("--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--webui-port", "0", url),
                )
            )
        said = (tmp_path / "master.log").read_text

        def are_two_there() -> bool:
            assert all(process.poll() is None for process in started), said()
            return said().count("Registering worker") == 2

        until(are_two_there, said)
        yield url
    finally:
        for process in reversed(started):
            kill_all(kin_of(process.pid))
            process.kill()
            process.wait()


def run_there(master: str, folder: Path, bus: str) -> None:
    """The pipeline, driven from a process of its own; the work is done in the executors."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.cluster_run", str(folder), master, "2000", bus],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["is_exact"] and said["counted"] > 100 and not said["deaths"]
    # Each worker has one core, so each gave one executor, and both worked.
    assert len(said["executors"]) == 2 and min(said["executors"].values()) > 0, said


def test_a_pipeline_on_two_executors_of_another_spark_is_exact(master: str, tmp_path: Path):
    run_there(master, tmp_path / "run", "")


def test_and_so_it_is_with_the_bus_on_kafka(master: str, kafka: Any, tmp_path: Path):
    run_there(master, tmp_path / "run", kafka.new_place())
