"""The API that application developers see."""

from __future__ import annotations

import doctest
from dataclasses import dataclass

import pytest

from penstock.core.errors import PipelineError
from penstock.streams.dsl import computation
from penstock.streams.dsl.computation import Computation, Context, Record, Timer, Value, record_type
from penstock.streams.step.keyed_work import KeyedWork, try_computation
from penstock.streams.step.watermark import Cut


def test_the_example_in_the_docstring_runs() -> None:
    results = doctest.testmod(computation)
    assert results.attempted >= 4
    assert results.failed == 0


@dataclass
class Model:
    """A user's own type."""

    mean: float = 0.0
    seen: int = 0


class Everything(Computation):
    """One value of each kind."""

    outputs = {"out": {"n": "bigint"}, "other": {}}
    number = Value(int)
    best = Value(float, default=-1.0)
    names = Value(list[str])
    seen = Value(set[int])
    counts = Value(dict[int, int])
    last = Value(str | None)
    model = Value(Model, default=Model())
    raw = Value(bytes)

    def process_record(self, record: Record, ctx: Context) -> None:
        state = ctx.state
        state.number += 1
        state.names.append(ctx.key)
        state.seen.add(record.ts)
        state.counts[record.ts] = 1
        state.last = ctx.key
        state.model.seen += 1
        state.raw += b"x"
        ctx.produce({"n": state.number})
        ctx.produce({}, stream="other")


def run_once(states: dict[str, bytes], *records: tuple[str, int]) -> dict[str, bytes | None]:
    work = KeyedWork(Everything(), job="j", low=0, states=states)
    made = [record_type(())(key, ts, False, ()) for key, ts in records]
    work.run(made, range(len(made)), [])
    return work.state_changes()


def test_values_start_empty_or_at_their_default_and_no_two_keys_share_one() -> None:
    first, second = Everything.state_type(), Everything.state_type()
    assert (first.number, first.best, first.names, first.seen, first.counts, first.last, first.raw) == (
        0, -1.0, [], set(), {}, None, b"",
    )  # fmt: skip
    assert first.names is not second.names
    assert first.model is not second.model
    assert first == second


def test_state_survives_from_step_to_step() -> None:
    first = run_once({}, ("a", 5), ("b", 6), ("a", 7))
    assert set(first) == {"a", "b"}
    stored = {key: value for key, value in first.items() if value is not None}
    second = run_once(stored, ("a", 9))
    assert set(second) == {"a"}
    state = Everything.state_codec.decode(second["a"] or b"")
    assert (state.number, state.names, state.seen, state.last) == (3, ["a", "a", "a"], {5, 7, 9}, "a")
    assert (state.model, state.raw, state.counts) == (Model(seen=3), b"xxx", {5: 1, 7: 1, 9: 1})


def test_a_key_that_did_not_change_is_not_written() -> None:
    class Reads(Computation):
        count = Value(int)

        def process_record(self, record: Record, ctx: Context) -> None:
            assert ctx.state.count == 4

    work = KeyedWork(Reads(), job="j", low=0, states={"a": b"\x81\xa5count\x04"})
    work.run([record_type(())("a", 1, False, ())], [0], [])
    assert work.state_changes() == {}


def test_columns_are_attributes_and_items() -> None:
    record = record_type(("query", "key", "not an identifier"))("k", 7, False, ("cats", "inner", 3))
    assert (record.key, record.ts, record.late, record.query) == ("k", 7, False, "cats")
    assert (record["query"], record["key"], record["not an identifier"]) == ("cats", "inner", 3)
    assert record.as_dict() == {"query": "cats", "key": "inner", "not an identifier": 3}
    assert "cats" in repr(record)
    with pytest.raises(AttributeError, match="no column 'qury'"):
        _ = record.qury
    with pytest.raises(KeyError):
        _ = record["qury"]


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"late": "later"}, "late is 'later'"),
        ({"outputs": {"out": {"n": "number"}}}, "out.n: number"),
        ({"outputs": {"out": {"_seq": "bigint"}}}, "underscore"),
        ({"value": Value(object, default=None)}, None),
    ],
)
def test_a_wrong_declaration_is_refused_when_the_class_is_made(
    members: dict[str, object], said: str | None
) -> None:
    if said is None:  # msgspec can hold any object; it cannot be typed, but it can be stored
        assert type("Loose", (Computation,), members).state_type().value is None
        return
    with pytest.raises(PipelineError, match=said):
        type("Wrong", (Computation,), members)


def test_a_value_without_an_empty_form_needs_a_default() -> None:
    with pytest.raises(PipelineError, match="needs a default"):
        Value(Model)


def test_a_value_that_cannot_be_stored_is_refused() -> None:
    with pytest.raises(PipelineError, match="cannot be stored"):
        type("Wrong", (Computation,), {"value": Value(dict[int, int] | dict[str, str] | None)})


def test_values_are_inherited() -> None:
    class More(Everything):
        more = Value(int)

    assert set(More.state_type.__struct_fields__) == {*Everything.state_type.__struct_fields__, "more"}


@pytest.mark.parametrize("events", [[("a", 1)]])
def test_missing_hooks_are_named(events: list[tuple[str, int]]) -> None:
    class Silent(Computation):
        pass

    class Sets(Computation):
        def process_record(self, record: Record, ctx: Context) -> None:
            ctx.set_timer("t", 5)

    with pytest.raises(Exception, match="cannot process records"):
        try_computation(Silent(), events)
    with pytest.raises(Exception, match="cannot process timers"):
        try_computation(Sets(), events)


def test_a_timer_knows_its_tag_time_and_hold() -> None:
    fired: list[Timer] = []

    class Fires(Computation):
        def process_record(self, record: Record, ctx: Context) -> None:
            ctx.set_timer("a", 500)
            ctx.set_timer("b", 500, hold_ms=record.ts)
            ctx.set_timer("gone", 400)
            ctx.delete_timer("gone")
            ctx.set_timer("moved", 100)
            ctx.set_timer("moved", 450)

        def process_timer(self, timer: Timer, ctx: Context) -> None:
            assert ctx.key == timer.key
            fired.append(timer)

    work = KeyedWork(Fires(), job="j", low=0)
    work.run([record_type(())("k", 50, False, ())], [0], [Cut(position=1, low=500)])
    assert fired == [Timer("k", "moved", 450, 449), Timer("k", "a", 500, 499), Timer("k", "b", 500, 50)]
    assert work.timer_changes()[0] == ()


def test_productions_may_have_another_key_stream_and_stamp() -> None:
    class Sends(Computation):
        outputs = {"out": {"n": "bigint"}, "alerts": {"text": "string", "level": "int"}}

        def process_record(self, record: Record, ctx: Context) -> None:
            ctx.produce({"n": None})
            ctx.produce({"level": 2, "text": "high"}, stream="alerts", ts=record.ts + 5, key="team")

    assert try_computation(Sends(), [("k", 10)]) == [
        ("out", 10, "k", {"n": None}),
        ("alerts", 15, "team", {"text": "high", "level": 2}),
    ]
