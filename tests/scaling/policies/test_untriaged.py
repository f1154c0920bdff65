"""What nobody can explain is told, with what was ruled out, and is not scaled."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.scaling.policies.policy import (
    ChangeLayer,
    ControlSettings,
    MoveTasks,
    Nothing,
    RaiseAlert,
    Verdict,
    evaluate,
)
from penstock.scaling.policies.round import Candidate, FleetState, PolicyRecord, decide_round
from penstock.scaling.policies.untriaged import UntriagedPolicy, UntriagedSettings, find_bad_task
from tests.scaling.policies.kit import NOW_MS, a_config, a_frame, a_job, a_task, some_facts
from tests.scaling.policies.test_doctor import WELL

LAGS = WELL | {"lag_s": 300.0, "busy_mean": 0.6}


def look(*tasks, frame=None, settings=None, **changes) -> Verdict:
    facts = some_facts(*tasks, frame=a_frame(60, **(LAGS | (frame or {}))), **changes)
    verdict = evaluate(UntriagedPolicy(), facts, settings or UntriagedSettings())
    assert isinstance(verdict, Verdict), verdict
    return verdict


def test_a_problem_without_a_cause_is_told_with_what_was_ruled_out():
    verdict = look()
    assert isinstance(verdict.resolution, RaiseAlert) and verdict.resolution.key == "untriaged"
    assert "ruled out" in verdict.resolution.text
    assert "skew" in str(verdict.resolution.evidence["ruled_out"])
    assert "engine memory" in str(verdict.resolution.evidence["not_known"])


def test_a_hiccup_is_no_problem():
    assert look(frame={"lag_s": np.array([1.0] * 56 + [300.0] * 4)}).symptom is None
    assert look(frame={"lag_s": np.array([300.0] * 58 + [np.nan, 300.0])}).symptom is None
    assert look(frame={"lag_s": 80.0}).symptom is None


def test_what_the_doctor_knows_is_left_to_whoever_can_help():
    busy = [a_task(n, busy=0.97, lag_s=300.0) for n in range(4)]
    verdict = look(*busy, frame={"busy_mean": 0.97})
    assert isinstance(verdict.resolution, Nothing) and "known" in verdict.resolution.reason


def test_a_dependency_that_fails_is_never_scaled_also_after_an_update():
    failing = [a_task(n, error="Connection refused" if n == 1 else "") for n in range(4)]
    verdict = look(*failing, user_update_ms=NOW_MS - 60_000)
    assert isinstance(verdict.resolution, RaiseAlert) and verdict.resolution.key == "dependency"
    assert "not scaled" in verdict.resolution.text


def test_a_single_bad_task_is_moved_once():
    """Plan: it is moved, is still behind, and is not moved again but told of."""
    tasks = [a_task(n, lag_s=300.0 if n == 2 else 1.0) for n in range(4)]
    verdict = look(*tasks)
    assert isinstance(verdict.resolution, MoveTasks) and verdict.resolution.tasks == ("shops.total/2",)
    rival = Candidate(verdict=verdict, priority=-50, settings=ControlSettings())
    first = decide_round([rival], a_job(), PolicyRecord(), FleetState(), now_ms=NOW_MS)
    assert first.apply is not None
    record, moves = first.record, 0
    for minute in range(1, 120):
        again = decide_round([rival], a_job(), record, FleetState(), now_ms=NOW_MS + minute * 60_000)
        record, moves = again.record, moves + (again.apply is not None)
    assert moves == 0 and {alert.key for _, alert in again.alerts} == {"action_useless"}


def test_after_its_owners_update_a_busy_job_gets_more_within_its_limit():
    verdict = look(user_update_ms=NOW_MS - 60_000)
    assert verdict.resolution == ChangeLayer(
        changes={"task_count": 6}, text="4 -> 6 tasks after its owner's change"
    )
    full = look(user_update_ms=NOW_MS - 60_000, config=a_config(task_count_max=4, partitions=4))
    assert isinstance(full.resolution, Nothing | RaiseAlert)
    idle = look(user_update_ms=NOW_MS - 60_000, frame={"busy_mean": 0.2})
    assert isinstance(idle.resolution, RaiseAlert | Nothing)
    long_ago = look(user_update_ms=NOW_MS - 86_400_000)
    assert isinstance(long_ago.resolution, RaiseAlert)


def test_two_tasks_behind_are_not_one():
    assert find_bad_task(tuple(a_task(n, lag_s=300.0 if n < 2 else 1.0) for n in range(8))) is None
    assert find_bad_task(tuple(a_task(n, lag_s=300.0 if n < 1 else 1.0) for n in range(2))) is None
    assert find_bad_task(tuple(a_task(n, lag_s=None if n < 1 else 1.0) for n in range(4))) is None


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1), st.floats(0, 1e6), st.floats(0, 1e4), st.sampled_from(["", "Connection refused"])
        ),
        min_size=1,
        max_size=8,
    ),
    st.floats(0, 1),
    st.integers(0, 7_200_000),
)
def test_tasks_are_added_only_after_an_update_to_a_busy_job_without_a_failing_dependency(rows, busy, ago):
    tasks = [
        a_task(n, busy=each, rate=rate, lag_s=lag, error=error)
        for n, (each, rate, lag, error) in enumerate(rows)
    ]
    verdict = look(*tasks, frame={"busy_mean": busy}, user_update_ms=NOW_MS - ago)
    if isinstance(verdict.resolution, ChangeLayer):
        assert ago < 3_600_000 and busy >= 0.5 and not any(task.error for task in tasks)
        assert len(tasks) < verdict.resolution.changes["task_count"] <= 16
