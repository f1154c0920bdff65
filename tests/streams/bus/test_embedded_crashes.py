"""The embedded log under kill -9 and many processes: nothing acknowledged is lost, nothing half-written is seen."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from penstock.core.errors import NotFound
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.bus.log import LOW_MIN
from tests.streams.bus.publishers import (
    SPEC,
    create,
    do_work,
    files,
    heard,
    publish,
    publish_forever,
    publish_some,
    start,
    stored,
    work_until,
)

pytestmark = pytest.mark.e2e


def check_whole(log: EmbeddedLog, acknowledged: int) -> int:
    """Both partitions hold 1..k of whole publishes, k at least what was acknowledged; returns k."""
    one, two = stored(log, 0), stored(log, 1)
    assert one == two == list(range(1, len(one) + 1))
    assert len(one) >= acknowledged
    return len(one)


def test_kill_9_at_any_time_loses_nothing_acknowledged(tmp_path: Path):
    """A publisher is killed again and again, at random times; each successor repeats the last unsure batch."""
    rng, log, acknowledged = random.Random(7), EmbeddedLog(tmp_path), 0
    log.create(SPEC)
    for _ in range(12):
        process, told = start(publish_forever, tmp_path, "a")
        # Each life gets at least one batch further, however slow the machine is: its first may be a repetition.
        said = [told.recv() for _ in range(rng.randint(2, 8))]
        time.sleep(rng.random() * 0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        acknowledged = [*said, *heard(told)][-1]
        assert check_whole(EmbeddedLog(tmp_path), acknowledged) % 10 == 0
    assert acknowledged >= 120
    # What the dead left behind goes; what is visible stays.
    log.clean(now_ms=0, older_than_ms=0)
    assert log.clean(now_ms=1, older_than_ms=0) == 0
    assert check_whole(log, acknowledged) == log.published_to("clicks", "a")[0]
    assert len(files(tmp_path)) == sum(batch[0] // 10 % 2 for batch in _first_sequences(log))


def _first_sequences(log: EmbeddedLog) -> list[list[int]]:
    end = log.end_offsets("clicks")[0]
    return [batch.column("_seq").to_pylist() for batch in log.read("clicks", 0, 0, end)]


def test_a_process_that_vanishes_at_any_point_leaves_old_or_new(tmp_path: Path):
    """Exit at the first point, the second, ... until it lives through; then do everything again on what is left."""
    reference = EmbeddedLog(tmp_path / "reference")
    do_work(reference, lambda seq: None)
    survived = False
    for exit_at in range(200):
        folder = tmp_path / str(exit_at)
        process, told = start(work_until, folder, exit_at)
        said = heard(told)
        process.join()
        survived = said[-1:] == [-1]
        assert process.exitcode == (0 if survived else 9)
        _check_after_crash(folder, [seq for seq in said if seq > 0])
        log = EmbeddedLog(folder)
        do_work(log, lambda seq: None, epoch=2)
        _check_same(log, reference)
        assert len(files(folder)) == len(files(tmp_path / "reference")) == 2
        log.close()
        if survived:
            break
    assert survived and exit_at > 25


def _check_after_crash(folder: Path, acknowledged: list[int]) -> None:
    log = EmbeddedLog(folder)
    try:
        log.describe("clicks")
    except NotFound:
        assert not acknowledged
        return
    visible = check_whole(log, max(acknowledged, default=0))
    assert visible in (0, 10, 20, 30)
    assert log.published_to("clicks", "a") == ({0: visible, 1: visible} if visible else {})
    log.close()


def _check_same(log: EmbeddedLog, reference: EmbeddedLog) -> None:
    for partition in (0, 1):
        assert stored(log, partition) == stored(reference, partition)
    # A repeated report may find its mark made already, so lows agree, and ends where the log is the same.
    lows = [mark.low for mark in log.marks("clicks", 0, above=LOW_MIN, up_to=2**40)]
    assert lows == [mark.low for mark in reference.marks("clicks", 0, above=LOW_MIN, up_to=2**40)] == [5, 9]
    assert log.producers("clicks") == reference.producers("clicks")
    assert log.published_to("clicks", "a") == reference.published_to("clicks", "a")


def test_four_processes_publish_side_by_side(tmp_path: Path):
    names = ["a", "b", "c", "d"]
    started = [start(publish_some, tmp_path, name, 25) for name in names]
    for process, told in started:
        assert heard(told) == list(range(10, 260, 10))
        process.join()
        assert process.exitcode == 0
    log = EmbeddedLog(tmp_path)
    assert log.end_offsets("clicks") == (1000, 1000)
    for partition in (0, 1):
        found = stored(log, partition)
        # 1..250 of each producer in order: merged runs of ten, so each value appears once per producer.
        assert sorted(found) == sorted([*range(1, 251)] * 4)
        batches = list(log.read("clicks", partition, 0, 1000))
        assert [batch.num_rows for batch in batches] == [10] * 100
        for seq in range(11, 251, 10):
            behind = [i for i, batch in enumerate(batches) if batch.column("_seq")[0].as_py() == seq - 10]
            ahead = [i for i, batch in enumerate(batches) if batch.column("_seq")[0].as_py() == seq]
            assert all(a > b for a, b in zip(sorted(ahead), sorted(behind), strict=True))
    assert all(log.published_to("clicks", name) == {0: 250, 1: 250} for name in names)


@pytest.mark.parametrize("round_", range(3))
def test_processes_that_create_at_once_get_one_birth(tmp_path: Path, round_: int):
    go = tmp_path / "go"
    started = [start(create, tmp_path / "bus", go) for _ in range(4)]
    go.touch()
    births = [birth for _, told in started for birth in heard(told)]
    for process, _ in started:
        process.join()
    assert len(births) == 4 and set(births) == {EmbeddedLog(tmp_path / "bus").describe("clicks").birth}
    assert [path.name for path in (tmp_path / "bus").iterdir()] == ["clicks"]


def test_a_handle_used_before_a_fork_works_on_both_sides(tmp_path: Path):
    log = EmbeddedLog(tmp_path)
    log.create(SPEC)
    publish(log, "a", 1, 10)
    index, _ = log._of("clicks")
    (of_parent,) = index._pool[1]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            publish(log, "a", 11, 20)
            assert stored(log, 0) == list(range(1, 21))
            # SQLite forbids to use or close what came over the fork: kept aside, and a new one opened.
            assert index._inherited == [[of_parent]] and of_parent not in index._pool[1]
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    publish(log, "a", 21, 30)
    assert stored(log, 1) == list(range(1, 31))
