"""Imbalanced input: when partitions are dealt anew, when not, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from penstock.fleet.messages import TaskReport
from penstock.scaling.scaler.apply import unless_pending
from penstock.scaling.scaler.decide import decide, record_applied
from penstock.scaling.scaler.observation import (
    Decision,
    DecisionSettings,
    Footprint,
    Hold,
    Observation,
    Rebalance,
    Resize,
    ScalerJobFacts,
    ScalerMemory,
    ScalingAction,
    Untriaged,
    to_data,
    with_mapping,
)
from penstock.scaling.scaler.rebalance import PARTITIONS_MAX, can_rebalance, loads_of
from tests.scaling.scaler.jobs import PROACTIVE, START, a_job, an_observation, loads

HOT = loads(90.0, 90.0, 90.0, 2.0, 2.0, 2.0)
SPREAD = (1, 0, 0, 1, 1, 1)
# One of two tasks works all the time, the other waits.
UNEVEN = {
    "lag_records": 40_000.0,
    "lag_s": 200.0,
    "lag_spread": 1.0,
    "busy": 1.0,
    "busy_mean": 0.5,
    "ingest_rate": 276.0,
    "processed_rate": 200.0,
}
GENERATIONS = [DecisionSettings(generation=name) for name in ("reactive", "proactive", "preactive")]


def two_tasks(**changes: Any) -> ScalerJobFacts:
    return a_job(2, **{"partitions": 6, "can_rebalance": True, **changes})


def uneven(job: ScalerJobFacts | None = None, **changes: Any) -> Observation:
    plain = {"by_partition": HOT, "footprint": Footprint(thread_rate=200.0), **UNEVEN}
    return an_observation(job if job is not None else two_tasks(), **{**plain, **changes})


def decided(job: ScalerJobFacts | None = None, **changes: Any) -> Decision:
    return decide(uneven(job, **changes))


# --- when


@pytest.mark.parametrize("settings", GENERATIONS, ids=lambda settings: settings.generation)
def test_every_generation_deals_hot_partitions_anew(settings: DecisionSettings):
    decision = decided(settings=settings)
    assert isinstance(decision, Rebalance) and decision.mapping == SPREAD
    assert (
        "the busiest task has 98% of the load, 65% after it: partition 0 from task 0 to 1" in decision.reason
    )
    assert decision.inputs["share_before"] > 0.97 and decision.inputs["share_after"] < 0.67
    assert decision.rate_expected == pytest.approx(276 + 40_000 / 1800)
    data = to_data(decision)
    assert data["decision"] == "rebalance" and data["partition_tasks"] == list(SPREAD)


@pytest.mark.parametrize("settings", GENERATIONS, ids=lambda settings: settings.generation)
def test_asked_again_after_it_there_is_nothing_to_deal(settings: DecisionSettings):
    job = replace(two_tasks(), shape=with_mapping(two_tasks().shape, SPREAD))
    assert not isinstance(decided(job, settings=settings), Rebalance)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"by_partition": loads(270.0, 1, 1, 2, 1, 1)}, "partition 0 alone has 98%"),
        ({"by_partition": loads(*[46.0] * 6)}, "the busiest task has 50% of the load"),
        ({"by_partition": None, "can_rebalance": False}, "the load of each partition is not known"),
        ({"partitions": 2, "can_rebalance": False}, "2 tasks read 2 partitions"),
    ],
)
def test_where_it_cannot_be_cured_so_it_is_skew_as_before(changes: dict[str, Any], why: str):
    facts = {name: changes.pop(name) for name in ("can_rebalance", "partitions") if name in changes}
    decision = decided(two_tasks(**facts), **changes)
    assert isinstance(decision, Untriaged) and "skewed input" in decision.reason
    assert why in decision.ruled_out[1], decision.ruled_out


def test_without_lag_nothing_is_dealt():
    assert not isinstance(decided(lag_s=1.0), Rebalance)


def test_the_reactive_scaler_gives_more_tasks_where_a_new_deal_does_not_help():
    """Algorithm 2, line 6."""
    reactive = DecisionSettings(generation="reactive")
    even = {"by_partition": loads(*[46.0] * 6), "settings": reactive}
    assert isinstance(decided(**even), Resize)
    assert isinstance(decided(two_tasks(can_rebalance=False), settings=reactive), Resize)
    assert isinstance(decided(lag_spread=0.2, busy=0.5, settings=reactive), Resize)


def test_where_all_tasks_are_short_they_get_more_once_no_deal_helps():
    """Algorithm 2: first the partitions, then the tasks."""
    short = {"busy_mean": 0.96, "ingest_rate": 4000.0, "processed_rate": 400.0}
    assert isinstance(decided(**short), Rebalance)
    dealt = replace(two_tasks(), shape=with_mapping(two_tasks().shape, SPREAD))
    assert isinstance(decided(dealt, **short), Resize)


def test_what_waits_counts_as_in_equation_3():
    """Plan: the same rates; a backlog of half an hour's worth on the first partition."""
    waiting = loads(*[46.0] * 6, lags=(500_000.0, 0, 0, 0, 0, 0))
    decision = decided(by_partition=waiting)
    assert isinstance(decision, Rebalance) and decision.mapping[0] == 0
    assert {decision.mapping[1], decision.mapping[2]} == {1}


