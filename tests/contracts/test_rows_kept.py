"""What an interval's row says of its states is what a full count finds, on every implementation of the row store."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest

from penstock.core.errors import Fenced, VersionMoved
from penstock.streams.bus.log import LOW_MIN
from penstock.streams.rows import postgres as postgres_bulk
from penstock.streams.rows import postgres_server as postgres_tables
from penstock.streams.rows import sqlite as sqlite_rows
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.postgres import PostgresRows
from penstock.streams.rows.row_store import PREFIX, Changes, IntervalRow, RowStore, StoredSize, record_of_row
from penstock.streams.rows.sqlite import SqliteRows
from tests.contracts.intervals import REF, a_timer, an_outbox_row, commit, full_count, said

KEYS = ("", "a", "key 2", "ünïcode", "😀", "nul\x00inside", "k" * 300, f"{PREFIX}index", f"{PREFIX}i5:ff")
SEEDS = {"memory": 60, "sqlite": 25, "postgres": 8}


class Died(BaseException):
    """A process that is gone."""


@dataclass(slots=True)
class Place:
    """One row store: with faults, and with the row written as an older version of Penstock does."""

    rows: RowStore
    faulty: Callable[[Callable[[str], None]], RowStore] | None = None
    write_raw: Callable[[IntervalRow], None] | None = None

    def create(self) -> IntervalRow:
        self.rows.create(REF, offsets={"in": 5}, low=LOW_MIN)
        return self.rows.acquire(REF, generation=1, shard_epoch=1)


def place_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> Place:
    if kind == "memory":
        return Place(MemoryRows())
    if kind == "sqlite":

        def write_file(row: IntervalRow) -> None:
            raw = sqlite3.connect(folder / "j1" / "p00003-i1.db")
            raw.execute(sqlite_rows._WRITE_ROW, record_of_row(row))
            raw.commit()
            raw.close()

        return Place(SqliteRows(folder), lambda fault: SqliteRows(folder, fault=fault), write_file)
    url = request.getfixturevalue("postgres").new_database()

    def write_table(row: IntervalRow) -> None:
        with psycopg.connect(url) as raw:
            raw.execute(postgres_tables.WRITE_ROW, (*record_of_row(row), 1))

    return Place(PostgresRows(url), lambda fault: PostgresRows(url, fault=fault), write_table)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(request.param, request, tmp_path / "rows")


@pytest.fixture(params=["sqlite", "postgres"])
def durable(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(request.param, request, tmp_path / "rows")


def some_changes(random: Random, rows: RowStore, row: IntervalRow) -> Changes:
    """States set, replaced and deleted; of some the step has read what was there."""
    names = random.sample(KEYS, random.randint(0, len(KEYS)))
    states = {
        name: None if random.random() < 0.3 else random.randbytes(random.choice([0, 1, 7, 900]))
        for name in names
    }
    read = [name for name in KEYS if random.random() < 0.5]
    found = rows.snapshot(REF, token=row.token, keys=read, timers_up_to=LOW_MIN).states
    return Changes(
        states=states,
        before={name: len(found[name]) if name in found else None for name in read},
        timers_set=(a_timer(random.choice("ab")),),
        outbox=(an_outbox_row(first=row.next_seq.get("o1:0", 1)),) if random.random() < 0.3 else (),
    )


def one_turn(random: Random, place: Place, row: IntervalRow) -> IntervalRow:
    """A write, a repeated one, one that is refused or dies, or another owner. Returns the row as it stands."""
    rows = place.rows
    changes = some_changes(random, rows, row)
    turn = random.choice(["commit", "commit", "twice", "zombie", "refused", "dies", "owner", "sent"])
    if turn == "owner":
        return rows.acquire(REF, generation=1, shard_epoch=1)
    if turn == "sent":
        return rows.delivered(REF, token=row.token, ids=range(100))
    if turn == "zombie":
        with pytest.raises(Fenced):
            rows.commit(REF, token=row.token - 1, version=row.version, changes=changes)
    elif turn == "refused":
        with pytest.raises(AssertionError):
            rows.commit(
                REF, token=row.token, version=row.version, changes=replace(changes, offsets={"in": 1})
            )
    elif turn == "dies" and place.faulty is not None:
        at = random.choice(["begin", "commit", "committed"])

        def die(point: str) -> None:
            if point == at:
                raise Died

        with pytest.raises(Died):
            place.faulty(die).commit(REF, token=row.token, version=row.version, changes=changes)
        with suppress(VersionMoved):  # the same batch once more: done already, or done now
            rows.commit(REF, token=row.token, version=row.version, changes=changes)
    else:
        new = rows.commit(REF, token=row.token, version=row.version, changes=changes)
        if turn == "twice":
            with pytest.raises(VersionMoved):
                rows.commit(REF, token=row.token, version=row.version, changes=changes)
        return new
    return rows.peek(REF)


@pytest.mark.parametrize("kind", list(SEEDS))
def test_totals_are_what_a_full_count_finds_whatever_is_written_repeated_or_refused(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    for seed in range(SEEDS[kind]):
        place, random = place_of(kind, request, tmp_path / str(seed)), Random(seed)
        row = place.create()
        for turn in range(25):
            row = one_turn(random, place, row)
            assert said(row.kept) == full_count(place.rows), (kind, seed, turn)
            assert row == place.rows.peek(REF), (kind, seed, turn)


def test_a_new_interval_keeps_nothing_and_another_birth_begins_anew(place: Place) -> None:
    row = place.create()
    assert row.kept == StoredSize(rows=0, bytes=0)
    row = commit(place.rows, row, states={"k": b"12345"}, keys=7)
    assert row.kept == StoredSize(rows=1, bytes=6, keys=7)
    row = commit(place.rows, row, states={"k": b"1"}, before={"k": 5})
    assert row.kept == StoredSize(rows=1, bytes=2, keys=7), "who says nothing of keys leaves them as they are"
    reset = replace(REF, birth="i2")
    place.rows.create(reset, offsets={"in": 0}, low=LOW_MIN)
    assert place.rows.peek(reset).kept == StoredSize(rows=0, bytes=0)


def test_timers_outbox_and_ids_of_records_are_no_state(place: Place) -> None:
    row = place.create()
    row = commit(
        place.rows,
        row,
        states={f"{PREFIX}index": b"many", f"{PREFIX}i5:ff": b"", "k": b"1"},
        timers_set=(a_timer(),),
        outbox=(an_outbox_row(),),
    )
    assert row.kept == StoredSize(rows=1, bytes=2)


def test_ownership_changes_and_deliveries_hand_the_totals_on(place: Place) -> None:
    row = commit(place.rows, place.create(), states={"k": b"1"}, outbox=(an_outbox_row(),), keys=3)
    kept = row.kept
    assert place.rows.delivered(REF, token=row.token, ids=[1]).kept == kept
    place.rows.fence(REF, generation=2)
    assert place.rows.peek(REF).kept == kept
    assert place.rows.acquire(REF, generation=2, shard_epoch=0).kept == kept
    place.rows.create(REF, offsets={"other": 1}, low=LOW_MIN)
    assert place.rows.peek(REF).kept == kept


def older_rows(place: Place, states: dict[str, bytes]) -> IntervalRow:
    """Rows as a version of Penstock wrote them that does not count."""
    assert place.write_raw is not None
    row = commit(place.rows, place.create(), states=states)
    place.write_raw(replace(row, kept=None))
    return place.rows.peek(REF)


def test_rows_of_an_older_version_are_unknown_until_they_are_acquired(
    durable: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_bulk, "ROWS_PER_COUNT", 3)  # pages of three
    states = {f"key {n}": b"x" * n for n in range(11)} | {"": b"e", "ü": b"", f"{PREFIX}index": b"ids"}
    row = older_rows(durable, states)
    assert row.kept is None
    row = commit(durable.rows, row, states={"key 1": None, "new": b"1"})
    assert row.kept is None, "unknown is not zero"
    row = durable.rows.acquire(REF, generation=1, shard_epoch=1)
    assert said(row.kept) == full_count(durable.rows) == (13, 9 * 5 + 6 + 54 + 1 + 2 + 4)
    row = commit(durable.rows, row, states={"new": None})
    assert said(row.kept) == full_count(durable.rows)


def test_what_an_older_version_writes_in_between_is_found_and_counted_again(durable: Place) -> None:
    """It hands on the totals it found among the counters, and does not change them."""
    assert durable.write_raw is not None
    row = commit(durable.rows, durable.create(), states={"k": b"1"})
    counters: Any = {**row.counters, "kept": [row.version, 1, 2, None]}
    durable.write_raw(replace(row, version=row.version + 1, counters=counters, kept=None))
    assert durable.rows.peek(REF).kept is None
    row = durable.rows.acquire(REF, generation=1, shard_epoch=1)
    assert row.kept == StoredSize(rows=1, bytes=2) and not row.counters


def test_states_that_the_step_has_read_are_not_looked_at_again(durable: Place) -> None:
    """A false claim of what was there shows in the totals, so nothing was looked up."""
    row = commit(durable.rows, durable.create(), states={"k": b"12345"})
    row = commit(durable.rows, row, states={"k": b"12345"}, before={"k": 2})
    assert row.kept == StoredSize(rows=1, bytes=9)
    assert said(row.kept) != full_count(durable.rows)
