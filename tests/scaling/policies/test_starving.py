"""A task that waits for a slot is told of with the job that holds the slots: as an alarm, and by the doctor."""

from __future__ import annotations

from penstock.alarms.checks import Observed, decide_levels
from penstock.fleet.messages import TaskReport
from penstock.scaling.doctor.doctor import examine
from penstock.scaling.policies.balance import WAIT_S, describe_starved, starved_tasks
from penstock.scaling.policies.facts import task_facts
from tests.scaling.policies.test_doctor import TROUBLES, a_config, a_patient, found


def a_report(job: str, index: int = 0, **metrics: float) -> TaskReport:
    return TaskReport(
        task_id=f"{job}/{index}", job=job, generation=1, shard=1, state="running", metrics=metrics
    )


SLOW = [
    (
        "c1",
        a_report("slow.slow", n, slots_held=0.5, slots_user=0.49, user_ms_per_record=20.1, slot_wait_s=3.0),
    )
    for n in range(4)
]
REPORTS = [
    *SLOW,
    ("c1", a_report("a.count", slot_wait_s=45.0)),
    ("c1", a_report("b.count", slot_wait_s=WAIT_S - 1)),
    ("c2", a_report("b.count", 1, slot_wait_s=31.0)),
]


def test_who_waits_is_told_with_who_holds_the_slots_of_that_container():
    first, second = starved_tasks(REPORTS)
    assert (first.task_id, first.by, first.slots) == ("a.count/0", "slow.slow", 2.0)
    assert describe_starved(first) == (
        "a.count/0 has waited 45 s for a slot of c1: slow.slow uses 2.0 of its slots, 98% of it in its own code"
    )
    assert (second.task_id, second.by) == ("b.count/1", ""), "nothing of c1 says what happens on c2"
    assert starved_tasks(SLOW) == ()


def test_it_is_an_alarm_of_the_job_that_waits():
    levels = decide_levels(Observed(starved=starved_tasks(REPORTS)), 1)
    assert set(levels) == {"a.count", "b.count"}
    (alert,) = levels["a.count"]
    assert (alert.key, alert.evidence["by"]) == ("starved", "slow.slow")
    assert "penstock doctor slow.slow" in alert.what_to_do


def test_the_doctor_names_the_culprit_to_the_victim_and_the_slow_code_to_its_owner():
    """Both lag with idle processors: neither is told that it waits for a sink or a service."""
    victim = found(TROUBLES["starved"], "starved")
    assert "batches of slow.slow hold the slots" in victim.cause
    assert victim.todo[0].command == "penstock doctor slow.slow"
    slow = a_patient(
        {"lag_s": 200.0, "busy_mean": 0.1},
        config=a_config(isolation="shared", resources={"cpu": 1.0, "memory_mb": 512}),
        tasks=task_facts(SLOW),
    )
    owner = found(slow, "slow_code")
    assert "its own code takes 20.1 ms per record, so a task processes at most 49.8 records/s" in owner.cause
    assert "isolation=process resources.memory_mb=1024" in owner.todo[1].command
    for patient in (TROUBLES["starved"], slow):
        assert "lag_waiting" not in {finding.name for finding in examine(patient).findings}
