"""How many keys a step's interval keeps, and the bytes of their state: counted as it goes, never looked up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.system_clock import SystemClock
from penstock.streams.bus.log import LOW_MAX
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.dsl.windows import Firing, Spans, session, sliding, tumbling
from penstock.streams.inspect.state_view import decode_block
from penstock.streams.operators.blocks import INDEX
from penstock.streams.places import open_rows
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.row_store import Changes, IntervalRef, IntervalRow, StoredSize, unseen_names
from penstock.streams.step.stateful import StateCache
from penstock.streams.step.step import TaskDescriptor
from tests.contracts.intervals import full_count, said
from tests.streams.operator_world import REF, Event, Low, OperatorWorld, Rec
from tests.streams.step_world import REF as STEP_REF
from tests.streams.step_world import SMALL_LOG, World
from tests.streams.test_load import a_task
from tests.streams.test_windows import a_world, logs, window_plan

UPDATES = Firing(early_ms=5, late="update", lateness_ms=30)
WINDOWS = [
    (tumbling(20), Firing()),
    (sliding(30, every=10), Firing()),
    (tumbling(20), UPDATES),
    (sliding(20, every=10), replace(UPDATES, mode="discarding")),
]


class NotedRows(MemoryRows):
    """Notes the states that a step changes and has not read."""

    def __init__(self) -> None:
        super().__init__()
        self.unseen: list[str] = []

    def commit(self, ref: IntervalRef, *, token: int, version: int, changes: Changes) -> IntervalRow:
        self.unseen += unseen_names(self.peek(ref), changes)
        return super().commit(ref, token=token, version=version, changes=changes)


def keys_in_blocks(world: OperatorWorld) -> int:
    """Keys of every block, one by one."""
    found = world.rows.scan(REF, start="", limit=10_000)
    return sum(len(list(decode_block(row.key, row.value or b""))) for row in found if row.key != INDEX)


def read_all(world: OperatorWorld, cuts: list[int], *, check: bool = True) -> None:
    """To the end of the input, in steps of these sizes."""
    step, end = world.open(), world.log.end_offsets("in0")[0]
    for turn in range(10_000):
        (at,) = world.rows.peek(REF).offsets.values()
        world.step(step, [at], [min(end, at + cuts[turn % len(cuts)])])
        kept = world.rows.peek(REF).kept
        assert kept is not None
        if check:
            assert (kept.keys or 0) == keys_in_blocks(world)
        if at == end:
            return


@pytest.mark.parametrize(("spans", "firing"), WINDOWS)
@settings(max_examples=25)
@given(
    events=logs(size=60),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    deaths=st.lists(st.integers(0, 30), max_size=2),
)
def test_keys_of_windows_are_those_of_their_blocks_after_every_step(
    spans: Spans, firing: Firing, events: list[Event], cuts: list[int], deaths: list[int]
):
    world = a_world(events, spans, firing=firing)
    for at in deaths:
        world.live_and_die(cuts, at)
    read_all(world, cuts)


def test_a_key_that_is_in_several_blocks_counts_in_each_and_is_gone_with_its_window():
    events = [Rec(key=key, ts=1, values=(1,)) for key in "aabb"]
    world = a_world(events, tumbling(20))
    read_all(world, [1])
    kept = world.rows.peek(REF).kept
    assert kept is not None and kept.keys == 4 and said(kept) == full_count(world.rows, REF)
    world._append(Low(low=LOW_MAX))
    read_all(world, [1])
    assert world.rows.peek(REF).kept == StoredSize(rows=0, bytes=0, keys=0)


def test_keys_of_windows_that_an_older_version_wrote_are_counted_by_the_next_step():
    events: list[Event] = [Rec(key=key, ts=ts, values=(1,)) for ts, key in enumerate("abacab")]
    world = a_world(events, tumbling(3))
    read_all(world, [2])
    rows = world.rows
    assert isinstance(rows, MemoryRows)
    found = rows._of(REF)
    before = found.row.kept
    assert before is not None and before.keys is not None
    found.row = replace(found.row, kept=replace(before, keys=None))  # as an acquire counts them
    world._append(Rec(key="z", ts=1, values=(1,)))
    read_all(world, [2])
    kept = world.rows.peek(REF).kept
    assert kept is not None and kept.keys == before.keys + 1


@pytest.mark.parametrize("cache", [None, 10**6])
@pytest.mark.parametrize(
    ("spans", "firing"), [*WINDOWS[:2], (session(gap=9), Firing()), (session(gap=9), UPDATES)]
)
def test_no_step_of_a_window_makes_the_store_look(spans: Spans, firing: Firing, cache: int | None):
    events: list[Event] = []
    for number in range(60):
        events.append(Rec(key="abc"[number % 3], ts=number, values=(number,)))
        events += [Low(low=number - 4)] if number % 7 == 0 else []
    plain = a_world([], spans, firing=firing)
    rows = NotedRows()
    world = replace(plain, rows=rows, log=MemoryLog(), cache=None if cache is None else StateCache(cache))
    world.build([*events, Low(low=LOW_MAX)])
    read_all(world, [3, 11], check=False)
    assert rows.unseen == []


@pytest.mark.parametrize("cache", [None, 10**6])
def test_no_step_of_a_computation_makes_the_store_look(cache: int | None):
    rows = NotedRows()
    world = World(rows=rows, log=MemoryLog(), cache=None if cache is None else StateCache(cache))
    world.build(SMALL_LOG).live([2, 1])
    assert rows.unseen == []
    kept = rows.peek(STEP_REF).kept
    assert said(kept) == full_count(rows, STEP_REF)
    assert kept is not None and kept.rows == 3


# --- what a task says of it


def seen(task: TaskDescriptor) -> dict[str, float]:
    from penstock.streams.spark.load import LoadMeter

    found = LoadMeter(task, trigger_ms=1000).measure(None, at_s=1.0, now_ms=SystemClock().now_ms())
    return {name: value for name, value in found.items() if name in ("key_count", "state_bytes")}


def keep(task: TaskDescriptor, number: int, **changes: Any) -> None:
    """Write to one of a task's intervals."""
    owned, rows = task.intervals[number], open_rows(task.rows)
    row = rows.peek(owned.ref)
    rows.commit(owned.ref, token=owned.token, version=row.version, changes=Changes(**changes))


