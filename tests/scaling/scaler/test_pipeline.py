"""A pipeline as one: what the jobs above will send, and what the jobs below can take."""

from __future__ import annotations

from typing import Any

from penstock.scaling.metrics.frames import NoFrame
from penstock.scaling.scaler.observation import Decision, Hold, Observation, Resize, ShapeLimits
from penstock.scaling.scaler.pipeline import JobEdge, decide_pipeline
from tests.scaling.scaler.jobs import CONTAINER, a_job, an_observation, at_rest

P = 100.0
CHAIN = (JobEdge(above="read", below="count"), JobEdge(above="count", below="store"))


def a_stage(
    task_count: int, input_rate: float, backlog: float = 0.0, most: int = 64, **changes: Any
) -> Observation:
    job = a_job(task_count, partitions=0, limits=ShapeLimits(task_count_max=most, container=CONTAINER))
    return at_rest(job, thread_rate=P, input_rate=input_rate, backlog=backlog, **changes)


def tasks(decision: Decision) -> int | None:
    return decision.task_count if isinstance(decision, Resize) else None


def test_a_job_below_is_sized_for_what_will_come():
    """Plan: the first job lags and holds the others back. All grow in one step, by what passes each edge."""
    observations = {
        "read": a_stage(2, 800, backlog=100_000),
        "count": a_stage(3, 200),  # all that two tasks give
        "store": a_stage(1, 50),  # a quarter of that
    }
    alone = {name: tasks(decision) for name, decision in decide_pipeline(observations, ()).items()}
    assert alone["read"] == 12 and alone["count"] is None and alone["store"] is None
    whole = {name: tasks(decision) for name, decision in decide_pipeline(observations, CHAIN).items()}
    assert whole == {"read": 12, "count": 13, "store": 4}


def test_selectivity_may_be_told():
    observations = {"read": a_stage(2, 800, backlog=100_000), "count": a_stage(4, 200)}
    told = decide_pipeline(observations, [JobEdge(above="read", below="count", selectivity=3.0)])
    assert tasks(told["count"]) == 37


def test_a_job_with_two_inputs_gets_both():
    observations = {
        "left": a_stage(2, 600, backlog=100_000, output_rate=200.0),
        "right": a_stage(4, 200, output_rate=100.0),
        "join": a_stage(5, 300),
    }
    edges = [JobEdge(above="left", below="join"), JobEdge(above="right", below="join")]
    decisions = decide_pipeline(observations, edges)
    # left: 600 + 55 once it has grown, right: 100 of its 200
    assert tasks(decisions["join"]) == 11


def test_no_job_is_made_larger_than_those_below_can_follow():
    """Plan: the store may have two tasks. The reader would like twenty; more than two would only fill the log."""
    observations = {"read": a_stage(2, 1000, backlog=1e6), "store": a_stage(2, 200, most=2)}
    edge = [JobEdge(above="read", below="store", selectivity=1.0)]
    decisions = decide_pipeline(observations, edge)
    assert isinstance(decisions["read"], Hold) and decisions["read"].bound == "store below"
    # Half of the records are dropped on the way: twice as many are of use.
    half = decide_pipeline(observations, [JobEdge(above="read", below="store", selectivity=0.5)])
    assert tasks(half["read"]) == 4
    # Another consumer without a limit makes all of them useful.
    with_other = {**observations, "other": a_stage(4, 200)}
    both = decide_pipeline(with_other, [*edge, JobEdge(above="read", below="other", selectivity=1.0)])
    assert tasks(both["read"]) == 20


def test_a_job_below_does_not_shrink_before_what_comes():
    observations = {"read": a_stage(2, 800, backlog=100_000), "count": a_stage(16, 200)}
    alone, whole = decide_pipeline(observations, ()), decide_pipeline(observations, CHAIN)
    assert tasks(alone["count"]) == 3
    assert tasks(whole["count"]) == 13


def test_a_job_without_numbers_holds_and_the_others_go_on():
    silent = an_observation(frame=NoFrame(job="count", reason="1 of 4 tasks reported"))
    observations = {"read": a_stage(2, 800), "count": silent, "store": a_stage(1, 500)}
    decisions = decide_pipeline(observations, CHAIN)
    assert isinstance(decisions["count"], Hold)
    assert tasks(decisions["read"]) == 12 and tasks(decisions["store"]) == 8


def test_circles_unknown_jobs_and_nonsense_are_no_trouble():
    observations = {"read": a_stage(2, 800), "count": a_stage(4, 200)}
    edges = [
        *CHAIN,
        JobEdge(above="count", below="read"),
        JobEdge(above="read", below="read"),
        JobEdge(above="read", below="nobody", selectivity=float("nan")),
    ]
    assert decide_pipeline(observations, edges) == decide_pipeline(observations, ())
    assert decide_pipeline({}, CHAIN) == {}
