"""What `penstock plan` says of event times that are not in the records, and of backfills that may differ."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import VectorComputation, tumbling
from penstock.streams.bus.log import CategorySpec
from penstock.streams.catalogue import StaticCatalogue
from penstock.streams.compile.compiled import CompiledPipeline
from penstock.streams.compile.drawing import draw_plan
from penstock.streams.compile.plan import compile_pipeline
from penstock.streams.dsl.computation import Computation, Context, Record, Timer, Value
from penstock.streams.dsl.pipeline import Pipeline
from tests.streams.plans import PACKAGE


class Newest(Computation):
    outputs = {"out": {"ts": "bigint"}}
    newest = Value(int)

    def process_record(self, record: Record, ctx: Context) -> None:
        ctx.state.newest = record.ts


class Visits(Newest):
    outputs = {"out": {"n": "bigint"}}

    def process_record(self, record: Record, ctx: Context) -> None:
        ctx.set_timer("end", record.ts + 1000)

    def process_timer(self, timer: Timer, ctx: Context) -> None:
        ctx.produce({"n": 1})


class Reminder(Visits):
    outputs = {"out": {"n": "bigint"}}

    def process_record(self, record: Record, ctx: Context) -> None:
        [ctx.set_wall_timer(f"{n}", ctx.now + n) for n in range(3)]


class Tables(VectorComputation):
    outputs = {"out": {"n": "bigint"}}

    def process_batch(self, records: Any, states: Any) -> Any:
        return states, {}


def compiled(step: Any = None, **category: Any) -> CompiledPipeline:
    pipeline = Pipeline("shops", partitions=2)
    keyed = pipeline.source("clicks").key_by("shop")
    made = (
        keyed.process(step, name="counts")
        if step
        else keyed.window(tumbling("1m")).aggregate("count(*) AS n")
    )
    made.sink("out")
    given = {
        "name": "clicks",
        "partitions": 1,
        "columns": (("shop", "string"), ("ts", "bigint")),
        "format": "json",
        "watermark": "event_time",
        "ts_column": "ts",
        **category,
    }
    return compile_pipeline(pipeline, StaticCatalogue([CategorySpec(**given)]), PACKAGE)


def test_a_pipeline_over_times_in_its_records_needs_no_notes():
    assert compiled().notes == () and "what to know" not in draw_plan(compiled())


@pytest.mark.parametrize("watermark", ["event_time", "injector"])
def test_windows_over_a_category_without_a_time_column_are_told_of(watermark: str):
    plan = compiled(ts_column="", watermark=watermark)
    (note,) = plan.notes
    assert "clicks has no time column" in note and "shops.aggregate" in note and "--ts" in note
    assert "what to know:\n - clicks has no time column" in draw_plan(plan)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (Newest, ["Newest gets the records of a key in the order of arrival"]),
        (Visits, ["Visits uses timers"]),
        (Reminder, ["Reminder gets the records", "Reminder sets wall timers"]),
        (Tables, ["Tables gets the records"]),
    ],
)
def test_a_computation_that_may_differ_in_a_backfill_is_told_of(step: Any, said: list[str]):
    notes = compiled(step).notes
    assert [part in note for part, note in zip(said, notes, strict=True)] == [True] * len(said)
    assert all("docs/pipelines.md" in note or "wall timers" in note for note in notes)
    assert all(note.startswith("shops.counts: ") for note in notes)