# --- what tasks say


def a_report(index: int, rates: dict[int, float], **changes: Any) -> TaskReport:
    metrics = {f"input_rate.{partition}": rate for partition, rate in rates.items()}
    metrics |= changes.pop("metrics", {})
    plain = {"task_id": f"a.b/{index}", "job": "a.b", "generation": 3, "shard": 0, "state": "running"}
    return TaskReport(**{**plain, "metrics": metrics, **changes})


FIRST = a_report(0, {0: 5.0, 1: 6.0}, metrics={"lag_records.1": 7.0, "input_rate": 11.0})
SECOND = a_report(1, {2: 1.0, 3: 0.0})


def test_the_loads_are_what_the_owner_of_each_partition_says():
    found = loads_of([FIRST, SECOND], (0, 0, 1, 1), generation=3)
    assert found == loads(5.0, 6.0, 1.0, 0.0, lags=(0.0, 7.0, 0.0, 0.0))
    assert found is not None and found.within(7.0) == (5.0, 7.0, 1.0, 0.0)


@pytest.mark.parametrize(
    "reports",
    [
        [],
        [FIRST],
        [FIRST, replace(SECOND, generation=2)],
        [FIRST, replace(SECOND, state="starting")],
        [FIRST, a_report(1, {2: 1.0})],
        [FIRST, a_report(1, {2: 1.0, 3: float("nan")})],
        [FIRST, a_report(1, {2: 1.0, 3: -1.0})],
        [FIRST, a_report(1, {2: 1.0, 3: 1.0}, metrics={"lag_records.3": float("inf")})],
        [FIRST, a_report(0, {2: 1.0, 3: 1.0})],  # not its owner
    ],
)
def test_what_one_partition_brings_is_not_known_so_nothing_is(reports: list[TaskReport]):
    assert loads_of(reports, (0, 0, 1, 1), generation=3) is None


def test_only_several_tasks_with_more_partitions_can_be_dealt_anew():
    known = loads(1.0)
    assert can_rebalance(3, 2, known) and can_rebalance(PARTITIONS_MAX, 2, known)
    for partitions, tasks in ((2, 2), (3, 1), (PARTITIONS_MAX + 1, 2)):
        assert not can_rebalance(partitions, tasks, known)
    assert not can_rebalance(3, 2, None)


# --- what came of it


def done(minutes_ago: int = 20, **changes: Any) -> ScalingAction:
    shape = two_tasks().shape
    plain = {
        "at_minute": START - minutes_ago,
        "before": shape,
        "after": with_mapping(shape, SPREAD),
        "input_rate": 276.0,
        "rate_before": 200.0,
        "rate_expected": 298.0,
        "parallel_before": 2.0,
    }
    return ScalingAction(**{**plain, **changes})


def after(action: ScalingAction, **changes: Any) -> Observation:
    job = two_tasks(changed_minute=action.at_minute)
    return uneven(replace(job, shape=action.after), **{"past": (action,), **changes})


