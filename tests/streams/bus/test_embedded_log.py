"""What only the embedded log can get wrong: files, races with the cleaner, damage, full disks."""

from __future__ import annotations

import errno
import os
import pickle
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.core.errors import (
    CorruptData,
    DiskFull,
    EnvironmentProblem,
    Fenced,
    NotFound,
    OutcomeUnknown,
    PenstockError,
)
from penstock.streams.bus.embedded.log import PUBLISH_TRIES, EmbeddedLog, SegmentCleaned
from tests.streams.bus.publishers import LARGE, SMALL, SPEC, files, publish, records, stored


class Once:
    """A fault that acts the first time a point is passed."""

    def __init__(self, point: str, act: Callable[[], object]) -> None:
        self.point, self.act, self.passed = point, act, 0

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.passed += 1
            if self.passed == 1:
                self.act()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EmbeddedLog]:
    made = EmbeddedLog(tmp_path)
    made.create(SPEC)
    yield made
    made.close()


def index_rows(folder: Path, question: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(folder / "clicks" / "index.db") as connection:
        rows = connection.execute(question).fetchall()
    connection.close()
    return rows


def pending(folder: Path) -> int:
    return len(index_rows(folder, "SELECT id FROM segments WHERE visible = 0"))


# Segments


def test_a_small_publish_needs_no_file_and_a_large_one_has_one_for_all_partitions(
    log: EmbeddedLog, tmp_path: Path
):
    publish(log, "a", 1, 10, SMALL)
    assert files(tmp_path) == set()
    publish(log, "a", 11, 20, LARGE)
    assert len(files(tmp_path)) == 1 and pending(tmp_path) == 0


def test_a_segment_file_is_an_arrow_stream(log: EmbeddedLog, tmp_path: Path):
    publish(log, "a", 1, 10, LARGE)
    (name,) = files(tmp_path)
    with pa.ipc.open_stream((tmp_path / "clicks" / name).read_bytes()) as stream:
        assert [batch.num_rows for batch in stream] == [10, 10]


def test_a_repeated_large_publish_writes_no_file(log: EmbeddedLog, tmp_path: Path):
    publish(log, "a", 1, 10, LARGE)
    before = files(tmp_path)
    assert publish(log, "a", 1, 10, LARGE).trimmed == {0: 10, 1: 10}
    assert files(tmp_path) == before and pending(tmp_path) == 0


def test_the_index_knows_the_times_of_what_is_visible(log: EmbeddedLog, tmp_path: Path):
    publish(log, "a", 1, 10)
    publish(log, "a", 5, 20, LARGE)
    times = index_rows(tmp_path, "SELECT partition, ts_min, ts_max FROM batches ORDER BY partition, first")
    assert times == [(0, 1, 10), (0, 11, 20), (1, 1, 10), (1, 11, 20)]


def test_commits_are_synced_to_disk(log: EmbeddedLog):
    index, _ = log._of("clicks")
    with index.reading() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA busy_timeout").fetchone() == (10_000,)


def test_a_handle_can_be_pickled(log: EmbeddedLog):
    publish(log, "a", 1, 10)
    copy = pickle.loads(pickle.dumps(log))
    assert stored(copy, 0) == list(range(1, 11))
    copy.close()


def test_a_handle_works_again_after_close(log: EmbeddedLog):
    publish(log, "a", 1, 10)
    log.close()
    assert stored(log, 0) == list(range(1, 11))


def test_births_can_be_given(tmp_path: Path):
    assert EmbeddedLog(tmp_path, new_birth=lambda: "cafe").create(SPEC).birth == "cafe"


# Races between the look and the commit


def test_records_that_appear_between_look_and_commit_are_trimmed_in_the_commit(
    log: EmbeddedLog, tmp_path: Path
):
    """A twin publishes 1..15 to one partition and 1..5 to the other while our segment of 1..20 is being written."""

    def twin() -> None:
        batches = {0: records(1, 15, LARGE), 1: records(1, 5)}
        log.publish("clicks", producer="a", epoch=1, batches=batches, gapless=True)

    slow = EmbeddedLog(tmp_path, fault=Once("write:after", twin))
    done = publish(slow, "a", 1, 20, LARGE)
    assert (done.appended, done.trimmed) == ({0: 5, 1: 15}, {0: 15, 1: 5})
    assert stored(log, 0) == stored(log, 1) == list(range(1, 21))
    assert [b.column("note")[0].as_py() for b in log.read("clicks", 1, 0, 20)] == [SMALL, LARGE]


def test_a_publish_overtaken_completely_leaves_no_file(log: EmbeddedLog, tmp_path: Path):
    slow = EmbeddedLog(tmp_path, fault=Once("write:after", lambda: publish(log, "a", 1, 20)))
    assert publish(slow, "a", 1, 20, LARGE).trimmed == {0: 20, 1: 20}
    assert files(tmp_path) == set() and pending(tmp_path) == 0
    assert stored(log, 0) == list(range(1, 21))


@pytest.mark.parametrize(("note", "point"), [(SMALL, "none"), (LARGE, "write:after"), (LARGE, "sync:after")])
def test_a_publisher_fenced_while_it_writes_shows_nothing(
    log: EmbeddedLog, tmp_path: Path, note: str, point: str
):
    slow = EmbeddedLog(tmp_path, fault=Once(point, lambda: log.fence("clicks", "a", 2)))
    if point == "none":
        log.fence("clicks", "a", 2)
    with pytest.raises(Fenced):
        publish(slow, "a", 1, 10, note)
    assert log.end_offsets("clicks") == (0, 0) and files(tmp_path) == set() and pending(tmp_path) == 0


def test_a_publisher_whose_file_was_cleaned_publishes_again(log: EmbeddedLog, tmp_path: Path):
    fault = Once("sync:after", lambda: log.clean(now_ms=0, older_than_ms=0))
    slow = EmbeddedLog(tmp_path, fault=fault)
    assert publish(slow, "a", 1, 10, LARGE).appended == {0: 10, 1: 10}
    assert fault.passed == 2
    assert stored(log, 0) == list(range(1, 11)) and len(files(tmp_path)) == 1 and pending(tmp_path) == 0


def test_a_publish_that_is_always_cleaned_gives_up_by_name(log: EmbeddedLog, tmp_path: Path):
    tries = []

    def fault(point: str) -> None:
        if point == "sync:after":
            tries.append(log.clean(now_ms=0, older_than_ms=0))

    with pytest.raises(SegmentCleaned) as caught:
        publish(EmbeddedLog(tmp_path, fault=fault), "a", 1, 10, LARGE)
    assert caught.value.what and caught.value.why and caught.value.fix
    assert tries == [1] * PUBLISH_TRIES
    assert log.end_offsets("clicks") == (0, 0) and files(tmp_path) == set()


def test_a_commit_whose_answer_was_lost_keeps_its_file(log: EmbeddedLog, tmp_path: Path):
    """Written, but the caller hears an error: clearing up must not take a visible file."""

    def lose_the_answer() -> None:
        raise OutcomeUnknown("no answer")

    slow = EmbeddedLog(tmp_path, fault=Once("publish:after", lose_the_answer))
    with pytest.raises(OutcomeUnknown):
        publish(slow, "a", 1, 10, LARGE)
    assert stored(log, 0) == list(range(1, 11))
    assert publish(slow, "a", 1, 10, LARGE).trimmed == {0: 10, 1: 10}


# The cleaner


class Died(Exception):
    """Stands for a process that ended at this point."""


def die() -> None:
    raise Died


@pytest.mark.parametrize(
    "point", ["register:after", "write:before", "write:after", "sync:after", "publish:before"]
)
def test_what_a_dead_publisher_left_goes_after_its_time(log: EmbeddedLog, tmp_path: Path, point: str):
    with pytest.raises(Died):
        publish(EmbeddedLog(tmp_path, fault=Once(point, die)), "a", 1, 10, LARGE)
    assert pending(tmp_path) == 1
    assert log.clean(now_ms=5000, older_than_ms=1000) == 0  # seen for the first time
    assert log.clean(now_ms=5999, older_than_ms=1000) == 0
    assert log.clean(now_ms=6000, older_than_ms=1000) == 1
    assert pending(tmp_path) == 0 and files(tmp_path) == set()


def test_the_cleaner_never_takes_what_is_visible(log: EmbeddedLog, tmp_path: Path):
    publish(log, "a", 1, 10, LARGE)
    publish(log, "a", 11, 20)
    assert log.clean(now_ms=10**15, older_than_ms=0) == 0
    assert stored(log, 0) == list(range(1, 21))


def test_a_cleaner_that_dies_between_row_and_file_is_finished_by_the_next(log: EmbeddedLog, tmp_path: Path):
    with pytest.raises(Died):
        publish(EmbeddedLog(tmp_path, fault=Once("sync:after", die)), "a", 1, 10, LARGE)
    with pytest.raises(Died):
        EmbeddedLog(tmp_path, fault=Once("give_up:after", die)).clean(now_ms=0, older_than_ms=0)
    assert pending(tmp_path) == 0 and len(files(tmp_path)) == 1
    assert log.clean(now_ms=0, older_than_ms=0) == 1
    assert files(tmp_path) == set()


def test_a_creator_that_died_leaves_no_category_and_goes(log: EmbeddedLog, tmp_path: Path):
    (tmp_path / ".new-dead").mkdir()
    (tmp_path / ".new-dead" / "index.db").touch()
    assert [category.spec.name for category in log.categories()] == ["clicks"]
    assert log.clean(now_ms=5000, older_than_ms=1000) == 0  # seen for the first time
    assert log.clean(now_ms=5999, older_than_ms=1000) == 0
    assert log.clean(now_ms=6000, older_than_ms=1000) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["clicks"]


# Damage


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.9999])
def test_one_flipped_bit_in_a_segment_is_named(log: EmbeddedLog, tmp_path: Path, part: float):
    publish(log, "a", 1, 10, LARGE)
    (name,) = files(tmp_path)
    ((position, length),) = index_rows(tmp_path, "SELECT position, length FROM batches WHERE partition = 1")
    assert isinstance(position, int) and isinstance(length, int)
    flip(tmp_path / "clicks" / name, position + int(length * part))
    with pytest.raises(CorruptData) as caught:
        stored(log, 1)
    assert name in caught.value.what and caught.value.why and caught.value.fix
    assert stored(log, 0) == list(range(1, 11))  # the other partition's batch is whole


