"""One decision a round, by priority; what was done is followed up; everything else has a reason."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.scaling.policies.policy import (
    Broken,
    Cause,
    ChangeLayer,
    ControlSettings,
    MoveTasks,
    Nothing,
    RaiseAlert,
    Symptom,
    Verdict,
)
from penstock.scaling.policies.round import (
    FIGHT_MS,
    USELESS_MS,
    Candidate,
    Due,
    FleetState,
    NotDue,
    OpenAction,
    PolicyRecord,
    Signals,
    decide_due,
    decide_round,
    forget_action,
)
from tests.scaling.policies.kit import NOW_MS, a_config, a_job

FLEET = FleetState()


def more(policy: str, tasks: int, priority: int = 0, **settings) -> Candidate:
    action = ChangeLayer(changes={"task_count": tasks}, text=f"{tasks} tasks")
    return rival(policy, action, priority, **settings)


def rival(policy: str, resolution, priority: int = 0, symptom: str = "lag", **settings) -> Candidate:
    verdict = Verdict(
        policy=policy,
        symptom=Symptom(name=symptom, text="it lags"),
        cause=Cause(name="small", text="too small"),
        resolution=resolution,
    )
    return Candidate(verdict=verdict, priority=priority, settings=ControlSettings(**settings))


def well(policy: str) -> Candidate:
    verdict = Verdict(policy=policy, resolution=Nothing(reason="no symptom"))
    return Candidate(verdict=verdict, priority=0, settings=ControlSettings())


def outcomes(decision) -> dict[str, str]:
    return {said.policy: said.outcome for said in decision.outcomes}


def test_the_highest_priority_is_applied_and_the_others_are_told_why_not():
    decision = decide_round([more("a", 5), more("b", 8, 10)], a_job(), PolicyRecord(), FLEET, now_ms=NOW_MS)
    assert decision.apply is not None and decision.apply.policy == "b"
    assert outcomes(decision) == {"b": "applied", "a": "held"}
    assert decision.record.open is not None and decision.record.open.undo == {"task_count": None}


def test_advice_is_given_and_nothing_is_done():
    for fleet, job, settings in [
        (FleetState(advice_only=True), a_job(), {}),
        (FLEET, a_job(advice_only=True), {}),
        (FLEET, a_job(), {"advice_only": True}),
    ]:
        decision = decide_round([more("a", 8, **settings)], job, PolicyRecord(), fleet, now_ms=NOW_MS)
        assert decision.apply is None and outcomes(decision) == {"a": "advised"}
        assert decision.record == PolicyRecord()


def test_a_policy_that_only_advises_leaves_the_turn_to_the_next():
    rivals = [more("a", 8, 10, advice_only=True), more("b", 6)]
    decision = decide_round(rivals, a_job(), PolicyRecord(), FLEET, now_ms=NOW_MS)
    assert outcomes(decision) == {"a": "advised", "b": "applied"}


def test_nothing_is_done_under_a_change_or_against_oncall_or_over_the_fleets_limit():
    full = FleetState(rescales_running=10, rescales_max=10)
    for job, fleet, why in [
        (a_job(is_settled=False), FLEET, "in progress"),
        (a_job(oncall=frozenset({"task_count"})), FLEET, "oncall layer sets task_count"),
        (a_job(), full, "10 jobs"),
        (a_job(config=a_config(task_count=8)), FLEET, "these values already"),
    ]:
        decision = decide_round([more("a", 8)], job, PolicyRecord(), fleet, now_ms=NOW_MS)
        assert decision.apply is None and why in decision.outcomes[0].reason
    memory = rival("a", ChangeLayer(changes={"resources": {"memory_mb": 2048}}, text="more memory"))
    assert decide_round([memory], a_job(), PolicyRecord(), full, now_ms=NOW_MS).apply is not None
    theirs = a_job(oncall=frozenset({"resources"}))
    assert decide_round([memory], theirs, PolicyRecord(), FLEET, now_ms=NOW_MS).apply is None


def test_a_policy_cools_down_and_others_wait_to_see_whether_it_helped():
    record = decide_round([more("a", 8)], a_job(), PolicyRecord(), FLEET, now_ms=NOW_MS).record
    job = a_job(config=a_config(task_count=8))
    soon = NOW_MS + 60_000
    assert "cooldown" in decide_round([more("a", 9)], job, record, FLEET, now_ms=soon).outcomes[0].reason
    move = rival("b", MoveTasks(tasks=("shops.total/0",), text="move one"))
    assert "not checked yet" in decide_round([move], job, record, FLEET, now_ms=soon).outcomes[0].reason
    above = rival("b", MoveTasks(tasks=("shops.total/0",), text="move one"), 5)
    assert decide_round([above], job, record, FLEET, now_ms=soon).apply is not None


def test_what_helped_is_kept():
    record = decide_round([more("a", 8)], a_job(), PolicyRecord(), FLEET, now_ms=NOW_MS).record
    job = a_job(config=a_config(task_count=8))
    decision = decide_round([well("a")], job, record, FLEET, now_ms=NOW_MS + 400_000)
    assert decision.record.open is None and decision.record.useless == {} and decision.apply is None
    assert "helped" in decision.outcomes[0].reason


def test_what_did_not_help_is_taken_back_once_told_and_not_tried_again():
    before = a_job(layer={"task_count": 3})
    record = decide_round([more("a", 8)], before, PolicyRecord(), FLEET, now_ms=NOW_MS).record
    later = NOW_MS + 700_000
    undone = decide_round([more("a", 8)], a_job(config=a_config(task_count=8)), record, FLEET, now_ms=later)
    assert undone.apply is not None and undone.apply.is_undo
    assert undone.apply.action == ChangeLayer(changes={"task_count": 3}, text=undone.apply.action.text)
    assert {alert.key for _, alert in undone.alerts} == {"action_useless"}
    again = decide_round([more("a", 8)], a_job(), undone.record, FLEET, now_ms=later + 700_000)
    assert again.apply is None and outcomes(again) == {"a": "useless"}
    other = decide_round([more("a", 9)], a_job(), undone.record, FLEET, now_ms=later + 700_000)
    assert other.apply is not None
    much_later = later + USELESS_MS + 1
    assert decide_round([more("a", 8)], a_job(), undone.record, FLEET, now_ms=much_later).apply is not None


def test_what_a_person_changed_since_is_not_taken_back():
    record = decide_round([more("a", 8)], a_job(), PolicyRecord(), FLEET, now_ms=NOW_MS).record
    job = a_job(config=a_config(task_count=12))
    decision = decide_round([more("a", 8)], job, record, FLEET, now_ms=NOW_MS + 700_000)
    assert decision.apply is None or not decision.apply.is_undo
    assert "changed by another writer" in decision.outcomes[0].reason


def test_without_a_verdict_nobody_can_tell_whether_it_helped():
    record = decide_round([more("a", 8)], a_job(), PolicyRecord(), FLEET, now_ms=NOW_MS).record
    broken = Candidate(
        verdict=Broken(policy="a", how="metrics", text="gap"), priority=0, settings=ControlSettings()
    )
    job = a_job(config=a_config(task_count=8))
    decision = decide_round([broken], job, record, FLEET, now_ms=NOW_MS + 700_000)
    assert decision.record.open == record.open and decision.apply is None and decision.alerts == ()


def test_two_policies_that_fight_are_told_apart():
    """Plan: one makes it 8, the other would make it 4 again as soon as it may."""
    record = decide_round([more("up", 8)], a_job(), PolicyRecord(), FLEET, now_ms=NOW_MS).record
    job = a_job(config=a_config(task_count=8))
    rivals = [well("up"), more("down", 4, 20)]
    decision = decide_round(rivals, job, record, FLEET, now_ms=NOW_MS + 400_000)
    assert decision.apply is None and outcomes(decision)["down"] == "fights"
    assert {alert.key for _, alert in decision.alerts} == {"action_fights"}
    assert decide_round(rivals, job, decision.record, FLEET, now_ms=NOW_MS + FIGHT_MS + 1).apply is not None


def test_broken_policies_cost_nobody_else():
    broken = Candidate(
        verdict=Broken(policy="x", how="raised", text="KeyError: 'a'"),
        priority=99,
        settings=ControlSettings(),
    )
    decision = decide_round([broken, more("a", 8)], a_job(), PolicyRecord(), FLEET, now_ms=NOW_MS)
    assert decision.apply is not None and outcomes(decision) == {"x": "broken", "a": "applied"}
    assert decision.alerts[0][1].key == "policy_raised" and "oncall set" in decision.alerts[0][1].what_to_do


def test_alerts_pass_beside_the_one_change():
    alert = rival("d", RaiseAlert(key="skew", text="a hot key"))
    decision = decide_round([alert, more("a", 8, 5)], a_job(), PolicyRecord(), FLEET, now_ms=NOW_MS)
    assert decision.apply is not None and [found.key for _, found in decision.alerts] == ["skew"]


def test_a_refused_write_is_as_if_it_had_not_been_decided_but_for_the_cool_down():
    record = decide_round([more("a", 8)], a_job(), PolicyRecord(), FLEET, now_ms=NOW_MS).record
    forgotten = forget_action(record, "a")
    assert forgotten.open is None and forgotten.changes == () and forgotten.acted == {"a": NOW_MS}


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 16), st.integers(-5, 5)),
        max_size=6,
        unique_by=lambda r: r[0],
    ),
    st.lists(st.integers(1_000, 900_000), min_size=1, max_size=12),
)
def test_rounds_settle_whatever_policies_want(wishes, pauses):
    """Plan: the same wishes round after round. At most one change a round, and each policy's is tried once."""
    config, record, now_ms = a_config(), PolicyRecord(), NOW_MS
    applied: list[str] = []
    for pause in pauses * 6:
        now_ms += pause
        rivals = [more(policy, tasks, priority) for policy, tasks, priority in wishes]
        decision = decide_round(rivals, a_job(config=config), record, FLEET, now_ms=now_ms)
        record = decision.record
        if decision.apply is not None:
            tasks = decision.apply.action.changes["task_count"]
            config = a_config(task_count=4 if tasks is None else tasks)
            applied += [] if decision.apply.is_undo else [f"{decision.apply.policy} {tasks}"]
        assert sum(said.outcome == "applied" for said in decision.outcomes) <= 1
    if now_ms - NOW_MS < USELESS_MS:
        assert len(applied) == len(set(applied))


