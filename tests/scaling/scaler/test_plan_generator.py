"""Up at once, vertical first, within limits and what is left; problems without a found cause do not scale."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.scaling.scaler.decide import decide
from penstock.scaling.scaler.estimators import MB
from penstock.scaling.scaler.observation import (
    AvailableResources,
    Decision,
    Demand,
    Footprint,
    Hold,
    Rebalance,
    Remaining,
    Resize,
    ScalerJobFacts,
    ShapeLimits,
    TaskResources,
    Untriaged,
)
from tests.scaling.scaler.jobs import CONTAINER, START, a_job, an_observation, at_rest

P = 100.0


def short_of(job: ScalerJobFacts, input_rate: float, backlog: float = 0.0, **changes: Any) -> Resize:
    decision = decide(at_rest(job, thread_rate=P, input_rate=input_rate, backlog=backlog, **changes))
    assert isinstance(decision, Resize), decision
    assert decision.direction == "up" and decision.formula and decision.inputs["P"] == P
    return decision


def lagging(job: ScalerJobFacts | None = None, **changes: Any) -> Decision:
    """A job of four tasks with enough capacity that lags all the same."""
    plain = {
        "lag_s": 500.0,
        "lag_records": 20_000.0,
        "busy_mean": 0.3,
        "footprint": Footprint(thread_rate=P),
        **changes,
    }
    return decide(an_observation(job if job is not None else a_job(4), **plain))


# --- how much


def test_a_job_gets_tasks_for_its_input_at_the_target_share():
    assert short_of(a_job(2, partitions=0), input_rate=700).task_count == 10


def test_a_backlog_is_gone_within_the_recovery_time():
    """Plan: equation 3 with t = 1800 s: 180,000 records are 100/s more."""
    job = a_job(4, partitions=0)
    assert short_of(job, input_rate=280, backlog=180_000).task_count == 5


def test_what_piles_up_during_the_restart_is_part_of_the_need():
    without = short_of(a_job(2, partitions=0), input_rate=700)
    with_restart = short_of(a_job(2, partitions=0, restart_s=600.0), input_rate=700)
    assert with_restart.task_count == without.task_count + 3  # 700 * 600 s within 1800 s: 233/s


def test_no_task_has_one_partition_more_than_it_must():
    """Plan: 4.3 tasks are needed for 12 partitions: five would leave three to some, six have two each."""
    assert short_of(a_job(2, partitions=12), input_rate=300).task_count == 6


def test_vertical_first_up_to_a_fifth_of_a_container_then_horizontal():
    """Plan: a fifth of a container is four cores. Two tasks grow to four threads each, then there are more."""
    job = a_job(2, limits=ShapeLimits(task_count_max=32, threads_max=16, container=CONTAINER))
    taller = short_of(job, input_rate=400)
    assert (taller.task_count, taller.task.threads, taller.task.cpu) == (2, 4, 4.0)
    wider = short_of(job, input_rate=900)
    assert (wider.task_count, wider.task.threads) == (4, 4)
    assert "vertical limit" in wider.bounds


def test_more_tasks_mean_less_memory_each():
    job = a_job(2, partitions=8, state="aggregation", task=TaskResources(memory_mb=2500))
    decision = short_of(job, input_rate=380, state_bytes=4000.0 * MB, key_count=1e6, memory_task_mb=2100.0)
    assert decision.task_count == 8
    assert decision.task.memory_mb == pytest.approx((100 + 500) * 1.2, abs=16)


# --- limits


@pytest.mark.parametrize(
    ("job", "task_count", "bound"),
    [
        (a_job(2, partitions=8), 8, "8 partitions"),
        (a_job(2, partitions=64, limits=ShapeLimits(task_count_max=16)), 16, "limit of 16 tasks"),
        (
            a_job(2, partitions=10, limits=ShapeLimits(task_count_max=9)),
            5,
            "limit of 9 tasks",
        ),  # nine work as five
    ],
)
def test_it_stops_at_its_limits_and_says_which(job: ScalerJobFacts, task_count: int, bound: str):
    decision = short_of(job, input_rate=1e9, backlog=1e12)
    assert decision.task_count == task_count and bound in decision.bounds


def test_at_its_limit_it_holds_and_says_so():
    decision = decide(at_rest(a_job(8, partitions=8), thread_rate=P, input_rate=1e4, backlog=1e7))
    assert isinstance(decision, Hold) and decision.bound == "8 partitions"


def test_a_job_outside_its_limits_is_brought_inside():
    decision = decide(an_observation(a_job(8, partitions=32, limits=ShapeLimits(task_count_max=4))))
    assert isinstance(decision, Resize) and decision.task_count == 4
    decision = decide(an_observation(a_job(2, limits=ShapeLimits(task_count_min=4))))
    assert isinstance(decision, Resize) and (decision.task_count, decision.direction) == (4, "up")


def test_a_partial_step_is_better_than_none():
    """Plan: 16 tasks are needed, there is room for five more: 32 partitions align at eight."""
    room = Remaining(room=AvailableResources(cpu=5.0))
    decision = short_of(a_job(4), input_rate=1100, remaining=room)
    assert decision.task_count == 8 and "capacity: cpu" in decision.bounds
    nothing = decide(
        at_rest(
            a_job(4),
            thread_rate=P,
            input_rate=1100,
            remaining=Remaining(room=AvailableResources(memory_mb=100)),
        )
    )
    assert isinstance(nothing, Hold) and nothing.bound == "capacity: memory_mb"


def test_when_capacity_is_short_privileged_jobs_come_first():
    remaining = Remaining(privileged_only=True)
    held = decide(at_rest(a_job(4), thread_rate=P, input_rate=1100, remaining=remaining))
    assert isinstance(held, Hold) and held.bound == "capacity"
    assert short_of(a_job(4, is_privileged=True), input_rate=1100, remaining=remaining).task_count == 16


def test_nobody_knows_what_is_left_so_nothing_is_taken():
    room = Remaining(room=AvailableResources(cpu=float("nan")))
    decision = decide(at_rest(a_job(4), thread_rate=P, input_rate=1100, remaining=room))
    assert isinstance(decision, Hold) and decision.bound == "capacity: cpu"


# --- diagnosis


def test_a_lag_that_is_gone_before_a_restart_would_be_over_is_left_alone():
    job = a_job(4, restart_s=500.0, slo_lag_s=10.0)
    decision = decide(at_rest(job, thread_rate=P, input_rate=330, backlog=28_000.0, lag_s=45.0))
    assert isinstance(decision, Hold) and decision.bound == "restart cost", decision


def test_a_lag_that_drains_in_time_is_left_alone():
    lag = list(range(200_000, 200_000 - 90 * 1000, -1000))
    decision = lagging(lag_records=lag, processed_rate=216.0, ingest_rate=200.0)
    assert isinstance(decision, Untriaged)  # 111,000 at 17/s take too long
    quick = list(range(20_000 + 90 * 1000, 20_000, -1000))
    decision = lagging(lag_records=quick, processed_rate=217.0)
    assert isinstance(decision, Hold) and decision.bound == "draining"


def test_a_hot_key_is_not_scaled():
    decision = lagging(busy=1.0, busy_mean=0.3)
    assert isinstance(decision, Untriaged) and "skewed" in decision.reason


def test_a_hot_key_is_not_scaled_however_slow_its_tasks_seem():
    seems = {"lag_spread": 1.4, "busy": 1.0, "ingest_rate": 4000.0, "lag_records": 1e6}
    decision = lagging(busy_mean=0.69, **seems)
    assert isinstance(decision, Untriaged) and "skewed" in decision.reason and decision.inputs["used"] > 1
    assert isinstance(lagging(busy_mean=0.95, **seems), Resize)  # all of them are short


def test_a_hot_key_is_not_scaled_before_it_lags_either():
    seems = {"lag_spread": 1.4, "busy": 1.0, "ingest_rate": 4000.0, "lag_records": 1e4, "lag_s": 1.0}
    decision = lagging(busy_mean=0.69, **seems)
    assert isinstance(decision, Hold) and decision.bound == "imbalance" and "few" in decision.reason
    assert isinstance(lagging(busy_mean=0.95, **seems), Resize)


def test_a_failing_sink_is_not_scaled():
    decision = lagging(exceptions=[*[0.0] * 88, 3.0, 4.0], busy_mean=1.0, lag_records=1e7)
    assert isinstance(decision, Untriaged) and "failed 7 times" in decision.reason


def test_a_slow_dependency_is_not_scaled():
    """Plan: threads are busy all the time and give a quarter of what they gave."""
    decision = lagging(busy_mean=1.0, processed_rate=100.0, ingest_rate=200.0)
    assert isinstance(decision, Untriaged) and "25% of its former rate" in decision.reason
    assert any("too few resources" in reason for reason in decision.ruled_out)


def test_threads_that_give_somewhat_less_than_before_are_believed():
    decision = lagging(busy_mean=1.0, processed_rate=300.0, ingest_rate=400.0)
    assert isinstance(decision, Resize) and decision.inputs["P"] == 75


def test_idle_threads_with_a_lag_wait_for_something():
    decision = lagging()
    assert isinstance(decision, Untriaged) and "waits for something" in decision.reason
    assert "out of memory" in decision.ruled_out


def test_a_job_that_does_nothing_at_all_is_untriaged():
    decision = lagging(processed_rate=0.0, busy_mean=0.0)
    assert isinstance(decision, Untriaged) and "nothing is processed" in decision.reason


def test_after_an_update_more_is_tried():
    """Plan: with an old P the same lag would be untriaged; an update makes that P void."""
    job = a_job(4, partitions=0, updated_minute=START - 20)
    decision = lagging(job)
    assert isinstance(decision, Resize) and decision.task_count == 6
    busy = lagging(job, busy_mean=1.0, processed_rate=100.0, ingest_rate=200.0)
    assert isinstance(busy, Resize) and busy.inputs["P"] == 25


def test_a_new_lag_with_enough_resources_is_given_the_time_to_drain():
    lag_s = [*[1.0] * 87, 100.0, 120.0, 120.0]
    decision = lagging(lag_s=lag_s, lag_records=20_000.0)
    assert isinstance(decision, Hold) and decision.bound == "window_min"


def test_one_stuck_minute_is_no_symptom():
    lag_s = [*[1.0] * 89, 500.0]
    assert not isinstance(lagging(lag_s=lag_s, lag_records=100.0), Untriaged | Resize | Rebalance)


# --- memory


def test_an_oom_leads_to_more_memory():
    decision = decide(an_observation(oom=[*[0.0] * 89, 1.0], memory_task_mb=500.0))
    assert isinstance(decision, Resize)
    assert decision.task_count == 4 and decision.task.memory_mb == 768


def test_memory_is_raised_before_it_runs_out():
    decision = decide(an_observation(memory_task_mb=480.0))
    assert isinstance(decision, Resize) and decision.task.memory_mb == 576


def test_a_task_that_may_not_be_larger_is_split_if_its_state_can_be():
    """Plan: a fifth of the container is 4096 MB. State of a join is split over more tasks, others alert."""
    task = TaskResources(memory_mb=4096)
    oom = {"oom": [*[0.0] * 89, 1.0], "memory_task_mb": 4100.0}
    split = decide(an_observation(a_job(4, state="join", task=task), state_bytes=4 * 4000.0 * MB, **oom))
    assert isinstance(split, Resize) and split.task_count > 4
    assert split.task.memory_mb <= 4096
    alone = decide(an_observation(a_job(4, task=task), **oom))
    assert isinstance(alone, Untriaged) and "may not be larger" in alone.reason


def test_lag_and_oom_together_are_one_change():
    decision = short_of(a_job(4), input_rate=600, backlog=1e6, oom=[*[0.0] * 89, 1.0], memory_task_mb=500.0)
    assert decision.task_count > 4 and decision.task.memory_mb == 768


def test_disk_that_is_nearly_full_grows():
    job = a_job(4, task=TaskResources(disk_mb=100))
    decision = decide(an_observation(job, disk_mb=390.0))
    assert isinstance(decision, Resize) and decision.task.disk_mb == 117


# --- a pipeline's word


def test_what_the_jobs_above_will_send_counts():
    demand = Demand(input_rate=900.0)
    assert short_of(a_job(4, partitions=0), input_rate=200, demand=demand).task_count == 13


def test_what_nobody_below_can_follow_is_not_asked_for():
    demand = Demand(useful_rate=350.0, bottleneck="sink")
    decision = decide(at_rest(a_job(4), thread_rate=P, input_rate=900, backlog=1e6, demand=demand))
    assert isinstance(decision, Hold) and decision.bound == "sink below"


def test_nothing_processed_is_untriaged_whatever_is_known_of_a_thread():
    """Plan: 64 tasks are allowed, nothing is processed, and nobody knows P. It was "4 -> 64 tasks"."""
    job = a_job(4, partitions=64, limits=ShapeLimits(task_count_max=64))
    stuck = {"processed_rate": 0.0, "busy_mean": 1.0, "lag_s": 300.0, "lag_records": 60_000.0}
    for footprint in (Footprint(), Footprint(thread_rate=10.0)):
        decision = decide(an_observation(job, footprint=footprint, **stuck))
        assert isinstance(decision, Untriaged) and "nothing is processed" in decision.reason, decision
    soon = decide(an_observation(job, footprint=Footprint(thread_rate=10.0), **{**stuck, "lag_s": 20.0}))
    assert isinstance(soon, Hold) and soon.bound == "nothing processed"


def test_a_job_below_its_least_gets_what_it_needs_at_once():
    """Plan: one task where at least four are asked for, and eight are needed: one restart, not two."""
    job = a_job(1, partitions=32, limits=ShapeLimits(task_count_min=4))
    needs_more = decide(at_rest(job, thread_rate=P, input_rate=520, backlog=50_000))
    assert isinstance(needs_more, Resize) and (needs_more.task_count, needs_more.direction) == (8, "up")
    needs_less = decide(at_rest(job, thread_rate=P, input_rate=150, backlog=20_000))
    assert isinstance(needs_less, Resize) and (needs_less.task_count, needs_less.direction) == (4, "up")
