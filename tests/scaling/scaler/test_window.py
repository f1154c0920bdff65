"""What is not known decides nothing: gaps, nonsense, clock jumps and silence hold, with a reason (I20)."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.scaling.metrics.frames import METRICS, MINUTE_MS, Frame, NoFrame
from penstock.scaling.scaler.decide import decide
from penstock.scaling.scaler.observation import (
    DecisionSettings,
    Footprint,
    Hold,
    Resize,
    ShapeLimits,
    to_data,
)
from penstock.scaling.scaler.pattern import History
from penstock.scaling.scaler.window import METRICS_OPTIONAL, METRICS_REQUIRED, read_window
from tests.scaling.scaler.jobs import CONTAINER, START, a_frame, a_job, an_observation

GENERATIONS = ("reactive", "proactive", "preactive")


def broken(name: str, value: float, minute: int = -1) -> np.ndarray[Any, Any]:
    points = a_frame(a_job()).values[name].copy()
    points[minute] = value
    return points


def test_the_metrics_it_reads_are_metrics_of_frames():
    assert {*METRICS_REQUIRED, *METRICS_OPTIONAL} <= METRICS.keys()


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("name", METRICS_REQUIRED)
@pytest.mark.parametrize("value", [nan, inf, -1.0])
def test_a_number_that_cannot_be_holds(generation: str, name: str, value: float):
    for minute in (-1, -3):
        points = broken(name, value, minute)
        decision = decide(an_observation(settings=DecisionSettings(generation=generation), **{name: points}))
        assert isinstance(decision, Hold) and decision.bound == "metrics", decision
        assert name in decision.reason


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("name", METRICS_REQUIRED)
def test_without_a_metric_there_is_no_action(generation: str, name: str):
    decision = decide(an_observation(settings=DecisionSettings(generation=generation), **{name: None}))
    assert isinstance(decision, Hold) and name in decision.reason


@pytest.mark.parametrize("generation", GENERATIONS)
def test_without_a_frame_there_is_no_action(generation: str):
    no_frame = NoFrame(job="job", reason="2 of 4 tasks reported", metrics=("busy",))
    decision = decide(an_observation(settings=DecisionSettings(generation=generation), frame=no_frame))
    assert decision == Hold(reason="2 of 4 tasks reported", bound="metrics")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"now_ms": (START + 10) * MINUTE_MS}, "old"),
        ({"now_ms": (START - 30) * MINUTE_MS}, "clock was set back"),
        ({"job": a_job(changed_minute=START + 5)}, "clock was set back"),
        ({"job": a_job(changed_minute=START - 2)}, "just started"),
        ({"job": a_job(is_changing=True)}, "in progress"),
        ({"job": a_job(slo_lag_s=0)}, "SLO"),
        ({"job": a_job(restart_s=nan)}, "restart"),
        ({"job": a_job(limits=ShapeLimits(task_count_max=0))}, "no tasks"),
        ({"task_count": 3.0}, "metrics are of 3 tasks"),
        ({"busy_mean": 4.0}, "above 1.5"),
        ({"frame": Frame(job="job", first_minute=START, values={})}, "just started"),
    ],
)
def test_what_holds_and_why(changes: dict[str, Any], reason: str):
    job = changes.pop("job", None) or a_job()
    decision = decide(an_observation(job, **changes))
    assert isinstance(decision, Hold) and reason in decision.reason, decision


def test_metrics_of_another_shape_are_not_those_of_this_one():
    """Plan: after a change the old frame is still there: it decides nothing."""
    frame = a_frame(a_job(4), lag_s=500.0, lag_records=1e6)
    decision = decide(an_observation(a_job(8), frame=frame))
    assert isinstance(decision, Hold) and decision.bound == "metrics"


def test_unknown_optional_metrics_are_not_zero():
    """Plan: memory nobody measured is neither too much nor too little."""
    unknown = {name: nan for name in METRICS_OPTIONAL}
    with_nan, without = decide(an_observation(**unknown)), decide(an_observation())
    assert with_nan == without


@pytest.mark.parametrize("generation", GENERATIONS)
def test_tasks_that_keep_running_out_of_memory_get_more_without_rates(generation: str):
    """Plan: they report so little between two ends that no rate is known; how often they ended is."""
    gaps = broken("processed_rate", nan)
    settings = DecisionSettings(generation=generation)
    oom = np.zeros(90)
    oom[-2] = 2.0
    decision = decide(an_observation(settings=settings, processed_rate=gaps, oom=oom))
    assert isinstance(decision, Resize) and decision.task.memory_mb == 768 and decision.task_count == 4
    for job, now in ((a_job(changed_minute=START - 2), START), (a_job(), START + 9), (a_job(8), START)):
        frame = a_frame(a_job(), processed_rate=gaps, oom=oom)
        held = decide(an_observation(job, settings=settings, frame=frame, now_ms=now * MINUTE_MS))
        assert isinstance(held, Hold), "before the last change, too old, or of another shape"
    assert isinstance(decide(an_observation(settings=settings, processed_rate=gaps, oom=0.0)), Hold)


def test_a_step_in_the_input_is_seen_within_two_minutes():
    ingest = np.full(90, 100.0)
    ingest[-2:] = 300.0
    window = read_window(an_observation(ingest_rate=ingest))
    assert not isinstance(window, Hold) and window.input_rate == 300.0


numbers = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0, 1e9),
    st.sampled_from([0.0, nan, inf, -inf, -1.0, 1e308, 5e-324]),
)


@settings(max_examples=50)
@given(data=st.data())
def test_nonsense_never_raises_and_never_leaves_the_limits(data: st.DataObject):
    """Plan: any numbers in any metric, any shape and any settings: an answer, legal, and of JSON values."""
    generation = data.draw(st.sampled_from(GENERATIONS))
    minutes = data.draw(st.integers(0, 8))
    job = a_job(
        data.draw(st.integers(1, 40)),
        partitions=data.draw(st.integers(0, 40)),
        limits=ShapeLimits(
            task_count_min=data.draw(st.integers(0, 5)),
            task_count_max=data.draw(st.integers(1, 40)),
            threads_max=data.draw(st.integers(0, 8)),
            container=CONTAINER,
        ),
        state=data.draw(st.sampled_from(["none", "aggregation", "join", "other"])),
        updated_minute=data.draw(st.sampled_from([None, START - 5, START + 5])),
        can_rebalance=data.draw(st.booleans()),
        restart_s=data.draw(st.floats(0, 1e6)),
    )
    names = data.draw(st.sets(st.sampled_from(sorted(METRICS)), max_size=6)) | {*METRICS_REQUIRED}
    values = {
        name: np.array(data.draw(st.lists(numbers, min_size=minutes, max_size=minutes)), dtype=float)
        for name in sorted(names - {"task_count"})
    }
    values["task_count"] = np.full(minutes, float(job.shape.task_count))
    observation = replace(
        an_observation(job),
        frame=Frame(job="job", first_minute=START - minutes, values=values),
        settings=DecisionSettings(generation=generation, down_after_min=3, reactive_quiet_min=3),
        footprint=Footprint(thread_rate=data.draw(st.one_of(st.none(), numbers))),
    )
    history = History(first_minute=START - 100, input_rate=np.full(100, data.draw(numbers)))
    decision = decide(observation, lambda: history)
    assert decision.reason
    to_data(decision)
    shape = getattr(decision, "shape", None)
    if shape is not None:
        most = min(job.limits.task_count_max, job.partitions or 40)
        assert 1 <= shape.task_count <= most
        assert min(job.limits.task_count_min, most) <= shape.task_count


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target": 0.9}, "target"),
        ({"target": nan}, "target"),
        ({"window_min": 0}, "window_min"),
        ({"recovery_s": -1}, "recovery_s"),
        ({"headroom": 1.0}, "headroom"),
        ({"generation": "psychic"}, "generation"),
        ({"history_hours": "4"}, "history_hours"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(changes: dict[str, Any], named: str):
    with pytest.raises(ConfigError) as refused:
        DecisionSettings(**changes)
    assert named in refused.value.what and refused.value.why and refused.value.fix
