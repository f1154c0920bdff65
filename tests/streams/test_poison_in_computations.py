"""A record at which user code raises: put aside with all that its hook did undone, or the task stops."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from penstock import testing
from penstock.core.errors import ComputationFailed
from penstock.jobs.config import PackageRef, validate_config
from penstock.streams.catalogue import StaticCatalogue, category_from_json
from penstock.streams.compile.plan import compile_pipeline
from penstock.streams.dsl.computation import Computation, Context, ListState, Record, Timer, Value
from penstock.streams.dsl.pipeline import Pipeline


class Careless(Computation):
    """Does everything it can before it looks whether the record is any good."""

    outputs = {"out": {"n": "bigint"}}
    poison = "skip"
    seen = ListState(int)
    total = Value(int)

    def process_record(self, record: Record, ctx: Context) -> None:
        n = record["n"]
        ctx.state.seen.append(record.ts)
        ctx.state.total += 1
        ctx.produce({"n": record.ts})
        ctx.set_timer("end", 1000 if n >= 0 else 5)
        ctx.set_wall_timer("new" if n < 0 else "wall", 500)
        if n == -1:
            ctx.delete_timer("end")
        if n == -2:
            ctx.produce({"n": "many"})
        if n == -3:
            ctx.state.total = "many"
            return
        if n < 0:
            raise ValueError(f"{n} is negative")

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        if not timer.wall:
            ctx.produce({"n": ctx.state.total})
            ctx.state.total = 0


class Fails(Careless):
    poison = "fail"


def script(run: testing.Run, *, bad: tuple[int, ...] = (-1, -2, -3, -4)) -> None:
    run.record("a", 1, n=1)
    for place, n in enumerate(bad):
        run.record("a", 10 + place, n=n)
    run.record("b", 20, n=2)
    run.record("a", 30, n=3)
    run.advance_watermark(2000)
    for n in bad[:1]:
        run.record("a", 2100, n=n)
    run.record("a", 2200, n=5)
    run.close()


def test_what_a_failed_hook_did_is_undone_and_the_rest_goes_on() -> None:
    run, clean = testing.Run(Careless()), testing.Run(Careless())
    script(run)
    script(clean, bad=())
    for key in ("a", "b"):
        assert run.timers(key) == clean.timers(key)
        assert run.state(key) == clean.state(key)
    assert run.outputs() == clean.outputs() == [{"n": n} for n in (1, 20, 30, 2, 1, 2200, 1)]
    assert run.counters()["poison"] == 5


def test_a_dead_letter_says_what_happened_where_and_holds_the_record() -> None:
    run = testing.Run(Careless())
    script(run)
    letters = run.dead_letters()
    assert [letter["source_offset"] for letter in letters] == [1, 2, 3, 4, 7]
    assert [json.loads(letter["value"]) for letter in letters] == [{"n": n} for n in (-1, -2, -3, -4, -1)]
    assert re.fullmatch(
        r"ValueError: -1 is negative, at test_poison_in_computations\.py:\d+ in process_record "
        r"\(key 'a', stream 'in'\)",
        letters[0]["reason"],
    )
    assert "the value was 'many'" in letters[1]["reason"] and "StateRefused" in letters[2]["reason"]


def test_dead_letters_come_once_through_crashes_and_in_any_cut() -> None:
    def short(run: testing.Run) -> None:
        run.record("a", 1, n=1)
        run.record("a", 2, n=-1)
        run.record("a", 3, n=-2)
        run.advance_watermark(2000)
        run.record("a", 2100, n=-1)

    crashed = testing.crash_everywhere(Careless, short)
    assert crashed.result == testing.cut_everywhere(Careless, short).result
    assert [letter["source_offset"] for letter in crashed.result["dead letters"]] == [1, 2, 3]


def test_without_skip_the_task_stops_at_the_record() -> None:
    run = testing.Run(Fails())
    run.record("a", 1, n=1)
    with pytest.raises(ComputationFailed, match="record at 1"):
        run.record("a", 2, n=-1)


def test_a_timer_that_raises_stops_the_task_in_any_case() -> None:
    class TimerFails(Careless):
        def process_timer(self, timer: Timer, ctx: Context) -> None:
            raise KeyError("x")

    run = testing.Run(TimerFails())
    run.record("a", 1, n=1)
    with pytest.raises(ComputationFailed, match="timer 'end'"):
        run.advance_watermark(1000)


NUMBERS: dict[str, Any] = {"name": "numbers", "partitions": 1, "columns": [["k", "string"], ["n", "bigint"]]}


def test_the_plan_has_a_category_for_the_dead_letters_and_oncall_may_choose_to_stop() -> None:
    p = Pipeline("sums", partitions=2)
    p.source("numbers").key_by("k").process(Careless).sink("totals")
    package = PackageRef(name="sums", version="1", hash="0" * 64, entry="sums.py")
    body = compile_pipeline(p, StaticCatalogue([category_from_json(NUMBERS)]), package).to_json()["jobs"][-1]
    assert body["poison"] == "skip"
    assert [output["category"] for output in body["outputs"]] == ["totals", "sums.careless.dead"]
    assert validate_config(body["name"], {**body, "poison": "fail"}).poison == "fail"

    run = testing.PipelineRun(p, NUMBERS)
    run.record("numbers", 5, k="a", n=1)
    run.record("numbers", 6, k="a", n=-4)
    assert run.outputs("totals") == [{"n": 5}]
    (letter,) = run.dead_letters("sums.careless.dead")
    assert json.loads(letter["value"]) == {"k": "a", "n": -4}
