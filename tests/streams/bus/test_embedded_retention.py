"""The embedded log lets records go and moves small ones together: a crash anywhere leaves old or new."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.errors import NotFound, RecordsExpired
from penstock.streams.bus.embedded import clean as embedded_compact
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.bus.log import LOW_MIN, NotAllCleaned
from tests.streams.bus.publishers import LARGE, SPEC, files, publish, records, stored


class Died(Exception):
    """Stands for a process that ended at this point."""


class DieAt:
    """Dies at the n-th point; counts them all."""

    def __init__(self, number: int) -> None:
        self.number, self.points = number, 0

    def __call__(self, point: str) -> None:
        self.points += 1
        if self.points == self.number:
            raise Died(point)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handful of small publishes is worth a file."""
    monkeypatch.setattr(embedded_compact, "COMPACT_FROM", 4)


def fill(log: EmbeddedLog) -> None:
    """Small, large, small, small, ...: 60 records in both partitions."""
    log.create(SPEC)
    for number in range(6):
        publish(log, "a", number * 10 + 1, number * 10 + 10, LARGE if number == 1 else "x")


def index_of(folder: Path) -> Iterator[tuple[object, ...]]:
    connection = sqlite3.connect(folder / "clicks" / "index.db")
    yield from connection.execute("SELECT count(*), sum(payload IS NOT NULL) FROM segments")
    connection.close()


def test_small_publishes_become_one_file_and_read_the_same(tmp_path: Path, few: None):
    log = EmbeddedLog(tmp_path)
    fill(log)
    held = [log.read("clicks", p, 3, 57) for p in (0, 1)]
    times = [log.times("clicks", 0, start, start + 7) for start in range(0, 53, 5)]
    assert next(index_of(tmp_path)) == (6, 5)
    log.clean(now_ms=0, older_than_ms=10_000)
    assert next(index_of(tmp_path)) == (3, 1)  # the first small one stands alone before the large one
    assert len(files(tmp_path)) == 2
    for partition in (0, 1):
        assert stored(log, partition) == list(range(1, 61))
        for start, end in ((0, 60), (15, 25), (29, 31), (59, 60)):
            seqs = [
                n for b in log.read("clicks", partition, start, end) for n in b.column("_seq").to_pylist()
            ]
            assert seqs == list(range(start + 1, end + 1))
    assert [log.times("clicks", 0, start, start + 7) for start in range(0, 53, 5)] == times
    for reading in held:  # begun before the move
        assert [n for batch in reading for n in batch.column("_seq").to_pylist()] == list(range(4, 58))
    assert publish(log, "a", 55, 65).trimmed == {0: 6, 1: 6}


def test_a_full_disk_stops_the_move_and_nothing_else(tmp_path: Path, few: None):
    fill(EmbeddedLog(tmp_path))

    def full(point: str) -> None:
        if point == "write:after":
            raise OSError(errno.ENOSPC, "no room")

    log = EmbeddedLog(tmp_path, fault=full)
    with pytest.raises(NotAllCleaned, match="clicks: the disk is full"):
        log.clean(now_ms=0, older_than_ms=10_000)
    assert next(index_of(tmp_path)) == (6, 5) and len(files(tmp_path)) == 1
    assert stored(log, 0) == list(range(1, 61))
    log.close()


def test_few_small_publishes_stay_where_they_are(tmp_path: Path):
    log = EmbeddedLog(tmp_path)
    fill(log)
    log.clean(now_ms=0, older_than_ms=10_000)
    assert next(index_of(tmp_path)) == (6, 5)


