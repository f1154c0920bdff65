"""A pipeline is changed while it keeps state: the results are right, or the change is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from penstock import Computation, Pipeline, Value, VectorComputation, session, sliding, tumbling
from penstock.jobs.config import validate_config
from penstock.jobs.provision import state_conflict
from penstock.streams.catalogue import LogCatalogue
from penstock.streams.compile.plan import compile_pipeline
from penstock.streams.dsl.computation import Context, Record
from penstock.streams.dsl.windows import Spans, duration_text
from penstock.streams.trial.pipeline import _PACKAGE, PipelineRun
from tests.builders import config_of

SALES = {
    "name": "sales",
    "partitions": 1,
    "columns": [["shop", "string"], ["amount", "bigint"], ["weight", "double"], ["number", "int"]],
    "format": "typed",
    "watermark": "injector",
}
VISITS = {**SALES, "name": "visits", "columns": [["shop", "string"], ["page", "bigint"]]}
Made = Callable[[], Pipeline]


def configs_of(pipeline: Pipeline, run: PipelineRun) -> dict[str, dict[str, Any]]:
    jobs = compile_pipeline(pipeline, LogCatalogue(run.trial.log), _PACKAGE).to_json()["jobs"]
    return {body["name"]: validate_config(body["name"], body).to_json() for body in jobs}


def conflicts(run: PipelineRun, configs: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """By job why these would be refused."""
    before = {name: dict(job.config) for name, job in run.trial.jobs.items()}
    return {
        name: why
        for name, config in configs.items()
        if name in before and (why := state_conflict(config_of(before[name]), config_of(config)))
    }


def release(run: PipelineRun, pipeline: Pipeline) -> dict[str, str]:
    """As a submit and its plan do it: the old tasks stop, the new ones start; nothing if it is refused."""
    configs = configs_of(pipeline, run)
    refused = conflicts(run, configs)
    for config in configs.values() if not refused else ():
        run.trial.add(run._job(config, pipeline.computations))
    return refused


def windows(window: Spans, *values: str, two_phase: bool = False, **firing: Any) -> Made:
    def made() -> Pipeline:
        p = Pipeline("d", partitions=1)
        found = p.source("sales").key_by("shop").window(window, **firing)
        found.aggregate(*values, name="agg", two_phase=two_phase).sink("out")
        return p

    return made


def join(*columns: str, how: str = "inner", within: tuple[str, str] = ("1h", "1h")) -> Made:
    def made() -> Pipeline:
        p = Pipeline("d", partitions=1)
        sales = p.source("sales").select("shop", *columns).key_by("shop", name="by_left")
        visits = p.source("visits").key_by("shop", name="by_right")
        joined = sales.join(visits, within=within, how=how, name="agg")
        joined.select("amount", "number", "page").sink("out")
        return p

    return made


def dedup(*columns: str, **span: Any) -> Made:
    def made() -> Pipeline:
        p = Pipeline("d", partitions=1)
        p.source("sales").select("shop", *columns).key_by("shop").dedup(name="agg", **span).sink("out")
        return p

    return made


def top(count: int, *values: str, **order: Any) -> Made:
    def made() -> Pipeline:
        p = Pipeline("d", partitions=1)
        found = p.source("sales").key_by("shop").window(tumbling("10s")).aggregate(*values, name="first")
        found.top(count, name="agg", **order).sink("out")
        return p

    return made


SUM, TEN = "sum(amount) AS n", tumbling("10s")
REFUSED: list[tuple[Made, Made, str]] = [
    (windows(TEN, SUM), windows(TEN, "count(amount) AS n"), "n (sum of whole numbers), not n (count)"),
    (windows(TEN, SUM), windows(TEN, "max(amount) AS n"), "not n (max of bigint)"),
    (windows(TEN, SUM), windows(TEN, "sum(weight) AS n"), "not n (sum of doubles)"),
    (windows(TEN, "avg(number) AS n"), windows(TEN, "avg(weight) AS n"), "not n (avg of doubles)"),
    (windows(TEN, "max(amount) AS n"), windows(TEN, "max(number) AS n"), "not n (max of int)"),
    (windows(TEN, SUM), windows(TEN, SUM, "count(*) AS m"), "not n (sum of whole numbers), m (count)"),
    (windows(TEN, SUM, "sum(number) AS m"), windows(TEN, "sum(number) AS m", SUM), "its values are n"),
    (windows(TEN, SUM), windows(session(gap="5s"), SUM), "windows are tumbling of 10 s, not sessions of 5 s"),
    (windows(session(gap="30s"), SUM), windows(TEN, SUM), "sessions of 30 s, not tumbling of 10 s"),
    (windows(session(gap="30s"), SUM), windows(session(gap="1m"), SUM), "not sessions of 1 min"),
    (windows(TEN, SUM), windows(tumbling("20s"), SUM), "not tumbling of 20 s"),
    (windows(TEN, SUM), windows(sliding("1m", every="10s"), SUM), "not sliding of 1 min every 10 s"),
    (windows(TEN, SUM), windows(TEN, SUM, early="2s"), "results are one for each window, not several"),
    (windows(TEN, SUM, early="2s", mode="discarding"), windows(TEN, SUM, early="2s"), "not several, accum"),
    (windows(TEN, SUM, early="2s"), windows(TEN, SUM, late="update", lateness="1h"), "updated for 1 h"),
    (windows(TEN, SUM), windows(TEN, SUM, two_phase=True), "the operator 'aggregate'"),
    (
        windows(TEN, SUM, two_phase=True),
        windows(TEN, "max(amount) AS n", two_phase=True),
        "not n (max of bigint)",
    ),
    (join("amount", "number"), join("number", "amount"), "its left columns are shop string, amount bigint"),
    (join("amount", "number"), join("amount", "number", "weight"), "its left columns are"),
    (join("amount", "number"), join("amount", "amount AS number"), "number bigint"),
    (join("amount", "number"), join("amount", "number", within=("1h", "2h")), "1 h before and 2 h after"),
    (dedup("amount", within="1h"), dedup("amount", within="2h"), "dropped for 1 h, not dropped for 2 h"),
    (dedup("amount", within="1h"), dedup("amount", window=tumbling("1h")), "in windows, tumbling of 1 h"),
    (dedup("amount", "number", within="1h"), dedup("number", "amount", within="1h"), "its columns are"),
    (top(3, SUM, by="n"), top(5, SUM, by="n"), "the 3 highest by n, not the 5 highest by n"),
    (top(3, SUM, by="n"), top(3, SUM, by="n", lowest=True), "not the 3 lowest by n"),
]


def a_run(pipeline: Pipeline) -> PipelineRun:
    return PipelineRun(pipeline, SALES, VISITS)


def sale(run: PipelineRun, ts: int, amount: int, shop: str = "x") -> None:
    run.record("sales", ts, shop, shop=shop, amount=amount, weight=amount / 2, number=amount)


@pytest.mark.parametrize(("before", "after", "why"), REFUSED)
def test_a_change_that_old_rows_do_not_fit_is_refused_and_says_why(before: Made, after: Made, why: str):
    # Each has its own bus: sinks of other columns would be refused before.
    old, new = a_run(before()), a_run(after())
    assert why in conflicts(old, configs_of(after(), new))["d.agg"]
    assert conflicts(new, configs_of(before(), old)), "the way back is none either"


KEPT: list[tuple[Made, Made, list[Any]]] = [
    (windows(TEN, SUM), windows(TEN, SUM), [307]),
    (windows(TEN, SUM), windows(TEN, "sum(amount * 2) AS n"), [314]),
    (windows(TEN, "sum(number) AS n"), windows(TEN, SUM), [307]),
    (windows(TEN, "count(*) AS n"), windows(TEN, "count(amount) AS n"), [3]),
    (windows(TEN, SUM), windows(sliding("10s", every="10s"), SUM), [307]),
    (
        windows(TEN, "approx_percentile(amount, 0.9) AS n"),
        windows(TEN, "approx_percentile(amount, 0.0) AS n"),
        [7],
    ),
    (windows(session(gap="30s"), SUM), windows(session(gap="30s"), "sum(amount + 0) AS n"), [307]),
    (windows(TEN, SUM, early="5s"), windows(TEN, SUM, early="4s"), [307, 307]),
    (
        windows(session(gap="30s"), SUM, early="9s"),
        windows(session(gap="30s"), SUM, early="4s"),
        [307, 307],
    ),
    (
        windows(TEN, SUM, two_phase=True),
        windows(TEN, "sum(amount * 2) AS n", two_phase=True),
        [314],
    ),
    (top(3, SUM, by="n"), top(3, "sum(amount * 2) AS n", by="n"), [314]),
]


@pytest.mark.parametrize(("before", "after", "expected"), KEPT)
def test_a_change_that_old_rows_fit_goes_on_from_them(before: Made, after: Made, expected: list[Any]):
    run = a_run(before())
    sale(run, 1000, 100)
    sale(run, 2000, 200)
    assert release(run, after()) == {}
    sale(run, 3000, 7)
    run.advance_watermark(9500)
    run.advance_watermark(200_000)
    assert [row["n"] for row in run.outputs("out")] == expected
    job = run.trial.jobs["d.agg"]
    with run.trial.rows.view(job.ref(0)) as moment:
        assert list(moment.states(start="", limit=9)) == []
    assert run.trial.log.watermark("out") == 200_000


def test_a_join_may_begin_to_tell_of_records_without_a_partner():
    run = a_run(join("amount", "number")())
    sale(run, 1000, 1)
    sale(run, 1000, 2, "y")
    assert release(run, join("amount", "number", how="left")()) == {}
    run.record("visits", 1500, "x", shop="x", page=7)
    run.close()
    told = {row["amount"]: row["page"] for row in run.outputs("out")}
    assert told == {1: 7, 2: None}


def test_partial_results_of_other_values_are_in_another_category():
    """Who gives the state of both phases up must not read what the first one wrote before."""

    def categories(made: Made) -> set[str]:
        configs = configs_of(made(), a_run(made()))
        return {output["category"] for output in configs["d.agg_partial"]["outputs"]}

    same = categories(windows(TEN, SUM, two_phase=True))
    assert same == categories(windows(TEN, "sum(amount * 2) AS n", two_phase=True))
    assert same != categories(windows(TEN, "count(amount) AS n", two_phase=True))


def test_two_phases_whose_windows_become_longer_keep_the_first():
    before = windows(sliding("20s", every="10s"), SUM, two_phase=True)
    found = release(a_run(before()), windows(sliding("30s", every="10s"), SUM, two_phase=True)())
    assert list(found) == ["d.agg"]


class Edges(VectorComputation):
    """The first and the last amount of each key."""

    outputs = {"out": {"first": "bigint", "last": "bigint"}}
    state = {"first": "bigint", "last": "bigint"}

    def process_batch(self, records: pa.Table, states: pa.Table) -> tuple[pa.Table, Mapping[str, pa.Table]]:
        found = records.group_by("_key", use_threads=False).aggregate(
            [("amount", "first"), ("amount", "last"), ("_ts", "max")]
        )
        found = found.join(states.select(["_key", "first"]), "_key")
        first = pc.coalesce(found["first"], found["amount_first"])
        kept = {"_key": found["_key"], "first": first, "last": found["amount_last"]}
        more = {name: pa.nulls(found.num_rows) for name in self.state if name not in kept}
        return pa.table({**kept, **more}), {"out": pa.table({**kept, "_ts": found["_ts_max"]})}


class Turned(Edges):
    """The same columns the other way round."""

    state = {"last": "bigint", "first": "bigint"}


class Longer(Edges):
    """One more column, behind the others."""

    state = {"first": "bigint", "last": "bigint", "more": "string"}


class Inserted(Edges):
    """One more column, before another."""

    state = {"first": "bigint", "more": "string", "last": "bigint"}


def edges(kind: type[VectorComputation]) -> Pipeline:
    p = Pipeline("d", partitions=1)
    p.source("sales").key_by("shop").process(kind, name="edges").sink("out")
    return p


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Turned, "in the order first, last, and last, first is another order"),
        (Inserted, "new columns can only be appended"),
        (Edges, ""),
        (Longer, ""),
    ],
)
def test_columns_of_a_computation_over_tables_stay_in_their_places(kind: type[VectorComputation], why: str):
    run = a_run(edges(Edges))
    sale(run, 1000, 100)
    found = release(run, edges(kind))
    if why:
        assert why in found["d.edges"]
        return
    assert found == {}
    sale(run, 2000, 7)
    assert run.outputs("out")[-1] == {"first": 100, "last": 7}
    back = release(run, edges(Edges))
    assert ("does not declare" in back["d.edges"]) if kind is Longer else back == {}


class Seen(Computation):
    """How many records of either input a key had, and of which the last one was."""

    outputs = {"out": {"n": "bigint", "of": "string"}}
    record_id = "shop"
    n = Value(int)

    def process_record(self, record: Record, ctx: Context) -> None:
        ctx.state.n += 1
        ctx.produce({"n": ctx.state.n, "of": record.stream})


def test_ids_of_records_are_known_again_when_the_inputs_are_written_in_another_order():
    def seen(*names: str) -> Pipeline:
        p = Pipeline("d", partitions=1)
        inputs = {name: p.source(name).key_by("shop", name=f"by_{name}") for name in names}
        p.process(Seen, **inputs).sink("out")
        return p

    run = a_run(seen("sales", "visits"))
    sale(run, 1000, 1)
    assert release(run, seen("visits", "sales")) == {}
    sale(run, 1001, 2)
    run.record("visits", 1002, "x", shop="x", page=1)
    run.record("visits", 1003, "x", shop="x", page=2)
    assert run.outputs("out") == [{"n": 1, "of": "sales"}, {"n": 2, "of": "visits"}]


def test_a_length_of_time_is_told_exactly_and_in_its_largest_unit():
    told = {0: "0 s", 250: "250 ms", 90_000: "90 s", 60_000: "1 min", 3_600_000: "1 h", 86_400_000: "1 d"}
    assert {ms: duration_text(ms) for ms in told} == told