def test_a_task_tells_what_its_intervals_keep_together(tmp_path: Path):
    task = a_task(tmp_path, offsets=(0, 0)).with_config(kind="stateful")
    assert seen(task) == {"key_count": 0, "state_bytes": 0}
    keep(task, 0, states={"a": b"12", "b": b"3"})
    keep(task, 1, states={"c": b"4567"})
    assert seen(task) == {"key_count": 3, "state_bytes": 10}
    keep(task, 0, states={"a": None})
    assert seen(task) == {"key_count": 2, "state_bytes": 7}
    assert seen(task.with_config(kind="stateless")) == {}


def test_a_task_with_windows_tells_of_keys_not_of_blocks(tmp_path: Path):
    plan = {"computation": window_plan(tumbling(20))}
    task = a_task(tmp_path, offsets=(0, 0)).with_config(kind="stateful", plan=plan)
    keep(task, 0, states={"0:0:0:1": b"block", INDEX: b"i"}, keys=40)
    assert seen(task) == {"key_count": 40, "state_bytes": 19}, "the other interval has none"
    keep(task, 1, states={"0:0:0:1": b"block"})
    assert seen(task) == {"state_bytes": 31}, "rows that no step has counted yet: unknown is not zero"


def test_what_nobody_has_counted_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    task = a_task(tmp_path, offsets=(0, 0)).with_config(kind="stateful")
    with monkeypatch.context() as older:
        older.setattr("penstock.streams.rows.row_store._kept_json", lambda row: {})
        keep(task, 1, states={"a": b"1"})
    assert seen(task) == {}
    open_rows(task.rows).acquire(task.intervals[1].ref, generation=1, shard_epoch=1)
    assert seen(task) == {"key_count": 1, "state_bytes": 2}
