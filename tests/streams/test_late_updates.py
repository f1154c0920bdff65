"""Which late records count is decided record by record where they are read: from the source on, whatever lies
together in a batch. The reference is a loop over the records.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import session, sliding, testing, tumbling
from penstock.streams.bus.log import LOW_MIN, partition_of
from penstock.streams.dsl.pipeline import Pipeline
from penstock.streams.dsl.windows import Spans
from penstock.streams.trial.run import Faults, Schedule

PARTITIONS, LATENESS_MS = 2, 3
CLICKS = {
    "name": "clicks",
    "partitions": PARTITIONS,
    "columns": [["shop", "string"], ["n", "bigint"]],
    "watermark": "event_time",
    "lateness_ms": LATENESS_MS,
    "ahead_max_ms": 0,
}
Click = tuple[str, int, int]  # shop, event time, value
Results = dict[tuple[str, int, int], tuple[int, int]]  # of a shop and window: how many, and their sum


def a_run(spans: Spans, lateness: int, early: int | None = None, mode: str = "accumulating") -> Any:
    pipeline = Pipeline("shops", partitions=2)
    windows = (
        pipeline.source("clicks")
        .filter("n >= 0")
        .key_by("shop")
        .window(spans, early=early, late="update", lateness=lateness, mode=mode)
    )
    windows.aggregate("count(*) AS n", "sum(n) AS total").sink("per_shop")
    return testing.PipelineRun(pipeline, CLICKS)


def lived(run: Any, clicks: list[Click], schedule: Schedule | None = None) -> Any:
    run.prepare(schedule or Schedule(), Faults())
    for shop, ts, n in clicks:
        run.record("clicks", ts, shop, shop=shop, n=n)
    run.close()
    return run


def windows_of(spans: Spans, ts: int) -> list[int]:
    slide = spans.slide_ms or spans.size_ms
    last = ts - ts % slide
    return [start for start in range(last - spans.size_ms + slide, last + 1, slide)]


@dataclass(slots=True)
class Source:
    """The low of each partition of the source, as a record finds it there."""

    newest: dict[int, int] = field(default_factory=dict)

    def low_before(self, shop: str, ts: int) -> int:
        partition = partition_of(shop, PARTITIONS)
        before = self.newest.get(partition)
        self.newest[partition] = ts if before is None else max(before, ts)
        return LOW_MIN if before is None else before - LATENESS_MS


def expected_windows(clicks: list[Click], spans: Spans, lateness: int) -> Results:
    """Each record counts in a window if it is on time, or the low it finds is not beyond the lateness."""
    source, found = Source(), Results()
    for shop, ts, n in clicks:
        low = source.low_before(shop, ts)
        for start in windows_of(spans, ts):
            end = start + spans.size_ms
            if ts >= low or end + lateness > low:
                count, total = found.get((shop, start, end), (0, 0))
                found[shop, start, end] = count + 1, total + n
    return found


def expected_sessions(clicks: list[Click], gap: int, lateness: int) -> Results:
    """The same of the session that a record is alone; sessions that overlap are one."""
    source, found = Source(), Results()
    for shop, ts, n in clicks:
        low = source.low_before(shop, ts)
        if ts < low and ts + gap + lateness <= low:
            continue
        start, end, count, total = ts, ts + gap, 1, n
        for other in [key for key in found if key[0] == shop and key[1] < ts + gap and ts < key[2]]:
            start, end = min(start, other[1]), max(end, other[2])
            count, total = count + found[other][0], total + found.pop(other)[1]
        found[shop, start, end] = count, total
    return found


def final_results(run: Any, mode: str) -> Results:
    """What the results say in the end: the last one of each window, or all of them together."""
    found = Results()
    for row in run.outputs("per_shop"):
        name, said = (row["shop"], row["window_start"], row["window_end"]), (row["n"], row["total"])
        if mode == "accumulating":
            for other in [o for o in found if o[0] == name[0] and o[1] < name[2] and name[1] < o[2]]:
                if (other[2] - other[1]) != (name[2] - name[1]) or other == name:
                    del found[other]  # a session that became longer, or the same window again
            found[name] = said
        else:
            count, total = found.get(name, (0, 0))
            found[name] = count + said[0], total + said[1]
    return found


SPANS = {"tumbling": tumbling(10), "sliding": sliding(30, every=10), "session": session(gap=12)}


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_a_record_beyond_the_lateness_never_counts_also_in_one_batch_with_others(spans: Spans):
    """Before, the record at 2 counted if it came in one batch with the one at 100, and did not if it came in
    the next.
    """
    clicks = [("a", 1, 1), ("a", 100, 10), ("a", 2, 1000)]
    together = lived(a_run(spans, lateness=5), clicks, Schedule(settles=frozenset()))
    apart = lived(a_run(spans, lateness=5), clicks)
    assert final_results(together, "accumulating") == final_results(apart, "accumulating")
    assert {row["n"] for row in together.outputs("per_shop")} == {1}
    for run in (together, apart):
        counted = [
            run.trial.rows.peek(job.ref(p)).counters for job in run.trial.jobs.values() for p in (0, 1)
        ]
        assert sum(counters.get("dropped", 0) for counters in counted) == 1


clicks = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 90), st.integers(0, 99)), max_size=14
)


@settings(max_examples=60, deadline=None)
@given(
    clicks=clicks,
    kind=st.sampled_from(list(SPANS)),
    lateness=st.sampled_from([0, 7, 25]),
    early=st.sampled_from([None, 4]),
    mode=st.sampled_from(["accumulating", "discarding"]),
    seed=st.integers(0, 1000),
)
def test_final_results_are_those_of_a_loop_over_the_records_however_they_are_cut(
    clicks: list[Click], kind: str, lateness: int, early: int | None, mode: str, seed: int
):
    spans, draw = SPANS[kind], random.Random(seed)
    if kind == "session":
        mode = "accumulating"  # a session whose ends moved has earlier results under other ends
    expect: Callable[..., Results] = expected_sessions if kind == "session" else expected_windows
    wanted = expect(clicks, spans.size_ms if kind == "session" else spans, lateness)
    for _ in range(3):
        settles = frozenset(n for n in range(len(clicks)) if draw.random() < 0.4)
        schedule = Schedule(settles=settles, rows_max=draw.choice((1, 2, 3, 1000)))
        run = lived(a_run(spans, lateness, early, mode), clicks, schedule)
        assert final_results(run, mode) == wanted, (settles, schedule.rows_max)
