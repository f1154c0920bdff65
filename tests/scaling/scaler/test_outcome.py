"""The scaler looks at what came of its actions, as applied: undoes what did not help, remembers, alerts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.scaling.scaler.decide import decide, record_applied
from penstock.scaling.scaler.observation import (
    AvailableResources,
    DecisionSettings,
    Footprint,
    Hold,
    Observation,
    Remaining,
    Resize,
    ScalingAction,
    ShapeLimits,
    Untriaged,
    to_data,
)
from tests.scaling.scaler.jobs import START, a_job, a_shape, an_observation, at_rest

P = 100.0
LAGGING = {"lag_s": 500.0, "lag_records": 1e6, "busy_mean": 1.0}


def an_action(before: int, after: int, minutes_ago: int = 20, **changes: Any) -> ScalingAction:
    plain = {
        "at_minute": START - minutes_ago,
        "input_rate": 600.0,
        "rate_before": 400.0,
        "rate_expected": 800.0,
        "parallel_before": float(before),
    }
    return ScalingAction(before=a_shape(before), after=a_shape(after), **{**plain, **changes})


def after_up(processed: float, action: ScalingAction | None = None, **changes: Any) -> Observation:
    plain = {
        "ingest_rate": 600.0,
        "processed_rate": processed,
        "past": (action if action is not None else an_action(4, 8),),
        "footprint": Footprint(thread_rate=P),
        **LAGGING,
        **changes,
    }
    return an_observation(a_job(8, changed_minute=START - 20), **plain)


def test_what_did_not_help_is_undone_remembered_and_told():
    decision = decide(after_up(processed=410.0))
    assert isinstance(decision, Resize) and (decision.direction, decision.task_count) == ("undo", 4)
    judged = decision.learnt.judged
    assert judged is not None and (judged.outcome, judged.judged_minute) == ("ineffective", START)
    assert "more tasks or threads do not help" in decision.learnt.alert
    assert to_data(decision)["outcome_of_last"] == "ineffective"
    # Back at four tasks, the same lag is not answered by the same step again.
    again = an_observation(
        a_job(4, changed_minute=START - 5), past=(judged,), ingest_rate=600.0, processed_rate=400.0, **LAGGING
    )
    assert isinstance(decide(again), Untriaged)
    assert isinstance(decide(replace(again, past=())), Resize)


def test_it_is_forgotten_after_a_while_an_update_or_with_more_input():
    judged = an_action(4, 8, 200, outcome="ineffective", judged_minute=START - 180)
    remembered = an_observation(a_job(4), past=(judged,), ingest_rate=600.0, processed_rate=400.0, **LAGGING)
    assert isinstance(decide(remembered), Untriaged)
    old = replace(judged, at_minute=START - 500, judged_minute=START - 480)
    assert isinstance(decide(replace(remembered, past=(old,))), Resize)
    updated = replace(remembered.job, updated_minute=START - 100)
    assert isinstance(decide(replace(remembered, job=updated)), Resize)
    assert isinstance(
        decide(an_observation(a_job(4), past=(judged,), ingest_rate=900.0, processed_rate=400.0, **LAGGING)),
        Resize,
    )


def test_a_tenth_of_the_expected_gain_is_help():
    decision = decide(after_up(processed=450.0))
    assert not (isinstance(decision, Resize) and decision.direction == "undo")
    assert decision.learnt.judged is not None and decision.learnt.judged.outcome == "worked"
    healthy = decide(after_up(processed=400.0, lag_s=1.0, lag_records=0.0, busy_mean=0.5))
    assert healthy.learnt.judged is not None and healthy.learnt.judged.outcome == "worked"


def test_nothing_is_judged_before_the_tasks_have_settled():
    decision = decide(after_up(processed=410.0, action=an_action(4, 8, minutes_ago=6)))
    assert decision.learnt.judged is None
    assert not (isinstance(decision, Resize) and decision.direction == "undo")


def test_what_a_person_changed_since_is_not_judged():
    decision = decide(after_up(processed=410.0, action=an_action(4, 6)))
    assert decision.learnt.judged is not None and decision.learnt.judged.outcome == "overruled"
    assert not (isinstance(decision, Resize) and decision.direction == "undo")


def test_an_undo_stays_within_limits_and_what_is_left():
    narrow = replace(after_up(processed=410.0).job, limits=ShapeLimits(task_count_min=6))
    decision = decide(replace(after_up(processed=410.0), job=narrow))
    assert not (isinstance(decision, Resize) and decision.task_count < 6)
    down = an_action(8, 4, rate_before=300.0, input_rate=300.0)
    broke = an_observation(
        a_job(4, changed_minute=START - 20),
        past=(down,),
        ingest_rate=300.0,
        processed_rate=250.0,
        remaining=Remaining(room=AvailableResources(cpu=1)),
        **LAGGING,
    )
    decision = decide(broke)
    assert not (isinstance(decision, Resize) and decision.direction == "undo")


def test_a_step_down_that_broke_the_slo_is_undone_and_corrects_p():
    """Plan: ten tasks carried 700; P was thought to be 200, so five would do. They do 100 each."""
    down = an_action(10, 5, input_rate=700.0, rate_before=700.0)
    lagging = an_observation(
        a_job(5, changed_minute=START - 20, partitions=0),
        past=(down,),
        ingest_rate=700.0,
        processed_rate=500.0,
        footprint=Footprint(thread_rate=200.0),
        settings=DecisionSettings(generation="preactive"),
        **LAGGING,
    )
    decision = decide(lagging)
    assert isinstance(decision, Resize) and (decision.direction, decision.task_count) == ("undo", 10)
    assert decision.learnt.thread_rate == pytest.approx(100)
    assert decision.learnt.judged is not None and decision.learnt.judged.outcome == "broke_slo"
    idle = decide(replace(lagging, frame=an_observation(lagging.job, **{**LAGGING, "busy_mean": 0.6}).frame))
    assert idle.learnt.thread_rate == pytest.approx((70 + 200) / 2)  # between X/n and P
    proactive = decide(replace(lagging, settings=DecisionSettings(generation="proactive")))
    assert proactive.learnt.thread_rate is None


def test_more_input_explains_a_lag_without_the_step_down():
    down = an_action(10, 5, input_rate=300.0, rate_before=300.0)
    decision = decide(
        an_observation(
            a_job(5, changed_minute=START - 20),
            past=(down,),
            ingest_rate=700.0,
            processed_rate=500.0,
            **LAGGING,
        )
    )
    assert isinstance(decision, Resize) and decision.direction == "up"


def test_a_step_down_that_held_for_an_hour_worked():
    down = an_action(10, 5, minutes_ago=70, input_rate=300.0)
    observation = at_rest(a_job(5, partitions=0), thread_rate=P, input_rate=300, past=(down,))
    judged = decide(observation).learnt.judged
    assert judged is not None and judged.outcome == "worked"


def test_a_step_down_that_broke_is_not_tried_again_under_the_same_load():
    broke = an_action(10, 3, 100, input_rate=200.0, outcome="broke_slo", judged_minute=START - 90)
    observation = at_rest(a_job(10, partitions=0), thread_rate=P, input_rate=200, past=(broke,))
    decision = decide(observation)
    assert isinstance(decision, Hold) and decision.bound == "remembered outcome"
    less = at_rest(a_job(10, partitions=0), thread_rate=P, input_rate=100, past=(broke,))
    assert isinstance(decide(less), Resize)


def test_what_was_applied_is_what_is_expected():
    """Plan: twelve tasks were wished, a layer clamped them to six: six is what is held against the outcome."""
    observation = at_rest(a_job(4, partitions=0), thread_rate=P, input_rate=800)
    decision = decide(observation)
    assert isinstance(decision, Resize) and decision.task_count == 12
    assert decision.rate_expected == pytest.approx(800)
    action = record_applied(decision, a_shape(6), observation)
    assert action is not None and action.rate_expected == pytest.approx(600)
    assert (action.before.task_count, action.after.task_count, action.outcome) == (4, 6, "pending")
    undone = record_applied(replace(decision, direction="undo"), a_shape(6), observation)
    assert undone is not None and undone.outcome == "worked"
    assert record_applied(decision, a_shape(6), replace(observation, now_ms=0)) is None


@pytest.mark.parametrize("symptom", [{"processed_rate": [400.0] * 86 + [0.0] * 4}, {"restarts": 1.0}])
def test_what_was_tried_while_nothing_was_processed_is_not_judged(symptom: dict[str, Any]):
    """Plan: what the tasks call hangs, or they fail, since the step up: it stays, and is held against nobody."""
    hangs = after_up(**{"processed": 410.0, **symptom} if "restarts" in symptom else {"processed": 0.0})
    if "processed_rate" in symptom:
        hangs = replace(hangs, frame=an_observation(hangs.job, ingest_rate=600.0, **LAGGING, **symptom).frame)
    decision = decide(hangs)
    assert isinstance(decision, Untriaged) and decision.learnt.judged is None
    late = replace(hangs, past=(an_action(4, 8, minutes_ago=70),))
    judged = decide(replace(late, job=replace(late.job, changed_minute=START - 70))).learnt.judged
    assert judged is not None and judged.outcome == "inconclusive"


def test_a_verdict_ends_when_more_is_processed_than_in_the_trial():
    """Plan: eight tasks did 100/s in all while a dependency was slow. Now four do 400: it is well again."""
    judged = an_action(4, 8, 200, outcome="ineffective", judged_minute=START - 180, rate_after=100.0)
    now = an_observation(a_job(4), past=(judged,), ingest_rate=600.0, processed_rate=400.0, **LAGGING)
    assert isinstance(decide(now), Resize)
    same = replace(judged, rate_after=380.0)
    assert isinstance(decide(replace(now, past=(same,))), Untriaged)


def test_a_step_down_before_a_hang_is_not_blamed_for_it():
    down = an_action(10, 5, input_rate=300.0, rate_before=300.0)
    hangs = an_observation(
        a_job(5, changed_minute=START - 20), past=(down,), ingest_rate=300.0, processed_rate=0.0, **LAGGING
    )
    decision = decide(hangs)
    assert isinstance(decision, Untriaged) and decision.learnt.judged is None
