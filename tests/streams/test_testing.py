"""The testing kit for users: what it shows, and that it finds computations that do not survive."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

from penstock import testing
from penstock.core.errors import ComputationFailed, PipelineError
from penstock.streams.dsl.computation import Computation, Context, Record, Timer, Value
from tests.streams.step_world import CountPerSecond


class Remembers(Computation):
    """Keeps a count where it does not last."""

    outputs = {"out": {"n": "bigint"}}
    seen: Any = None

    def process_record(self, record: Record, ctx: Context) -> None:
        self.seen = (self.seen or 0) + 1
        ctx.produce({"n": self.seen})


class Twice(Computation):
    """Does something outside that a repeat does again."""

    outputs = {"out": {"n": "bigint"}}
    outside: list[str] = []

    def process_record(self, record: Record, ctx: Context) -> None:
        self.outside.append(ctx.key)
        ctx.produce({"n": len(self.outside)})


class Echo(Computation):
    outputs = {"out": {"text": "string", "price": "double"}}

    def process_record(self, record: Record, ctx: Context) -> None:
        ctx.produce({"text": record["text"], "price": record["price"]})


def a_day(run: testing.Run) -> None:
    run.record("a", 100, query="a")
    run.record("b", 300, query="b")
    run.advance_watermark(0)
    run.record("a", 900, query="a")
    run.record("a", 1100, query="a")
    run.advance_watermark(1000)
    run.record("b", 50, query="b")
    run.advance_watermark(3000)


def test_the_example_in_the_docstring_runs() -> None:
    results = doctest.testmod(testing)
    assert results.attempted >= 10
    assert results.failed == 0


def test_a_run_shows_outputs_state_timers_and_counters_as_they_become() -> None:
    run = testing.Run(CountPerSecond())
    run.record("a", 100, query="a")
    run.record("a", 1100, query="a")
    assert run.state("a").counts == {0: 1, 1: 1}
    assert [(timer.tag, timer.at_ms) for timer in run.timers("a")] == [("0", 1000), ("1", 2000)]
    assert run.timers("b") == [] and run.state("b").total == 0
    assert run.outputs("seen") == [{"at": 100}, {"at": 1100}]
    run.advance_watermark(1000)
    assert run.productions() == [
        testing.Produced(ts=999, key="a", values={"query": "a", "second": 0, "n": 1})
    ]
    assert run.low_watermark == 1000
    run.record("a", 900, query="a")
    assert (run.counters()["records"], run.counters()["late"]) == (3, 1)
    run.close()
    assert [row["second"] for row in run.outputs()] == [0, 1]


def test_a_sound_computation_survives_a_crash_after_every_effect_and_every_cut() -> None:
    crashed, cut = (
        testing.crash_everywhere(CountPerSecond, a_day),
        testing.cut_everywhere(CountPerSecond, a_day),
    )
    assert crashed.result == cut.result
    assert crashed.runs > 30 and cut.runs > 100
    assert [row.values["n"] for row in crashed.result["stream 'out', key 'a'"]] == [2, 1]


def test_what_is_kept_on_self_is_gone_after_each_step() -> None:
    run = testing.Run(Remembers())
    run.record("a", 1)
    run.record("a", 2)
    assert run.outputs() == [{"n": 1}, {"n": 1}]


def test_a_computation_that_keeps_things_on_self_is_found_by_other_cuts() -> None:
    def script(run: testing.Run) -> None:
        run.record("a", 1)
        run.record("a", 2)

    with pytest.raises(
        testing.OutputsDiffer, match="stream 'out', key 'a' differs with steps at the end alone"
    ):
        testing.cut_everywhere(Remembers, script)


def test_a_computation_that_acts_outside_is_found_by_a_crash_before_the_commit() -> None:
    def script(run: testing.Run) -> None:
        Twice.outside.clear()
        run.record("a", 1)

    with pytest.raises(testing.OutputsDiffer, match=r"crash before rows.commit \(point \d+\)") as caught:
        testing.crash_everywhere(Twice, script)
    assert "'n': 1" in str(caught.value) and "'n': 2" in str(caught.value)


def test_an_assertion_of_the_script_says_under_which_disturbance_it_failed() -> None:
    def script(run: testing.Run) -> None:
        run.record("a", 1)
        assert run.trial.crashes == 0

    with pytest.raises(AssertionError) as caught:
        testing.crash_everywhere(Remembers, script)
    assert caught.value.__notes__ == ["the script was run with a crash before rows.acquire (point 1)"]


def test_errors_of_user_code_reach_the_test_as_they_reach_a_task() -> None:
    class Fails(Computation):
        outputs = {"out": {}}

        def process_record(self, record: Record, ctx: Context) -> None:
            raise KeyError("price")

    run = testing.Run(Fails())
    with pytest.raises(ComputationFailed, match="job 'Fails', key 'a', record at 0"):
        run.record("a", 1)


def test_the_first_record_or_a_declaration_tells_the_types_of_columns() -> None:
    run = testing.Run(Echo())
    run.record("a", 1, text="x", price=1.5)
    run.record("a", 2, price=2, text=None)
    assert run.outputs() == [{"text": "x", "price": 1.5}, {"text": None, "price": 2.0}]
    declared = testing.Run(Echo(), inputs={"in": {"text": "string", "price": "double"}})
    declared.record("a", 1, text=None, price=None)
    assert declared.outputs() == [{"text": None, "price": None}]


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda run: run.record("a", 2, text="x"), "other columns"),
        (lambda run: run.record("a", 2, text=3, price=1.0), "column 'text' cannot hold 3"),
        (lambda run: run.record("a", 2, "left", text="x", price=1.0), "no input stream 'left'"),
        (lambda run: run.outputs("alerts"), "has no stream 'alerts'"),
        (lambda run: run.advance_watermark(4), "cannot go back from 5 to 4"),
        (lambda run: run.advance_clock(9), "the clock cannot go back from 10 to 9"),
    ],
)
def test_mistakes_in_a_test_are_told(act: Any, said: str) -> None:
    run = testing.Run(Echo())
    run.record("a", 1, text="x", price=1.0)
    run.advance_watermark(5)
    run.advance_clock(10)
    with pytest.raises(PipelineError, match=said):
        act(run)


@pytest.mark.parametrize("columns", [{"text": None}, {"text": object()}, {"_text": 1}])
def test_a_column_whose_type_cannot_be_told_is_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(PipelineError, match="cannot be inferred from"):
        testing.Run(Echo()).record("a", 1, **columns)


def test_a_factory_must_make_a_new_run_each_time() -> None:
    used = testing.Run(Remembers())
    used.record("a", 1)
    with pytest.raises(PipelineError, match="cannot be repeated"):
        testing.cut_everywhere(lambda: used, a_day)


def test_timers_without_end_are_told() -> None:
    class Again(Computation):
        count = Value(int)

        def process_record(self, record: Record, ctx: Context) -> None:
            ctx.set_timer("t", 10)

        def process_timer(self, timer: Timer, ctx: Context) -> None:
            ctx.state.count += 1
            if ctx.state.count < 5:
                ctx.set_timer("t", ctx.low_watermark)

    run = testing.Run(Again())
    run.record("a", 1)
    run.advance_watermark(100)
    assert run.state("a").count == 5 and run.timers("a") == []
