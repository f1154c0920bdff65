"""Down only after the need has held, to the largest of that time, never while draining or while lag grows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.scaling.scaler.decide import decide
from penstock.scaling.scaler.estimators import MB
from penstock.scaling.scaler.observation import (
    Decision,
    Footprint,
    Hold,
    Resize,
    ScalerJobFacts,
    ScalingAction,
    ShapeLimits,
    TaskResources,
)
from tests.scaling.scaler.jobs import CONTAINER, START, a_job, a_shape, an_observation

P = 100.0


def idle(job: ScalerJobFacts | None = None, **changes: Any) -> Decision:
    """A job with room to spare: sixteen tasks, of which two would do."""
    plain = {
        "ingest_rate": 140.0,
        "processed_rate": 140.0,
        "busy_mean": 0.0875,
        "lag_records": 0.0,
        "lag_s": 0.1,
        "footprint": Footprint(thread_rate=P),
        **changes,
    }
    return decide(an_observation(job if job is not None else a_job(16), **plain))


def down(decision: Decision) -> Resize:
    assert isinstance(decision, Resize) and decision.direction == "down", decision
    return decision


def held(decision: Decision) -> str:
    assert isinstance(decision, Hold), decision
    return decision.bound


def with_peak(at: int, rate: float, minutes: int = 5) -> list[float]:
    ingest = [140.0] * 90
    ingest[at : at + minutes] = [rate] * minutes
    return ingest


def test_a_job_with_room_to_spare_gets_what_it_needs():
    assert down(idle()).task_count == 2


def test_what_a_thread_did_before_counts_where_small_batches_make_it_seem_slow():
    """Plan: one thread was seen doing 100/s; now 16 are 40 % busy with 8.75/s each, as batches have a price."""
    seems = {"busy_mean": 0.4, "footprint": Footprint()}
    assert down(idle(**seems)).task_count == 11
    did = ScalingAction(
        at_minute=START - 300,
        before=a_shape(1),
        after=a_shape(16),
        input_rate=900.0,
        rate_before=100.0,
        rate_expected=900.0,
        parallel_before=1.0,
        outcome="worked",
        judged_minute=START - 290,
    )
    assert down(idle(past=(did,), **seems)).task_count == 2
    updated = a_job(16, updated_minute=START - 200)  # of other code nobody knows
    assert down(idle(updated, past=(did,), **seems)).task_count == 11


def test_down_to_the_largest_need_of_the_time():
    assert down(idle(ingest_rate=with_peak(60, 500.0))).task_count == 8  # 7.1 tasks, aligned to 32 partitions
    assert down(idle(ingest_rate=with_peak(10, 500.0))).task_count == 2  # longer ago than an hour
    assert held(idle(ingest_rate=with_peak(60, 1100.0))) == "largest need of the time"


def test_not_before_the_need_has_held():
    assert held(idle(a_job(16, changed_minute=START - 40))) == "down_after_min"
    assert held(idle(minutes=30)) == "down_after_min"


@pytest.mark.parametrize("name", ["ingest_rate", "lag_s", "lag_records"])
def test_a_gap_in_the_time_is_not_a_small_need(name: str):
    points = np.full(90, 1.0)
    points[50] = np.nan
    assert held(idle(**{name: points})) == "down_after_min"


def test_never_while_lag_grows():
    assert held(idle(lag_records=np.arange(90) * 400.0)) == "lag grows"
    slowly = 10 + np.arange(90) * 1.0  # hardly anything, but minute after minute
    assert held(idle(lag_records=slowly)) == "lag grows"


def test_never_while_a_backlog_drains():
    assert held(idle(lag_s=50.0)) == "draining"
    drained = [*[1.0] * 40, *[60.0] * 20, *[0.1] * 30]
    assert held(idle(lag_s=drained)) == "down_after_min"


def test_never_after_failures():
    assert held(idle(restarts=[*[0.0] * 89, 1.0])) == "failures"
    assert held(idle(oom=[*[0.0] * 50, 1.0, *[0.0] * 39])) == "down_after_min"


def test_never_below_its_limit():
    limits = ShapeLimits(task_count_min=5, container=CONTAINER)
    assert down(idle(a_job(16, limits=limits))).task_count == 5


def test_a_saving_that_is_not_worth_a_restart_is_left():
    """Plan: 100 tasks of which 95 are needed: a restart for five is not worth it; for 20 it is."""
    job = a_job(100, partitions=0, limits=ShapeLimits(task_count_max=200))
    assert held(idle(job, ingest_rate=6650.0, processed_rate=6650.0, busy_mean=0.665)) == "dead band"
    assert down(idle(job, ingest_rate=5600.0, processed_rate=5600.0, busy_mean=0.56)).task_count == 80


def test_tasks_first_then_threads():
    limits = ShapeLimits(threads_max=8, container=CONTAINER)
    job = a_job(4, partitions=0, task=TaskResources(threads=4, cpu=4), limits=limits)
    fewer = down(idle(job, busy_mean=0.0875))
    assert (fewer.task_count, fewer.task.threads, fewer.task.cpu) == (1, 2, 2.0)


def test_what_the_restart_costs_is_part_of_the_size():
    assert down(idle(a_job(16, restart_s=900.0, partitions=0))).task_count == 3


def test_fewer_tasks_get_the_memory_their_keys_need():
    job = a_job(16, state="aggregation", task=TaskResources(memory_mb=512))
    state = {"state_bytes": 1600.0 * MB, "key_count": 1e6, "memory_task_mb": 200.0}
    fewer = down(idle(job, **state))
    assert fewer.task_count == 2 and fewer.task.memory_mb == pytest.approx((100 + 800) * 1.2, abs=16)


def test_fewer_tasks_get_the_memory_of_the_time_with_most_keys():
    """Plan: windows fill for twenty minutes and close; the newest minutes have hardly any keys."""
    job = a_job(16, state="aggregation", task=TaskResources(memory_mb=512))
    keys = np.resize([*np.linspace(5e4, 1e6, 15), *[1e3] * 15], 90)
    state = {"state_bytes": keys * 1600 * MB / 1e6, "key_count": keys, "memory_task_mb": 200.0}
    fewer = down(idle(job, **state))
    steady = down(idle(job, **{name: np.max(values) for name, values in state.items()}))
    assert fewer.task_count == 2
    assert fewer.task.memory_mb >= steady.task.memory_mb > 900


def test_memory_keeps_tasks_that_cpu_would_give_away():
    """Plan: 16 tasks of 2 GB of keys each; a task may have 4096 MB, so they cannot go below ten or so."""
    job = a_job(16, partitions=0, state="aggregation", task=TaskResources(memory_mb=2600))
    fewer = down(idle(job, state_bytes=32_000.0 * MB, key_count=1e6, memory_task_mb=2100.0))
    assert fewer.task_count == 10 and "memory per task" in fewer.bounds
    assert fewer.task.memory_mb <= CONTAINER.memory_mb / 5


def test_memory_and_cpu_nobody_uses_go_without_changing_tasks():
    """Plan: two tasks are right, but use a third of memory and cpu."""
    job = a_job(2, task=TaskResources(cpu=3.0, memory_mb=3000))
    busy = {"ingest_rate": 130.0, "processed_rate": 130.0, "busy_mean": 0.65}
    less = down(idle(job, cpu=2.0, memory_task_mb=1000.0, **busy))
    assert less.task_count == 2 and less.task.memory_mb == 1200 and less.task.cpu == pytest.approx(1.2)
    again = a_job(2, task=less.task)
    assert held(idle(again, cpu=2.0, memory_task_mb=1000.0, **busy)) == "dead band"
    peak = [*[1000.0] * 60, 2300.0, *[1000.0] * 29]
    keeps = idle(job, cpu=5.0, memory_task_mb=peak, **busy)
    assert held(keeps) == "largest need of the time"


def test_a_job_without_input_goes_to_its_least():
    assert (
        down(idle(ingest_rate=0.0, processed_rate=0.0, busy_mean=0.0, lag_records=0.0, lag_s=0.0)).task_count
        == 1
    )
    unknown = idle(ingest_rate=0.0, processed_rate=0.0, busy_mean=0.0, lag_records=0.0, footprint=Footprint())
    assert down(unknown).task_count == 1


def test_rates_below_one_a_second_are_not_rounded_away():
    tiny = {
        "ingest_rate": 0.14,
        "processed_rate": 0.14,
        "lag_records": 0.0,
        "footprint": Footprint(thread_rate=0.1),
    }
    assert down(idle(**tiny)).task_count == 2
