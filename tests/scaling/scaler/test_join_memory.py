"""Claims about the memory of joins: plans of compiled pipelines, looked at as the scaler looks at jobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock import Pipeline, tumbling
from penstock.jobs.config import validate_config
from penstock.scaling.metrics.frames import MINUTE_MS, Frame
from penstock.scaling.scaler.estimators import MB, Needs, estimate_needs, join_pairs_mb, join_state_mb
from penstock.scaling.scaler.observation import Hold, JoinFacts, ScalerMemory
from penstock.scaling.scaler.observe import ClusterCapacity, ScalableJob, minutes_of, observe
from penstock.scaling.scaler.window import read_window
from tests.scaling.scaler.jobs import START
from tests.streams.plans import jobs_of

LONG_AGO_MS = (START - 10_000) * MINUTE_MS
BYTES = 1000.0  # that one record takes in the state


def a_join(created_ms: int = LONG_AGO_MS, **how: Any) -> ScalableJob:
    """The join of a pipeline, as the compiler makes it and a control plane stores it."""
    p = Pipeline("p", partitions=4)
    asked = p.source("queries").select("query", "lang").key_by("query", name="asked")
    scored = p.source("queries", name="again").select("query", "score").key_by("query", name="scored")
    asked.join(scored, name="paired", **how).sink("pairs")
    plan = jobs_of(p)["p.paired"]
    config = validate_config("p.paired", plan | {"task_count": 2})
    return ScalableJob(
        name="p.paired",
        birth="birth",
        pipeline="p",
        expected_version=1,
        generation=1,
        task_count=2,
        is_settled=True,
        config=config,
        created_ms=created_ms,
        changed_ms=created_ms,
    )


def needs_of(job: ScalableJob, *, rate: float | None = None, minutes: int = 90, **metrics: Any) -> Needs:
    plain = {
        "ingest_rate": 100.0,
        "processed_rate": 100.0,
        "busy_mean": 0.5,
        "lag_records": 10.0,
        "lag_s": 0.0,
        "task_count": 2.0,
        "memory_task_mb": 500.0,
        **metrics,
    }
    values = {name: np.full(minutes, value) if np.isscalar(value) else value for name, value in plain.items()}
    frame = Frame(job=job.name, first_minute=START - minutes, values=values)
    now_ms = START * MINUTE_MS
    observation = observe(job, frame, ScalerMemory(), ClusterCapacity(), now_ms=now_ms)
    assert isinstance(observation.frame, Frame)
    window = read_window(observation)
    assert not isinstance(window, Hold), window
    wanted = window.input_rate if rate is None else rate
    return estimate_needs(window, observation.frame, observation.job, observation.footprint, rate=wanted)


def stepped(before: float, after: float, minutes: int = 5) -> np.ndarray[Any, Any]:
    """A rate that changed so many minutes ago."""
    return np.array([before] * (90 - minutes) + [after] * minutes)


def kept_mb(records: float) -> float:
    return records * BYTES / MB


@pytest.mark.parametrize(
    ("how", "window_s"),
    [
        ({"window": tumbling("30m")}, 1800),
        ({"within": ("10m", "5m")}, 600),
        ({"within": ("0s", "90s"), "how": "left"}, 90),
    ],
)
def test_the_window_is_read_from_the_plan(how: dict[str, Any], window_s: float):
    job = a_join(**how)
    observation = observe(
        job, frame_of_nothing(), ScalerMemory(), ClusterCapacity(), now_ms=START * MINUTE_MS
    )
    assert observation.job.state == "join"
    assert observation.job.join == JoinFacts(window_s=window_s, created_ms=LONG_AGO_MS)


def frame_of_nothing() -> Frame:
    return Frame(job="p.paired", first_minute=START, values={})


def test_other_jobs_have_no_join():
    p = Pipeline("p", partitions=4)
    p.source("queries").key_by("query", name="asked").dedup(within="10m", name="once").sink("out")
    config = validate_config("p.once", jobs_of(p)["p.once"])
    job = ScalableJob(
        name="p.once", birth="b", pipeline="p", expected_version=1, generation=1, task_count=1,
        is_settled=True, config=config,
    )  # fmt: skip
    observation = observe(
        job, frame_of_nothing(), ScalerMemory(), ClusterCapacity(), now_ms=START * MINUTE_MS
    )
    assert observation.job.join is None and observation.job.state == "aggregation"


def test_a_join_that_is_full_keeps_what_it_keeps():
    needs = needs_of(a_join(window=tumbling("30m")), state_bytes=100 * 1800 * BYTES)
    assert needs.memory_split_mb == pytest.approx(kept_mb(100 * 1800))


@pytest.mark.parametrize("how", [{"window": tumbling("30m")}, {"within": ("30m", "0s")}])
def test_a_rate_that_rose_has_yet_to_fill_the_window(how: dict[str, Any]):
    """Plan: three times the input since five minutes, processed as it comes; of thirty minutes 25 are old."""
    rate = stepped(100.0, 300.0)
    records = 60 * (25 * 100 + 5 * 300)
    needs = needs_of(a_join(**how), ingest_rate=rate, processed_rate=rate, state_bytes=records * BYTES)
    assert needs.memory_split_mb == pytest.approx(kept_mb(300 * 1800))


def test_a_short_window_is_full_at_once():
    rate = stepped(100.0, 300.0)
    needs = needs_of(
        a_join(within=("60s", "60s")), ingest_rate=rate, processed_rate=rate, state_bytes=300 * 60 * BYTES
    )
    assert needs.memory_split_mb == pytest.approx(kept_mb(300 * 60))


def test_what_is_kept_stays_for_a_window_when_the_rate_falls():
    rate = stepped(300.0, 100.0)
    records = 60 * (25 * 300 + 5 * 100)
    needs = needs_of(
        a_join(window=tumbling("30m")), ingest_rate=rate, processed_rate=rate, state_bytes=records * BYTES
    )
    assert needs.memory_split_mb == pytest.approx(kept_mb(records))


def test_a_young_join_has_yet_to_fill_its_window():
    """Plan: made twelve minutes ago; a record waits for half an hour. What came before it was made is unknown."""
    job = a_join(created_ms=(START - 12) * MINUTE_MS, window=tumbling("30m"))
    seen = np.array([np.nan] * 79 + [100.0] * 11)
    needs = needs_of(
        job, ingest_rate=seen, processed_rate=seen, task_count=2.0, state_bytes=11 * 60 * 100 * BYTES
    )
    assert needs.memory_split_mb == pytest.approx(kept_mb(100 * 1800))


def test_gaps_in_the_past_leave_it_to_the_rate():
    seen = stepped(np.nan, 100.0, minutes=11)
    needs = needs_of(
        a_join(window=tumbling("30m")), ingest_rate=seen, processed_rate=seen, state_bytes=MB * 100.0, rate=200.0
    )  # fmt: skip
    assert needs.memory_split_mb == pytest.approx(200.0)


def test_disorder_keeps_records_longer_and_lag_does_not():
    """Plan: the low is ten minutes behind. If nothing waits on the bus, records are kept for so long."""
    job = a_join(within=("20m", "20m"))
    ordered = needs_of(job, state_bytes=100 * 1200 * BYTES, rate=200.0)
    assert ordered.memory_split_mb == pytest.approx(kept_mb(200 * 1200))
    late = needs_of(job, state_bytes=100 * 1800 * BYTES, watermark_lag_s=600.0, rate=200.0)
    assert late.memory_split_mb == pytest.approx(kept_mb(200 * 1800))
    behind = needs_of(job, state_bytes=100 * 1200 * BYTES, watermark_lag_s=600.0, lag_s=600.0, rate=200.0)
    assert behind.memory_split_mb == pytest.approx(kept_mb(200 * 1200))


def test_more_matches_need_more_memory_for_their_pairs():
    """Plan: each record makes three pairs. At twice the rate twice as many are kept, and it makes six."""
    job = a_join(window=tumbling("30m"))
    full = {"state_bytes": 100 * 1800 * BYTES, "output_rate": 300.0}
    same, more = needs_of(job, **full), needs_of(job, rate=200.0, **full)
    assert more.memory_fixed_mb - same.memory_fixed_mb == pytest.approx(join_pairs_mb(200 / 2, 3, BYTES))
    alone = needs_of(job, rate=200.0, **(full | {"output_rate": 0.0}))
    assert alone.memory_fixed_mb == same.memory_fixed_mb


def test_the_past_of_a_join_reaches_as_far_as_its_window():
    assert minutes_of(a_join(window=tumbling("4h"))) == 270
    assert minutes_of(a_join(window=tumbling("30d"))) == 1440
    assert minutes_of(a_join(within=("10s", "10s"))) < 90


def test_units():
    assert join_state_mb(100, 70, MB) == 7000
    assert join_pairs_mb(10, 3, MB) == 60
