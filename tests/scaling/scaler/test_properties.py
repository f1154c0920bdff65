"""What holds for every decision: it settles, follows the load, stays legal, and does not know units."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.scaling.scaler.decide import decide
from penstock.scaling.scaler.estimators import MB
from penstock.scaling.scaler.growth import task_range, threads_limit
from penstock.scaling.scaler.observation import (
    KINDS,
    AvailableResources,
    Decision,
    DecisionSettings,
    Footprint,
    JobShape,
    Observation,
    Remaining,
    Resize,
    ScalerJobFacts,
    ShapeLimits,
    TaskResources,
    parallel,
    share_of_busiest,
)
from tests.scaling.scaler.jobs import CONTAINER, a_job, at_rest

generations = st.sampled_from(["proactive", "preactive"])
all_generations = st.sampled_from(["reactive", "proactive", "preactive"])
thread_rates = st.floats(0.01, 1e5)
loads = st.floats(0, 60)  # in threads: with the largest thread rate it is still a rate
backlogs = st.floats(0, 100_000)  # in seconds of one thread


@st.composite
def jobs(draw: st.DrawFn) -> ScalerJobFacts:
    partitions = draw(st.sampled_from([0, 1, 2, 7, 8, 12, 32, 100]))
    limits = ShapeLimits(
        task_count_min=draw(st.integers(1, 3)),
        task_count_max=draw(st.integers(3, 40)),
        threads_max=draw(st.sampled_from([1, 1, 4])),
        container=CONTAINER,
    )
    job = a_job(
        1,
        partitions=partitions,
        limits=limits,
        restart_s=draw(st.sampled_from([0.0, 20.0, 600.0])),
        task=TaskResources(threads=draw(st.integers(1, limits.threads_max))),
    )
    fewest, most = task_range(job)
    return replace(job, shape=replace(job.shape, task_count=draw(st.integers(fewest, most))))


def seen(
    job: ScalerJobFacts, p: float, load: float, backlog: float, generation: str, **changes: Any
) -> Observation:
    changes = {"minutes": 1500 if generation == "reactive" else 90, **changes}
    settings = DecisionSettings(generation=generation)  # type: ignore[arg-type]
    return at_rest(job, thread_rate=p, input_rate=load * p, backlog=backlog * p, settings=settings, **changes)


def slots_after(job: ScalerJobFacts, decision: Decision) -> float:
    shape = decision.shape if isinstance(decision, Resize) else job.shape
    return parallel(shape.task_count, shape.task.threads, job.partitions)


@given(jobs(), thread_rates, loads, backlogs, generations)
def test_a_decision_settles(job: ScalerJobFacts, p: float, load: float, backlog: float, generation: str):
    """Once carried out, the same load is answered by no further change."""
    first = decide(seen(job, p, load, backlog, generation))
    if isinstance(first, Resize):
        changed = replace(job, shape=first.shape)
        again = decide(seen(changed, p, load, backlog, generation))
        assert not isinstance(again, Resize), (first, again)


@given(jobs(), thread_rates, loads, loads, backlogs, backlogs, generations)
def test_more_load_never_gets_less(
    job: ScalerJobFacts,
    p: float,
    load: float,
    more: float,
    backlog: float,
    more_backlog: float,
    generation: str,
):
    less = decide(seen(job, p, load, backlog, generation))
    greater = decide(seen(job, p, load + more, backlog + more_backlog, generation))
    assert slots_after(job, less) <= slots_after(job, greater) + 1e-6, (less, greater)


@given(jobs(), thread_rates, loads, backlogs, all_generations, st.data())
def test_a_decision_stays_within_limits_partitions_and_what_is_left(
    job: ScalerJobFacts, p: float, load: float, backlog: float, generation: str, data: st.DataObject
):
    room = AvailableResources(**{kind: data.draw(st.floats(0, 5000)) for kind in KINDS})
    used = data.draw(st.floats(50, 500))
    measured = {"memory_task_mb": used, "cpu": load}
    observation = seen(job, p, load, backlog, generation, remaining=Remaining(room=room), **measured)
    decision = decide(observation)
    if not isinstance(decision, Resize):
        return
    fewest, most = task_range(job)
    assert fewest <= decision.task_count <= most
    assert job.partitions == 0 or decision.task_count <= job.partitions
    assert decision.task.threads <= threads_limit(job, observation.settings)
    assert decision.task.memory_mb <= max(CONTAINER.memory_mb / 5, job.shape.task.memory_mb)
    for kind in KINDS:
        more = decision.shape.total(kind) - job.shape.total(kind)
        assert more <= 0 or more <= getattr(room, kind) + 1e-6, kind


@given(jobs(), loads, backlogs, all_generations, st.sampled_from([1e-6, 1e-3, 1024.0, 1e6]))
def test_units_do_not_matter(job: ScalerJobFacts, load: float, backlog: float, generation: str, unit: float):
    """Records, thousands of them or bytes: the same shape."""
    one = decide(seen(job, 100.0, load, backlog, generation))
    other = decide(seen(job, 100.0 * unit, load, backlog, generation))
    assert type(one) is type(other)
    assert getattr(one, "shape", None) == getattr(other, "shape", None)


@given(jobs(), thread_rates, loads, generations)
def test_a_smaller_shape_carries_the_input(job: ScalerJobFacts, p: float, load: float, generation: str):
    """Guarantee 1, by the paper's own equation."""
    decision = decide(seen(job, p, load, 0.0, generation))
    if isinstance(decision, Resize) and decision.direction == "down":
        assert load <= 0.85 * slots_after(job, decision) + 1e-6


