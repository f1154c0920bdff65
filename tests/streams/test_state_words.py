"""What every operator and kind of computation stores is shown in words by `penstock state`, through real jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pytest

from penstock import ListState, MapState, Opaque, Pipeline, VectorComputation, session, sliding, tumbling
from penstock.streams.dsl.computation import Computation, Context, Record, Value
from penstock.streams.dsl.pipeline import Stream
from penstock.streams.inspect.state_view import StatefulJob, StateView, decode_state
from penstock.streams.trial.pipeline import PipelineRun

COLUMNS = [["shop", "string"], ["amount", "bigint"], ["name", "string"]]
SALES = {"name": "sales", "partitions": 1, "columns": COLUMNS, "format": "typed", "watermark": "injector"}
RETURNS = {**SALES, "name": "returns"}
OUT = {"out": {"n": "bigint"}}


class Counting(Computation):
    outputs = OUT
    total, best = Value(int), Value(float, default=-1.0)
    seen, names, raw = MapState(int, str | None), ListState(str | None), Opaque()

    def process_record(self, record: Record, ctx: Context) -> None:
        ctx.state.total += record["amount"]
        ctx.state.seen[record.ts] = record["name"]
        ctx.state.names.append(record["name"])
        ctx.state.raw = b"\x01\x02"


class Known(Counting):
    record_id = "name"


class Both(Computation):
    outputs = OUT
    total = Value(int)

    def process_record(self, record: Record, ctx: Context) -> None:
        ctx.state.total += record["amount"] if record.stream == "sold" else -record["less"]


class Latest(VectorComputation):
    outputs = OUT
    state = {"amount": "bigint", "name": "string"}

    def process_batch(self, records: pa.Table, states: pa.Table) -> tuple[pa.Table, Mapping[str, pa.Table]]:
        last = records.take([records.num_rows - 1]).select(["_key", "amount", "name"])
        return last, {}


def returned(p: Pipeline) -> Stream:
    """The other stream, its name called otherwise."""
    return p.source("returns").select("shop", "amount AS less", "name AS other").key_by("shop", name="back")


class Jobs:
    """A pipeline in memory after some records, and what its jobs with state keep."""

    def __init__(self, build: Callable[[Pipeline, Stream], Stream]) -> None:
        p = Pipeline("p", partitions=1)
        build(p, p.source("sales").key_by("shop")).sink("out")
        self.run = PipelineRun(p, SALES, RETURNS)
        trial = self.run.trial
        self.view = StateView(trial.log, trial.rows)
        self.jobs = [
            StatefulJob(name=name, birth=job.birth, config=job.config)
            for name, job in trial.jobs.items()
            if job.config.kind == "stateful"
        ]
        for job in self.jobs:
            # With a second writer, of whom nothing was heard, what came waits for its end.
            if job.computation.get("operator") in ("combine", "top"):
                trial.log.register_producer(job.config.inputs[0].category, "slow")

    def feed(self) -> None:
        """Two records, a low behind which results are early, one more, and one of the other stream."""
        self.run.record("sales", 1000, "x", shop="x", amount=3, name="a")
        self.run.record("sales", 1200, "x", shop="x", amount=4, name=None)
        self.run.record("returns", 1100, "x", shop="x", amount=2, name="r")
        self.run.advance_watermark(4000)
        self.run.record("sales", 4500, "x", shop="x", amount=5, name="c")

    def lines(self) -> Iterator[tuple[StatefulJob, dict[str, Any]]]:
        """All that is shown, by every way to ask."""
        for job in self.jobs:
            for found in self.view.scan(job)["states"]:
                yield job, found
            for line in self.view.export(job, 0):
                yield job, line
                if not line["key"].startswith(("\x00", "#")) and job.computation.get("operator") != "partial":
                    key = "x" if job.computation["keys"] != ["window_start"] else line["key"]
                    yield from ((job, found) for found in self.view.get(job, key)["states"])


Build = Callable[[Pipeline, Stream], Stream]
FIRINGS: dict[str, dict[str, Any]] = {
    "on time": {},
    "early": {"early": "1s"},
    "early, discarding": {"early": "1s", "mode": "discarding"},
    "late": {"late": "update", "lateness": "1h"},
    "early and late": {"early": "1s", "late": "update", "lateness": "1h"},
}
SPANS = {
    "tumbling": tumbling("10s"),
    "sliding": sliding("10s", every="2s"),
    "session": session(gap="10s"),
}
VALUES = ("sum(amount) AS n", "max(name) AS m", "approx_count_distinct(name) AS d")
CASES: dict[str, Build] = {
    f"{kind}, {when}": lambda p, s, spans=spans, firing=firing: s.window(spans, **firing).aggregate(*VALUES)
    for kind, spans in SPANS.items()
    for when, firing in FIRINGS.items()
}
CASES |= {
    f"{kind} in two phases": lambda p, s, spans=spans: s.window(spans).aggregate(*VALUES, two_phase=True)
    for kind, spans in {**SPANS, "tumbling": tumbling("2s")}.items()
    if kind != "session"
}
CASES |= {
    "join by distance": lambda p, s: s.join(returned(p), within=("9s", "9s")),
    "join by window": lambda p, s: s.join(returned(p), window=tumbling("20s")),
    "dedup within": lambda p, s: s.dedup(within="1h"),
    "dedup by window": lambda p, s: s.dedup(window=tumbling("1h")),
    "top": lambda p, s: s.window(tumbling("1s")).aggregate("sum(amount) AS n").top(2, by="n"),
    "computation": lambda p, s: s.process(Counting),
    "computation with ids": lambda p, s: s.process(Known),
    "computation of two inputs": lambda p, s: p.process(Both, sold=s, back=returned(p)),
    "table computation": lambda p, s: s.process(Latest),
}


@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
def test_what_is_stored_is_shown_in_words(build: Build):
    jobs = Jobs(build)
    jobs.feed()
    lines = list(jobs.lines())
    assert {job.name for job, _ in lines} == {job.name for job in jobs.jobs}, "each keeps something"
    for job, line in lines:
        assert "problem" not in line and isinstance(line["state"], dict), (job.name, line)
        assert "hex" not in line["state"], (job.name, line)
        json.dumps(line, allow_nan=False)


def test_no_operator_is_left_out():
    planned = {
        job.computation.get("operator") or job.computation["class"]
        for build in CASES.values()
        for job in Jobs(build).jobs
    }
    assert {"aggregate", "partial", "combine", "join", "dedup", "top"} <= planned
    assert {"Counting", "Known", "Both", "Latest"} <= planned and len(planned) == 10


def state_of(case: str, key: str = "x") -> Any:
    jobs = Jobs(CASES[case])
    jobs.feed()
    (found,) = [line["state"] for line in jobs.view.scan(jobs.jobs[-1])["states"] if line["key"] == key]
    return found


def test_a_dedup_says_until_when_it_repeats_and_what_waits():
    record = {"shop": "x", "amount": 5, "name": "c"}
    assert state_of("dedup within") == {"given_until": 1000 + 3_600_000, "waiting": []}
    jobs = Jobs(lambda p, s: s.dedup(within="1s"))
    jobs.feed()
    (line,) = jobs.view.scan(jobs.jobs[0])["states"]
    assert line["state"] == {"given_until": None, "waiting": [{"ts": 4500, "record": record}]}


def test_sessions_with_early_results_say_what_is_new_and_what_was_given():
    found = state_of("session, early")
    ((new,), (given,)) = (found[name]["sessions"] for name in ("new", "given"))
    assert (new["_cell"], new["end.max"], new["0.sum"], new["1.max"]) == (1000, 14_500, 5, "c")
    assert (given["_cell"], given["end.max"], given["0.sum"], given["1.max"]) == (1000, 14_500, 7, "a")
    (late,) = state_of("session, late")["new"]["sessions"]
    assert late["0.sum"] == 12
    (plain,) = state_of("session, on time")["sessions"]
    assert plain["0.sum"] == 12 and plain["end.max"] == 14_500


def test_a_list_of_the_first_is_shown_with_ranks():
    assert state_of("top", "1000") == {
        "top": [{"rank": 1, "shop": "x", "window_start": 1000, "window_end": 2000, "n": 7}]
    }


def test_values_maps_lists_and_bytes_are_shown():
    assert state_of("computation") == {
        "total": 12,
        "best": -1.0,
        "seen": {"1000": "a", "1200": None, "4500": "c"},
        "names": ["a", None, "c"],
        "raw": {"hex": "0102", "bytes": 2},
    }
    assert state_of("computation of two inputs") == {"total": 10}
    assert state_of("table computation") == {"amount": 5, "name": "c"}


@pytest.mark.parametrize("operator", ["dedup", "top", "join", "aggregate"])
def test_rows_of_another_plan_are_bytes_with_the_reason(operator: str):
    plan = {"operator": operator, "window": {"kind": "session"}, "columns": [[["k", "string"]]] * 2}
    for value in (
        b"\x92\x01\x91\x93\x01\x02\x03",
        b"\x91\x93\x01\x09\xc3",
    ):  # [1, [[1, 2, 3]]], [[1, 9, true]]
        found = decode_state(plan, "k", value, ["a"])
        assert "does not match the job's plan" in found["problem"] and found["state"]["hex"] == value.hex()
