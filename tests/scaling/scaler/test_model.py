"""The scaler against a model of a job, minute by minute: it recovers, saves, and does not flap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import pi, sin

import numpy as np
import pytest

from penstock.scaling.scaler.observation import DecisionSettings, Footprint, Resize, ShapeLimits, Untriaged
from penstock.scaling.scaler.pattern import History
from tests.scaling.scaler.jobs import CONTAINER, START, JobModel, a_job

P = 100.0
DAY = 1440


def noisy(rate: float, seed: int, noise: float = 0.1) -> Callable[[int], float]:
    rng = np.random.default_rng(seed)
    return lambda minute: rate * (1 + rng.uniform(-noise, noise))


def daily(minute: int) -> float:
    """Between 200 and 1400 records/s."""
    return 800 - 600 * sin(2 * pi * minute / DAY)


def a_model(task_count: int, input_rate: Callable[[int], float], **changes: object) -> JobModel:
    job = a_job(task_count, partitions=changes.pop("partitions", 32), restart_s=20.0, changed_minute=START)
    return JobModel(job=job, thread_rate=P, input_rate=input_rate, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("task_count", "rate", "partitions"), [(4, 250, 32), (10, 560, 0), (3, 180, 12), (24, 1600, 24)]
)
def test_noise_of_a_tenth_does_not_flap(seed: int, task_count: int, rate: float, partitions: int):
    """Plan: ten hours at one mean. It may find its size in the first hours; after that nothing changes."""
    model = a_model(task_count, noisy(rate, seed), partitions=partitions).run(600)
    assert len(model.resizes) <= 2, model.resizes
    assert not [minute for minute, _ in model.resizes if minute > START + 240]
    assert max(model.lags) < model.job.slo_lag_s


def test_a_backlog_is_worked_off_and_the_tasks_go_again():
    """Figure 8: two days of backlog; 32 tasks, recovery, later what the input needs."""
    model = a_model(4, lambda minute: 200.0, backlog=2 * DAY * 60 * 200.0).run(14 * 60 + 5 * DAY, every=5)
    counts = [shape.task_count for _, shape in model.resizes]
    assert counts[0] == 32 and counts[-1] == 3
    assert counts == sorted(counts, reverse=True)
    up, down = model.resizes[0][0], model.resizes[1][0]
    assert up - START <= 6
    drained = next(minute for minute, lag in enumerate(model.lags) if lag < 45)
    assert down - START >= drained + 60
    assert model.lags[-1] < 1


def test_the_reactive_generation_gets_there_in_more_steps():
    step = {"input_rate": lambda minute: 250.0 if minute < START + 30 else 1500.0}
    reactive = a_model(4, **step, settings=DecisionSettings(generation="reactive")).run(300)
    proactive = a_model(4, **step, settings=DecisionSettings(generation="proactive")).run(300)
    assert len(reactive.resizes) > len(proactive.resizes) >= 1
    assert max(reactive.lags) > max(proactive.lags)
    assert reactive.lags[-1] < 90 and proactive.lags[-1] < 90


def test_a_sink_with_a_limit_is_tried_once_undone_and_told():
    """Plan: the sink takes 300/s and 600 arrive. More tasks do not help: back, and an alert, for hours."""
    model = a_model(4, lambda minute: 600.0, sink_rate_max=300.0, footprint=Footprint(thread_rate=P)).run(
        240, keep=100
    )
    directions = [decision.direction for decision in model.decisions if isinstance(decision, Resize)]
    assert directions == ["up", "undo"]
    assert model.job.shape.task_count == 4
    assert [decision.learnt.alert for decision in model.decisions if decision.learnt.alert]
    assert isinstance(model.decisions[-1], Untriaged)


def test_a_p_that_was_too_high_is_found_out_and_does_not_flap():
    """Plan: P is thought to be twice what it is. One step down breaks the SLO, is undone, and P is corrected."""
    model = a_model(
        10,
        lambda minute: 700.0,
        partitions=0,
        settings=DecisionSettings(generation="preactive"),
        footprint=Footprint(thread_rate=2 * P),
    ).run(600)
    directions = [decision.direction for decision in model.decisions if isinstance(decision, Resize)]
    assert directions[:2] == ["down", "undo"] and len(directions) <= 4
    assert model.footprint.thread_rate is not None and model.footprint.thread_rate < 2 * P
    assert model.lags[-1] < 1


def test_a_p_that_was_too_low_is_found_out_without_acting():
    model = a_model(
        10,
        lambda minute: 600.0,
        partitions=0,
        settings=DecisionSettings(generation="preactive"),
        footprint=Footprint(thread_rate=P / 2),
    ).run(50)
    assert model.resizes == [] and model.footprint.thread_rate == pytest.approx(P)


def test_staging_gives_the_first_p():
    model = a_model(10, noisy(600, 1), partitions=0, settings=DecisionSettings(generation="preactive")).run(
        60
    )
    assert model.footprint.thread_rate == pytest.approx(P, rel=0.01)


def test_patterns_of_the_past_save_restarts():
    """Figure 9: with a daily pattern the preactive generation changes less often, and keeps the SLO too."""
    past = np.array([daily(minute) for minute in range(START - 14 * DAY, START + 2 * DAY)])
    history = History(first_minute=START - 14 * DAY, input_rate=past)
    limits = ShapeLimits(task_count_max=32, container=CONTAINER)

    def two_days(generation: str) -> JobModel:
        settings = DecisionSettings(generation=generation, history_hours=12.0)  # type: ignore[arg-type]
        model = a_model(20, daily, partitions=0, settings=settings, history=history)
        model.job = replace(model.job, limits=limits)
        return model.run(2 * DAY, every=5)

    proactive, preactive = two_days("proactive"), two_days("preactive")
    assert len(preactive.resizes) < len(proactive.resizes)
    for model in (proactive, preactive):
        assert max(model.lags) < 90
    assert min(shape.task_count for _, shape in proactive.resizes) <= 6