def test_one_flipped_bit_in_a_small_publish_is_named(log: EmbeddedLog, tmp_path: Path):
    publish(log, "a", 1, 10)
    ((payload,),) = index_rows(tmp_path, "SELECT payload FROM segments")
    assert isinstance(payload, bytes)
    damaged = payload[:-20] + bytes([payload[-20] ^ 1]) + payload[-19:]
    with sqlite3.connect(tmp_path / "clicks" / "index.db") as connection:
        connection.execute("UPDATE segments SET payload = ?", (damaged,))
    connection.close()
    with pytest.raises(CorruptData, match=r"index\.db segment"):
        stored(log, 1)


def test_a_file_that_is_gone_or_cut_off_is_named(log: EmbeddedLog, tmp_path: Path):
    publish(log, "a", 1, 10, LARGE)
    (name,) = files(tmp_path)
    path = tmp_path / "clicks" / name
    os.truncate(path, 100)
    with pytest.raises(CorruptData, match="cut off"):
        stored(log, 0)
    path.unlink()
    with pytest.raises(CorruptData, match="gone"):
        stored(log, 0)


def test_rows_missing_from_the_index_are_a_hole_not_a_skip(log: EmbeddedLog, tmp_path: Path):
    for first in (1, 11, 21):
        publish(log, "a", first, first + 9)
    for first, left in ((10, [0, 20]), (0, [20]), (20, [])):
        with sqlite3.connect(tmp_path / "clicks" / "index.db") as connection:
            connection.execute("DELETE FROM batches WHERE first = ?", (first,))
        connection.close()
        assert index_rows(tmp_path, "SELECT first FROM batches WHERE partition = 0") == [(n,) for n in left]
        with pytest.raises(CorruptData, match="hole"):
            stored(log, 0)