@given(jobs(), thread_rates, loads, st.floats(0.1, 1e5), all_generations)
def test_a_job_whose_lag_grows_never_shrinks(
    job: ScalerJobFacts, p: float, load: float, step: float, generation: str
):
    lag = np.arange(1500 if generation == "reactive" else 90) * step * p
    decision = decide(seen(job, p, load, 0.0, generation, lag_records=lag))
    assert slots_after(job, decision) >= slots_after(job, replace_nothing(job)) - 1e-9


def replace_nothing(job: ScalerJobFacts) -> Resize:
    return Resize(shape=job.shape, reason="", direction="up")


@given(
    jobs(), thread_rates, loads, st.floats(0, 40_000), st.floats(1, 3000), st.booleans(), st.floats(0.1, 3)
)
def test_decisions_about_all_resources_settle(
    job: ScalerJobFacts, p: float, load: float, state_mb: float, fixed_mb: float, is_known: bool, cores: float
):
    """Plan: state in memory, cpu measured, P learnt or not, and only so much left of everything. More memory comes
    at once, less cpu with the next hour: a few steps, and none takes back the tasks, threads or memory of another."""
    job = replace(job, state="aggregation")
    room = AvailableResources(cpu=50, memory_mb=50_000)

    def look(job: ScalerJobFacts, room: AvailableResources) -> Observation:
        share = share_of_busiest(job.shape.task_count, job.partitions)
        footprint = Footprint(thread_rate=p if is_known else None)
        measured = {
            "cpu": load * cores,
            "memory_task_mb": fixed_mb + state_mb * share,
            "state_bytes": state_mb * MB,
            "key_count": 1000.0,
        }
        remaining = Remaining(room=room)
        return seen(job, p, load, 0.0, "proactive", remaining=remaining, footprint=footprint, **measured)

    shapes = [job.shape]
    while isinstance(decision := decide(look(replace(job, shape=shapes[-1]), room)), Resize):
        shapes.append(decision.shape)
        assert len(shapes) <= 4, shapes
        room = AvailableResources(
            **{kind: room_left(room, kind, shapes[-2], shapes[-1]) for kind in ("cpu", "memory_mb")}
        )
    for numbers in (
        [shape.task_count for shape in shapes],
        [shape.task.threads for shape in shapes],
        [shape.task.memory_mb for shape in shapes],
    ):
        assert numbers in (sorted(numbers), sorted(numbers, reverse=True)), shapes


def room_left(room: AvailableResources, kind: str, before: JobShape, after: JobShape) -> float:
    left: float = getattr(room, kind)
    return left + before.total(kind) - after.total(kind)