@given(st.permutations([("a", 5, 1), ("b", 6, 3), ("c", 7, 3), ("d", 8, 2)]))
def test_the_order_in_which_policies_answer_does_not_matter(order):
    rivals = [more(policy, tasks, priority) for policy, tasks, priority in order]
    decision = decide_round(rivals, a_job(), PolicyRecord(), FLEET, now_ms=NOW_MS)
    assert decision.apply is not None and decision.apply.policy == "b"


def test_triggers():
    hour = 3_600_000
    midnight = NOW_MS // (24 * hour) * 24 * hour
    night = ControlSettings(from_hour=22, to_hour=6)
    lagging = ControlSettings(when_lag_s=60, when_busy=0.9)

    def due(settings, last_ms=None, now_ms=NOW_MS, asked=False, **signals):
        found = decide_due(settings, last_ms=last_ms, signals=Signals(**signals), now_ms=now_ms, asked=asked)
        assert found.reason
        return isinstance(found, Due)

    assert due(ControlSettings()) and due(ControlSettings(), last_ms=NOW_MS - 60_000)
    assert not due(ControlSettings(), last_ms=NOW_MS - 59_000)
    assert due(ControlSettings(), last_ms=NOW_MS + hour), "the clock went back"
    assert due(night, now_ms=midnight + 23 * hour) and due(night, now_ms=midnight + 5 * hour)
    assert not due(night, now_ms=midnight + 6 * hour)
    assert not due(lagging) and not due(lagging, lag_s=59.0) and due(lagging, lag_s=60.0)
    assert due(lagging, busy=0.95)
    assert due(lagging, asked=True) and due(night, asked=True, now_ms=midnight + 12 * hour)
    assert not due(ControlSettings(enabled=False), asked=True)
    assert isinstance(decide_due(lagging, last_ms=None, signals=Signals(), now_ms=NOW_MS), NotDue)


def test_an_action_that_nobody_judges_is_let_go_an_hour_after_its_time():
    """Plan: an action of a service beside the policies, which was switched off meanwhile."""
    open_ = OpenAction(
        policy="scaler",
        priority=50,
        symptom="up",
        action=MoveTasks(tasks=("shops.total/0",), text="away"),
        undo=None,
        at_ms=NOW_MS,
        check_ms=NOW_MS + 60_000,
    )
    record = PolicyRecord(open=open_)
    kept = decide_round([], a_job(), record, FleetState(), now_ms=NOW_MS + 60_000 + FIGHT_MS)
    assert kept.record.open == open_
    gone = decide_round([], a_job(), record, FleetState(), now_ms=NOW_MS + 60_001 + FIGHT_MS)
    assert gone.record.open is None and "was not run again" in gone.outcomes[0].reason