def test_what_is_remembered_of_it_reads_back():
    observation = uneven()
    decision = decide(observation)
    assert isinstance(decision, Rebalance)
    action = record_applied(decision, with_mapping(observation.job.shape, SPREAD), observation)
    assert action is not None and action.is_rebalance and action.outcome == "pending"
    assert (action.rate_before, action.rate_expected) == (200.0, pytest.approx(decision.rate_expected))
    memory = ScalerMemory(past=(action,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(memory), type=ScalerMemory) == memory


@pytest.mark.parametrize(
    "changes",
    [
        {"lag_s": 1.0, "lag_records": 10.0},  # no lag
        {"processed_rate": 290.0},  # more is done
        {"lag_records": [*range(140_000, 140_000 - 90 * 600, -600)]},  # it drains
    ],
)
def test_what_helped_stays(changes: dict[str, Any]):
    decision = decide(after(done(), **changes))
    judged = decision.learnt.judged
    assert judged is not None and judged.outcome == "worked" and not isinstance(decision, Rebalance)


@pytest.mark.parametrize("generation", ["proactive", "preactive"])
def test_what_did_not_help_is_undone_remembered_and_told(generation: Any):
    settings = DecisionSettings(generation=generation)
    decision = decide(after(done(), settings=settings))
    assert isinstance(decision, Rebalance) and decision.direction == "undo"
    assert decision.mapping == (0, 0, 0, 1, 1, 1) and "back to the mapping before" in decision.reason
    judged = decision.learnt.judged
    assert judged is not None and judged.outcome == "ineffective"
    again = decide(uneven(settings=settings, past=(judged,)))
    assert isinstance(again, Untriaged) and "tried and did not help" in again.ruled_out[1]
    # New code, or a while later: it is worth another try.
    updated = two_tasks(updated_minute=START - 10)
    assert isinstance(decide(uneven(updated, settings=settings, past=(judged,))), Rebalance)


def test_a_deal_that_did_not_help_says_nothing_about_more_tasks():
    judged = done(outcome="ineffective", judged_minute=START - 5)
    short = {"busy_mean": 0.96, "ingest_rate": 4000.0, "processed_rate": 400.0, "past": (judged,)}
    assert isinstance(decided(**short), Resize)


def test_it_is_judged_only_when_it_can_be_told():
    assert decide(after(done(minutes_ago=5))).learnt.judged is None
    somebody = replace(two_tasks(), shape=with_mapping(two_tasks().shape, (0, 1, 0, 1, 1, 1)))
    judged = decide(uneven(somebody, past=(done(),))).learnt.judged
    assert judged is not None and judged.outcome == "overruled"


def test_a_change_that_is_too_young_to_tell_holds_the_next_deal():
    observation = uneven(settings=PROACTIVE)
    decision = decide(observation)
    assert isinstance(decision, Rebalance)
    held = unless_pending(decision, observation, done(minutes_ago=3))
    assert isinstance(held, Hold) and held.bound == "outcome" and "3 min ago" in held.reason
    assert unless_pending(decision, observation, done(minutes_ago=8)) is decision
    assert unless_pending(decision, observation, None) is decision
    undo = replace(decision, direction="undo")
    assert unless_pending(undo, observation, done(minutes_ago=3)) is undo


def test_more_waits_while_a_new_deal_drains_the_lag():
    action = done(minutes_ago=3)
    draining = [*range(140_000, 140_000 - 90 * 600, -600)]
    job = replace(two_tasks(), shape=action.after)
    more = Resize(shape=replace(action.after, task_count=6), reason="more", direction="up")
    held = unless_pending(more, uneven(job, lag_records=draining), action)
    assert isinstance(held, Hold) and "rebalanced 3 min ago" in held.reason
    growing = [*range(140_000, 140_000 + 90 * 600, 600)]
    assert unless_pending(more, uneven(job, lag_records=growing), action) is more
    late = replace(action, at_minute=START - 8)
    assert unless_pending(more, uneven(job, lag_records=draining), late) is more