@pytest.mark.parametrize("is_truncated", [False, True])
def test_a_cleaner_that_dies_anywhere_loses_and_doubles_nothing(
    tmp_path: Path, few: None, is_truncated: bool
):
    """Die at the first point, the second, ... until it lives through; the next cleaner finishes."""
    number, survived = 0, False
    while not survived:
        number += 1
        folder = tmp_path / str(number)
        fill(EmbeddedLog(folder))
        dying = EmbeddedLog(folder, fault=DieAt(number))
        try:
            if is_truncated:
                dying.truncate("clicks", {0: 25, 1: 60})
            dying.clean(now_ms=0, older_than_ms=10_000)
            survived = True
        except Died:
            pass
        dying.close()
        log = EmbeddedLog(folder)
        for partition, first in enumerate(log.start_offsets("clicks")):
            assert first in (0, (25, 60)[partition])
            read = log.read("clicks", partition, first, 60)
            assert [n for b in read for n in b.column("_seq").to_pylist()] == list(range(first + 1, 61))
        if is_truncated:
            log.truncate("clicks", {0: 25, 1: 60})
        log.clean(now_ms=0, older_than_ms=0)
        log.clean(now_ms=1, older_than_ms=0)
        assert len(files(folder)) == next(index_of(folder))[0] - next(index_of(folder))[1]
        assert log.clean(now_ms=2, older_than_ms=0) == 0
        log.close()
    assert number > 3


def test_a_truncation_between_look_and_move_wins(tmp_path: Path, few: None):
    log = EmbeddedLog(tmp_path)
    fill(log)

    def fault(point: str) -> None:
        if point == "sync:after":
            log.truncate("clicks", {0: 45})

    slow = EmbeddedLog(tmp_path, fault=fault)
    slow.clean(now_ms=0, older_than_ms=10_000)
    assert log.start_offsets("clicks") == (45, 0)
    assert [n for b in log.read("clicks", 0, 45, 60) for n in b.column("_seq").to_pylist()] == [
        *range(46, 61)
    ]
    assert stored(log, 1) == list(range(1, 61))
    slow.close()


def test_a_reader_whose_file_went_is_told_why(tmp_path: Path):
    log = EmbeddedLog(tmp_path)
    fill(log)
    reading = log.read("clicks", 0, 5, 60)
    next(reading)
    log.truncate("clicks", {0: 60, 1: 60})
    with pytest.raises(RecordsExpired):
        list(reading)
    assert files(tmp_path) == set()


def test_a_category_that_is_removed_or_made_anew_is_not_read_on(tmp_path: Path):
    log, others = EmbeddedLog(tmp_path), EmbeddedLog(tmp_path)
    fill(log)
    birth = log.describe("clicks").birth
    (tmp_path / "clicks").rename(tmp_path / "elsewhere")
    for call in (lambda: stored(log, 0), lambda: publish(log, "a", 61, 70), lambda: log.describe("clicks")):
        with pytest.raises(NotFound):
            call()
    others.create(SPEC)
    assert log.describe("clicks").birth not in ("", birth) and log.end_offsets("clicks") == (0, 0)
    log.close()
    others.close()


def test_an_index_of_the_first_format_is_brought_up_to_date(tmp_path: Path):
    log = EmbeddedLog(tmp_path)
    fill(log)
    log.register_producer("clicks", "a")
    log.close()
    connection = sqlite3.connect(tmp_path / "clicks" / "index.db", isolation_level=None)
    connection.execute("ALTER TABLE batches DROP COLUMN at_ms")
    connection.execute("PRAGMA user_version=1")
    connection.close()
    again = EmbeddedLog(tmp_path)
    publish(again, "a", 61, 70)
    assert stored(again, 0) == list(range(1, 71)) and again.producers("clicks") == {"a": LOW_MIN}
    assert again.lag("clicks", {0: 0}, now_ms=10**15).records == 70
    again.close()


def test_groups_are_runs_that_follow_each_other(tmp_path: Path, few: None):
    log = EmbeddedLog(tmp_path)
    log.create(SPEC)
    for number in range(8):
        batch = records(number * 10 + 1, number * 10 + 10)
        log.publish("clicks", producer="a", epoch=1, batches={number % 2: batch}, gapless=False)
    log.clean(now_ms=0, older_than_ms=10_000)
    assert len(files(tmp_path)) == 1 and len(stored(log, 0)) == len(stored(log, 1)) == 40
