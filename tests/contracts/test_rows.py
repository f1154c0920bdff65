"""What every row store must do, on every implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.core.errors import Fenced, IntervalMissing, VersionMoved
from penstock.streams.bus.log import LOW_MAX, LOW_MIN
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.postgres import PostgresRows
from penstock.streams.rows.row_store import (
    LIFE_SEQ,
    Changes,
    Intent,
    IntervalRef,
    IntervalRow,
    RowStore,
    ScannedState,
    key_after,
)
from penstock.streams.rows.sqlite import SqliteRows
from tests.contracts.intervals import REF, a_timer, an_outbox_row, commit


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> RowStore:
    if request.param == "memory":
        return MemoryRows()
    if request.param == "sqlite":
        return SqliteRows(tmp_path / "rows")
    return PostgresRows(request.getfixturevalue("postgres").new_database())


@pytest.fixture
def owned(rows: RowStore) -> IntervalRow:
    rows.create(REF, offsets={"in": 5}, low=LOW_MIN)
    return rows.acquire(REF, generation=1, shard_epoch=7)


def test_a_new_interval_has_no_owner_and_the_offsets_of_its_plan(rows: RowStore) -> None:
    assert not rows.exists(REF)
    rows.create(REF, offsets={"in": 5}, low=-1)
    row = rows.peek(REF)
    assert rows.exists(REF)
    assert (row.token, row.generation, row.shard_epoch, row.offsets, row.input_low, row.output_low) == (
        0, 0, 0, {"in": 5}, -1, -1,
    )  # fmt: skip


def test_creating_again_adds_only_inputs_it_does_not_know(rows: RowStore, owned: IntervalRow) -> None:
    commit(rows, owned, offsets={"in": 9}, input_low=70)
    rows.create(REF, offsets={"in": 0, "other": 4}, low=LOW_MIN)
    row = rows.peek(REF)
    assert (row.offsets, row.input_low, row.token) == ({"in": 9, "other": 4}, 70, owned.token)


def test_another_birth_gets_rows_of_its_own_and_leaves_the_old_ones_alone(
    rows: RowStore, owned: IntervalRow
) -> None:
    reset = replace(REF, birth="i2")
    rows.create(reset, offsets={"in": 0}, low=LOW_MIN)
    assert rows.peek(REF) == owned
    assert (rows.peek(reset).token, rows.peek(reset).birth) == (0, "i2")


@pytest.mark.parametrize(
    "ref", [replace(REF, partition=4), replace(REF, birth="i2"), replace(REF, job_birth="j2")]
)
def test_a_missing_interval_or_another_birth_is_never_an_empty_state(
    rows: RowStore, owned: IntervalRow, ref: IntervalRef
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: rows.acquire(ref, generation=9, shard_epoch=9),
        lambda: rows.fence(ref, generation=9),
        lambda: rows.snapshot(ref, token=owned.token, keys=(), timers_up_to=0),
        lambda: rows.commit(ref, token=owned.token, version=owned.version, changes=Changes()),
        lambda: rows.delivered(ref, token=owned.token, ids=()),
        lambda: rows.peek(ref),
    ]
    for call in calls:
        with pytest.raises(IntervalMissing):
            call()
    assert not rows.exists(ref)
    assert rows.peek(REF) == owned


def test_each_acquire_gives_a_new_token_and_smaller_pairs_are_fenced(
    rows: RowStore, owned: IntervalRow
) -> None:
    assert (owned.token, owned.generation, owned.shard_epoch) == (1, 1, 7)
    assert rows.acquire(REF, generation=1, shard_epoch=7).token == 2
    assert rows.acquire(REF, generation=2, shard_epoch=0).token == 3  # the pair is ordered: generation first
    for generation, shard_epoch in ((1, 99), (0, 0), (2, -1)):
        with pytest.raises(Fenced):
            rows.acquire(REF, generation=generation, shard_epoch=shard_epoch)
    assert rows.peek(REF).token == 3


def test_a_fence_raises_the_pair_and_the_token_once(rows: RowStore, owned: IntervalRow) -> None:
    assert rows.fence(REF, generation=2) == 2
    assert rows.fence(REF, generation=2) == 2
    assert rows.fence(REF, generation=1) == 2
    row = rows.peek(REF)
    assert (row.generation, row.shard_epoch, row.token) == (2, 0, 2)
    with pytest.raises(Fenced):
        rows.acquire(REF, generation=1, shard_epoch=99)
    assert rows.acquire(REF, generation=2, shard_epoch=0).token == 3


def test_an_old_token_neither_reads_nor_writes(rows: RowStore, owned: IntervalRow) -> None:
    new = rows.acquire(REF, generation=1, shard_epoch=7)
    for call in (
        lambda: rows.snapshot(REF, token=owned.token, keys=(), timers_up_to=0),
        lambda: rows.commit(REF, token=owned.token, version=new.version, changes=Changes(input_low=9)),
        lambda: rows.delivered(REF, token=owned.token, ids=[1]),
        # A token from the future is as wrong as one from the past.
        lambda: rows.commit(REF, token=new.token + 1, version=new.version, changes=Changes(input_low=9)),
    ):
        with pytest.raises(Fenced):
            call()
    assert rows.peek(REF) == new


def test_what_is_sent_under_the_name_of_a_life_has_a_counter_of_its_own(
    rows: RowStore, owned: IntervalRow
) -> None:
    row = commit(rows, owned, outbox=(an_outbox_row(), an_outbox_row(first=LIFE_SEQ + 1, count=3)))
    assert row.next_seq == {"o1:0": 3, "o1:0~": LIFE_SEQ + 4}
    row = commit(rows, row, outbox=(an_outbox_row(first=LIFE_SEQ + 4), an_outbox_row(first=3, count=1)))
    assert row.next_seq == {"o1:0": 4, "o1:0~": LIFE_SEQ + 6} and rows.peek(REF) == row
    stored = rows.snapshot(REF, token=row.token, keys=(), timers_up_to=0)
    assert [out.in_life for out in stored.outbox] == [False, True, True, False]


def test_a_step_is_written_whole(rows: RowStore, owned: IntervalRow) -> None:
    intent = Intent(ranges={"in": (5, 9)}, package="p", plan={"stages": [1]}, plan_hash="h")
    row = commit(
        rows,
        owned,
        offsets={"in": 9},
        input_low=800,
        event_time_max={"in": 950},
        states={"k": b"one", "l": b""},
        timers_set=(
            a_timer("k", "b", 1000),
            a_timer("k", "a", 1000),
            a_timer("j", "z", 1000),
            a_timer(at_ms=2000),
        ),
        outbox=(an_outbox_row(), an_outbox_row(partition=1, count=1)),
        intent=intent,
        counters={"records": 4},
    )
    assert row == rows.peek(REF)
    assert row.version == owned.version + 1
    assert (row.offsets, row.input_low, row.event_time_max) == ({"in": 9}, 800, {"in": 950})
    assert (row.next_seq, row.intent, row.counters) == ({"o1:0": 3, "o1:1": 2}, intent, {"records": 4})
    stored = rows.snapshot(REF, token=row.token, keys=["k", "l", "none"], timers_up_to=1999)
    assert stored.row == row
    assert stored.states == {"k": b"one", "l": b""}
    assert [(timer.key, timer.tag) for timer in stored.timers] == [("j", "z"), ("k", "a"), ("k", "b")]
    assert stored.outbox == (
        replace(an_outbox_row(), id=1),
        replace(an_outbox_row(partition=1, count=1), id=2),
    )


def test_what_is_not_named_stays_as_it_was(rows: RowStore, owned: IntervalRow) -> None:
    intent = Intent(ranges={"in": (5, 9)}, package="p", plan={}, plan_hash="h")
    first = commit(
        rows, owned, offsets={"in": 9}, input_low=800, states={"k": b"1"}, intent=intent, counters={"a": 1}
    )
    second = commit(rows, first, offsets={"other": 2}, states={"l": b"2"}, counters={"a": 2, "b": 1})
    assert (second.offsets, second.input_low, second.intent) == ({"in": 9, "other": 2}, 800, intent)
    assert second.counters == {"a": 3, "b": 1}
    third = commit(rows, second, states={"k": None}, clear_intent=True)
    assert third.intent is None
    assert rows.snapshot(REF, token=1, keys=["k", "l"], timers_up_to=0).states == {"l": b"2"}


def test_a_lost_race_of_twins_changes_nothing(rows: RowStore, owned: IntervalRow) -> None:
    first = commit(rows, owned, offsets={"in": 9}, states={"k": b"1"})
    with pytest.raises(VersionMoved):
        commit(rows, owned, offsets={"in": 7}, states={"k": b"2"})
    assert rows.peek(REF) == first
    assert rows.snapshot(REF, token=1, keys=["k"], timers_up_to=0).states == {"k": b"1"}


def test_a_refused_change_leaves_nothing_behind(rows: RowStore, owned: IntervalRow) -> None:
    """Sequences with a gap, or offsets that go back, are bugs; the write they are part of must vanish as a whole."""
    for wrong in ({"outbox": (an_outbox_row(first=2),)}, {"offsets": {"in": 4}}):
        with pytest.raises(AssertionError):
            commit(rows, owned, states={"k": b"1"}, timers_set=(a_timer(),), **wrong)
    stored = rows.snapshot(REF, token=owned.token, keys=["k"], timers_up_to=LOW_MAX)
    assert (stored.row, stored.states, stored.timers, stored.outbox) == (owned, {}, (), ())


def test_the_states_of_due_timers_come_unasked(rows: RowStore, owned: IntervalRow) -> None:
    row = commit(
        rows, owned, states={"k": b"1", "l": b"2"}, timers_set=(a_timer("k"), a_timer("l", at_ms=5000))
    )
    assert rows.snapshot(REF, token=row.token, keys=(), timers_up_to=1000).states == {"k": b"1"}
    assert rows.snapshot(REF, token=row.token, keys=["l"], timers_up_to=1000).states == {"k": b"1", "l": b"2"}


def test_a_timer_set_again_moves_and_a_deleted_one_is_gone(rows: RowStore, owned: IntervalRow) -> None:
    row = commit(rows, owned, timers_set=(a_timer(), a_timer("l")))
    moved = a_timer(at_ms=3000, hold_ms=20, late=True)
    row = commit(rows, row, timers_set=(moved,), timers_deleted=(("l", "t"), ("none", "t")))
    assert rows.snapshot(REF, token=row.token, keys=(), timers_up_to=LOW_MAX).timers == (moved,)


def test_output_low_is_held_by_holds_and_undelivered_productions(rows: RowStore, owned: IntervalRow) -> None:
    row = commit(
        rows, owned, input_low=1000, outbox=(an_outbox_row(ts_min=300),), timers_set=(a_timer(at_ms=601),)
    )
    assert (row.input_low, row.output_low) == (1000, 300)
    row = rows.delivered(REF, token=row.token, ids=[1])
    assert row.output_low == 600
    row = commit(rows, row, timers_deleted=(("k", "t"),))
    assert row.output_low == 1000


def test_late_timers_and_productions_hold_nothing(rows: RowStore, owned: IntervalRow) -> None:
    row = commit(
        rows,
        owned,
        input_low=1000,
        outbox=(an_outbox_row(ts_min=LOW_MAX),),
        timers_set=(a_timer(at_ms=5, late=True),),
    )
    assert row.output_low == 1000


def test_wall_timers_are_a_set_of_their_own(rows: RowStore, owned: IntervalRow) -> None:
    low, wall = a_timer("a"), a_timer("b", wall=True)
    row = commit(rows, owned, states={"a": b"1", "b": b"2"}, timers_set=(low, wall, a_timer("c", at_ms=2000)))

    def due(timers_up_to: int, wall_up_to: int) -> object:
        stored = rows.snapshot(
            REF, token=row.token, keys=(), timers_up_to=timers_up_to, wall_up_to=wall_up_to
        )
        return stored.timers, dict(stored.states)

    assert rows.snapshot(REF, token=row.token, keys=(), timers_up_to=1999).timers == (low,)
    assert due(1999, 999) == ((low,), {"a": b"1"})
    assert due(999, 1000) == ((wall,), {"b": b"2"})
    assert due(1000, 1000) == ((low, wall), {"a": b"1", "b": b"2"})
    assert due(LOW_MIN, LOW_MIN) == ((), {})


def test_wall_timers_come_after_the_others_each_in_their_order(rows: RowStore, owned: IntervalRow) -> None:
    timers = [a_timer(key, tag, at) for at in (5, 6) for key in "ab" for tag in (f"x{at}", f"y{at}")]
    wall = [replace(timer, tag=f"w{timer.tag}", at_ms=timer.at_ms - 4, wall=True) for timer in timers]
    row = commit(rows, owned, timers_set=(*reversed(wall), *reversed(timers)))
    stored = rows.snapshot(REF, token=row.token, keys=(), timers_up_to=LOW_MAX, wall_up_to=LOW_MAX)
    assert stored.timers == (*timers, *wall)


def test_a_wall_timer_holds_nothing(rows: RowStore, owned: IntervalRow) -> None:
    row = commit(rows, owned, input_low=1000, timers_set=(a_timer(at_ms=5, wall=True),))
    assert row.output_low == 1000
    row = commit(rows, row, input_low=3000, timers_set=(a_timer(at_ms=2001),))
    assert row.output_low == 2000, "the same tag, now a low-watermark timer"
    row = commit(rows, row, timers_set=(a_timer(at_ms=2001, wall=True),))
    assert row.output_low == 3000


def test_one_tag_is_one_timer_of_either_kind(rows: RowStore, owned: IntervalRow) -> None:
    row = commit(rows, owned, timers_set=(a_timer(),))
    row = commit(rows, row, timers_set=(a_timer(wall=True),))
    stored = rows.snapshot(REF, token=row.token, keys=(), timers_up_to=LOW_MAX, wall_up_to=LOW_MAX)
    assert stored.timers == (a_timer(wall=True),)
    row = commit(rows, row, timers_deleted=(("k", "t"),))
    assert rows.snapshot(REF, token=row.token, keys=(), timers_up_to=LOW_MAX, wall_up_to=LOW_MAX).timers == ()


def test_lows_never_go_back(rows: RowStore, owned: IntervalRow) -> None:
    row = commit(rows, owned, input_low=1000)
    row = commit(rows, row, input_low=400, timers_set=(a_timer(at_ms=101),))
    assert (row.input_low, row.output_low) == (1000, 1000)


def test_ids_of_the_outbox_are_never_used_twice(rows: RowStore, owned: IntervalRow) -> None:
    """A slow twin that marks row 1 as delivered again must not hit a newer row."""
    row = commit(rows, owned, outbox=(an_outbox_row(),))
    row = rows.delivered(REF, token=row.token, ids=[1])
    row = commit(rows, row, outbox=(an_outbox_row(first=3),))
    after = rows.delivered(REF, token=row.token, ids=[1])
    assert after.version == row.version + 1
    (left,) = rows.snapshot(REF, token=row.token, keys=(), timers_up_to=0).outbox
    assert (left.id, left.first_seq) == (2, 3)


def test_any_text_may_be_a_key(rows: RowStore, owned: IntervalRow) -> None:
    keys = ["", "nul\x00inside", "ünïcode", "😀", "' OR 1=1 --", "a" * 10_000]
    row = commit(
        rows,
        owned,
        states={key: key.encode() for key in keys},
        timers_set=tuple(a_timer(key, key) for key in keys),
    )
    stored = rows.snapshot(REF, token=row.token, keys=keys, timers_up_to=1000)
    assert stored.states == {key: key.encode() for key in keys}
    assert [timer.key for timer in stored.timers] == sorted(keys)


def test_ten_thousand_keys_in_one_step(rows: RowStore, owned: IntervalRow) -> None:
    keys = [f"key {number}" for number in range(10_000)]
    row = commit(
        rows, owned, states=dict.fromkeys(keys, b"x" * 20), timers_set=tuple(a_timer(key) for key in keys)
    )
    stored = rows.snapshot(REF, token=row.token, keys=keys, timers_up_to=1000)
    assert (len(stored.states), len(stored.timers)) == (10_000, 10_000)


def test_states_are_looked_at_page_by_page_without_ownership(rows: RowStore, owned: IntervalRow) -> None:
    keys = ["", "nul\x00", *(f"{n:03d}" for n in range(50)), "ü", "😀"]
    row = commit(rows, owned, states={key: key.encode() for key in keys})
    rows.fence(REF, generation=9)
    found, start = [], ""
    while page := rows.scan(REF, start=start, limit=7):
        assert len(page) <= 7
        found += page
        start = key_after(page[-1].key)
    assert found == [ScannedState(key=key, value=key.encode()) for key in sorted(keys)]
    assert rows.scan(REF, start="049", limit=1)[0].key == "049"
    assert rows.scan(REF, start="nul", limit=1)[0].key == "nul\x00"
    assert row.version + 1 == rows.peek(REF).version, "looking writes nothing"


def test_timers_are_looked_at_page_by_page(rows: RowStore, owned: IntervalRow) -> None:
    timers = [a_timer(key, tag, wall=tag == "w") for key in ("", "a", "b") for tag in ("", "t", "w")]
    commit(rows, owned, timers_set=tuple(reversed(timers)))
    found, start = [], ("", "")
    while page := rows.scan_timers(REF, start=start, limit=2):
        found += page
        start = (page[-1].key, key_after(page[-1].tag))
    assert [one.timer for one in found] == timers
    assert [(one.key, one.tag) for one in found] == [(timer.key, timer.tag) for timer in timers]


def test_looking_at_an_interval_that_is_not_there_is_an_error(rows: RowStore, owned: IntervalRow) -> None:
    other = replace(REF, birth="i2")
    looks: tuple[Callable[[IntervalRef], object], ...] = (
        lambda ref: rows.scan(ref, start="", limit=5),
        lambda ref: rows.scan_timers(ref, start=("", ""), limit=5),
    )
    for look in looks:
        assert look(REF) == ()
        with pytest.raises(IntervalMissing):
            look(other)


def test_a_look_is_one_moment_while_the_owner_goes_on(rows: RowStore, owned: IntervalRow) -> None:
    row = commit(rows, owned, states={"a": b"1", "b": b"2"}, timers_set=(a_timer("a", "t"),))
    with rows.view(REF) as moment:
        assert moment.row == row
        (first,) = moment.states(start="", limit=1)
        newer = commit(rows, row, states={"b": None, "c": b"3"}, timers_deleted=(("a", "t"),))
        rest = moment.states(start=key_after(first.key), limit=9)
        assert [(found.key, found.value) for found in (first, *rest)] == [("a", b"1"), ("b", b"2")]
        assert [found.tag for found in moment.timers(start=("", ""), limit=9)] == ["t"]
        assert moment.row.version == newer.version - 1
    assert [found.key for found in rows.scan(REF, start="", limit=9)] == ["a", "c"]
    assert rows.scan_timers(REF, start=("", ""), limit=9) == ()
    assert (rows.peek(REF).token, rows.peek(REF).version) == (owned.token, newer.version)
