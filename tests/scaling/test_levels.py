"""What is wrong without a policy: facts become levels, each once, with what to do."""

from __future__ import annotations

import pytest

from penstock.alarms.checks import (
    CRASHES_MIN,
    EVENT_MS,
    LOOP_FAILURES_MIN,
    PLAN_SLOW_MS,
    PLAN_STUCK_MS,
    TEXT_MAX,
    FleetEvent,
    JobTrouble,
    LoopTrouble,
    Observed,
    ShardTrouble,
    TaskTrouble,
    decide_levels,
)
from penstock.scaling.policies.policy import FLEET

NOW = 1_790_000_000_000


def keys(observed: Observed, job: str) -> dict[str, str]:
    return {alert.key: alert.severity for alert in decide_levels(observed, NOW).get(job, ())}


def a_task(**changes) -> TaskTrouble:
    values = {"job": "a", "task_id": "a/0", "container": "c1", "state": "backoff", "restarts": CRASHES_MIN}
    return TaskTrouble(**{**values, **changes})


def an_event(**changes) -> FleetEvent:
    values = {
        "kind": "failover",
        "subject": "c1",
        "decision": "failed over",
        "reason": "silent",
        "at_ms": NOW,
    }
    return FleetEvent(**{**values, **changes})


def test_nothing_wrong_is_no_level():
    assert decide_levels(Observed(), NOW) == {}


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        (JobTrouble(job="a", state="quarantined", reason="x"), {"quarantined": "critical"}),
        (JobTrouble(job="a", state="invalid", reason="x"), {"invalid": "warning"}),
        (JobTrouble(job="a", state="changing", since_ms=NOW - PLAN_SLOW_MS + 1), {}),
        (JobTrouble(job="a", state="changing", since_ms=NOW - PLAN_SLOW_MS), {"plan_stuck": "warning"}),
        (JobTrouble(job="a", state="changing", since_ms=NOW - PLAN_STUCK_MS), {"plan_stuck": "critical"}),
        (JobTrouble(job="a", state="changing", since_ms=NOW + 1), {}),
    ],
)
def test_troubles_of_jobs(trouble, expected):
    assert keys(Observed(jobs=(trouble,)), "a") == expected


def test_a_crash_loop_is_one_alarm_a_job_and_names_the_worst_task():
    observed = Observed(tasks=(a_task(), a_task(task_id="a/1", restarts=9, error="boom")))
    (alert,) = decide_levels(observed, NOW)["a"]
    assert alert.key == "crash_loop" and "a/1" in alert.text and alert.evidence["tasks"] == 2
    assert keys(Observed(tasks=(a_task(restarts=CRASHES_MIN - 1), a_task(state="running"))), "a") == {}


def test_shards_and_loops_are_the_fleets():
    observed = Observed(
        shards=(ShardTrouble(shard=7, blame=3),),
        loops=(
            LoopTrouble(name="state syncer", streak=LOOP_FAILURES_MIN, error="x"),
            LoopTrouble(name="bus", streak=1, error="x"),
        ),
    )
    assert keys(observed, FLEET) == {
        "shard_7_quarantined": "critical",
        "loop_state_syncer_fails": "critical",
    }


def test_what_happened_is_wrong_for_a_while():
    brake = an_event(kind="alert", subject="brake", decision="alert", reason="many")
    stuck = an_event(kind="alert", subject="a", decision="job.stuck", reason="waits")
    kept = an_event(subject="c2", decision="kept")
    left = an_event(subject="c3", decision="left")
    assert decide_levels(Observed(events=(kept, left)), NOW) == {}
    observed = Observed(events=(an_event(), brake, stuck, kept, left))
    assert keys(observed, FLEET) == {"brake": "critical", "failovers": "warning"}
    assert keys(observed, "a") == {"call_stuck": "critical"}
    assert decide_levels(observed, NOW + EVENT_MS) == {}
    many = Observed(events=tuple(an_event(subject=f"c{number}") for number in range(3)))
    assert keys(many, FLEET) == {"failovers": "critical"}


def test_other_peoples_alerts_and_long_texts_do_no_harm():
    other = an_event(kind="alert", subject="a", decision="job.quarantined", reason="x")
    assert decide_levels(Observed(events=(other,)), NOW) == {}, "its level is the job's state"
    long = JobTrouble(job="a", state="quarantined", reason="x\n" * 10_000)
    (alert,) = decide_levels(Observed(jobs=(long,)), NOW)["a"]
    assert len(alert.text) <= TEXT_MAX and "\n" not in alert.text