def test_a_damaged_index_is_named(log: EmbeddedLog, tmp_path: Path):
    log.close()
    (tmp_path / "clicks" / "index.db").write_bytes(b"no database" * 1000)
    with pytest.raises(CorruptData):
        EmbeddedLog(tmp_path).describe("clicks")


def test_an_index_of_another_version_is_named(log: EmbeddedLog, tmp_path: Path):
    index_rows(tmp_path, "PRAGMA user_version = 99")
    with pytest.raises(EnvironmentProblem) as caught:
        EmbeddedLog(tmp_path).describe("clicks")
    assert "99" in caught.value.why


# Full disks


def no_room() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("point", ["write:before", "write:after"])
def test_no_room_for_a_segment_is_named_and_leaves_nothing(log: EmbeddedLog, tmp_path: Path, point: str):
    slow = EmbeddedLog(tmp_path, fault=Once(point, no_room))
    with pytest.raises(DiskFull) as caught:
        publish(slow, "a", 1, 10, LARGE)
    assert caught.value.what and caught.value.why and caught.value.fix
    assert files(tmp_path) == set() and pending(tmp_path) == 0 and stored(log, 0) == []
    publish(slow, "a", 1, 10, LARGE)
    assert stored(log, 0) == list(range(1, 11))


def test_no_room_for_a_category_leaves_none(tmp_path: Path):
    log = EmbeddedLog(tmp_path, fault=Once("create:before", no_room))
    with pytest.raises(DiskFull):
        log.create(SPEC)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotFound):
        log.describe("clicks")
    log.create(SPEC)
    assert stored(log, 0) == []


@pytest.mark.parametrize("note", [SMALL * 400, LARGE], ids=["index", "files"])
def test_a_full_disk_is_named_nothing_is_half_visible_and_work_goes_on(small_disk: Path, note: str):
    """Publish until the disk is full, look, make room, publish the same again."""
    log, acknowledged = EmbeddedLog(small_disk), 0
    log.create(SPEC)
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 900_000)
    error: PenstockError | None = None
    while error is None:
        assert acknowledged < 10_000
        try:
            publish(log, "a", acknowledged + 1, acknowledged + 10, note)
            acknowledged += 10
        except DiskFull as full:
            error = full
    assert acknowledged > 0 and error.what and error.why and error.fix
    assert stored(log, 0) == stored(log, 1) == list(range(1, acknowledged + 1))
    with pytest.raises(DiskFull):
        publish(log, "a", acknowledged + 1, acknowledged + 10, note)
    ballast.unlink()
    publish(log, "a", acknowledged + 1, acknowledged + 10, note)
    log.close()
    again = EmbeddedLog(small_disk)
    assert stored(again, 0) == stored(again, 1) == list(range(1, acknowledged + 11))
    again.clean(now_ms=0, older_than_ms=0)
    assert pending(small_disk) == 0
    again.close()
