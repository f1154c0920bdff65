"""Partitions dealt anew to plain processes: each partition has one reader at a time, and then another. No Java."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import new_key
from penstock.core.errors import ConfigError
from tests.builders import a_process
from tests.e2e.platform import Platform

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
JOB = "demo.tick"
# Locks each partition that it is given: two readers of one would clash. Then it writes down what it reads.
READER = """
import fcntl, pathlib, sys, time
folder, index, partitions = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
held = []
for partition in partitions.split(","):
    held.append((folder / ("lock " + partition)).open("w"))
    try:
        fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        (folder / " ".join(["clash", partition, index])).touch()
        sys.exit(1)
(folder / ("new " + index)).write_text(partitions)
(folder / ("new " + index)).rename(folder / ("reads " + index))
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    found = Platform(tmp_path / "penstock", containers=2, engine="process")
    try:
        found.start()
        yield found
        assert found.stop() == []
    finally:
        found.kill()


def test_a_new_deal_reaches_processes_and_no_partition_has_two_readers(platform: Platform, tmp_path: Path):
    """Plan: an even deal, another one, more tasks than it is for, then the first number of tasks again."""
    marks = tmp_path / "marks"
    marks.mkdir()
    command = [sys.executable, "-c", READER, str(marks), "{index}", "{partitions}"]
    config = a_process(JOB, task_count=2, partitions=6, command=command)
    platform.client.apply_job(JOB, config, why="new", key=new_key())

    def reads(*partitions: str) -> bool:
        found = {path.name.split()[1]: path.read_text() for path in marks.glob("reads *")}
        running = len(platform.running(JOB)) == len(partitions)
        return running and [found.get(str(n)) for n in range(len(partitions))] == [*partitions]

    platform.wait("an even deal", lambda: reads("0,1,2", "3,4,5"), seconds=150)
    deal = [1, 0, 0, 1, 1, 1]
    platform.client.patch_layer(
        JOB, "oncall", {"partition_tasks": deal}, why="partition 0 is hot", key=new_key()
    )
    platform.wait("another deal", lambda: reads("1,2", "0,3,4,5"), seconds=150)
    shown = json.loads(platform.cli("config", "show", JOB, "--output", "json").stdout)
    assert shown["config"]["partition_tasks"] == deal
    assert shown["provenance"]["partition_tasks"]["layer"] == "oncall"

    platform.client.patch_layer(JOB, "oncall", {"task_count": 3}, why="more", key=new_key())
    platform.wait("an even deal of three", lambda: reads("0,1", "2,3", "4,5"), seconds=150)
    assert "partition_tasks is ignored: task 2 of 3" in " ".join(
        platform.cli("job", "get", JOB).stdout.split()
    )
    explained = " ".join(platform.cli("explain", JOB).stdout.split())
    assert "partition 0 from task 0 to 1" in explained and "partition_tasks is ignored" in explained

    with pytest.raises(ConfigError) as caught:
        platform.client.patch_layer(
            JOB, "oncall", {"partition_tasks": [0, 1, 2]}, why="a slip", key=new_key()
        )
    assert "3 entries, and the job has 6 partitions" in caught.value.why
    platform.client.patch_layer(JOB, "oncall", {"task_count": None}, why="two again", key=new_key())
    platform.wait("the deal again", lambda: reads("1,2", "0,3,4,5"), seconds=150)
    assert not [*marks.glob("clash *")]
