"""A look that somebody asks for: one at a time, beside the schedule; and what of a round is news."""

from __future__ import annotations

import threading

import pytest

from penstock.core.errors import CorruptData, NotFound, Refused
from penstock.core.workers import InlineWorkers
from penstock.scaling.metrics.frames import NoFrame
from penstock.scaling.policies.policy import Cause, Nothing, Policy, Symptom
from penstock.scaling.policies.policy_manager import SplitWorkers, round_to_json
from penstock.scaling.policies.service import ROUND_MS
from tests.scaling.policies.kit import NOW_MS, a_frame
from tests.scaling.policies.test_policy_service import LaterWorkers, Raises, Scaler, Setup
from tests.waiting import LIMIT_S, join

JOB = "shops.total"


def now() -> int:
    return NOW_MS


class Waits(Scaler):
    """Answers when it is let go."""

    name = "waits"

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def detect(self, facts, settings):
        self.asked.set()
        assert self.go_on.wait(LIMIT_S)


class Seldom(Policy):
    """Nothing is ever wrong."""

    name = "seldom"


class Counts(Policy):
    """Always the same, but for its numbers."""

    name, metrics = "counts", ("lag_s",)

    def detect(self, facts, settings):
        return Symptom(
            name="lag", text=f"it lags {facts.last('lag_s')} s", evidence={"lag_s": facts.last("lag_s")}
        )

    def diagnose(self, symptom, facts, settings):
        name = "large" if facts.last("lag_s") > 500 else "small"
        return Cause(name=name, text="because", evidence={"formula": "X / P", "bound": "quota", "x": 3})

    def resolve(self, cause, facts, settings):
        return Nothing(reason=f"only {facts.last('lag_s')} s")


def test_a_look_acts_remembers_and_tells():
    setup = Setup(Scaler())
    done = setup.service.manage(JOB, now=now, asked_by="olga")
    assert done.decision.apply is not None and len(setup.fleet.applied) == 1
    (entry,) = setup.journal.kept
    assert entry.data["asked_by"] == "olga" and entry.data["said"][0]["outcome"] == "applied"
    setup.service.tick(NOW_MS + 1000)
    assert len(setup.fleet.applied) == 1
    again = setup.service.manage(JOB, now=now, asked_by="olga")
    assert again.decision.apply is None and len(setup.journal.kept) == 2, "who asks is always told"


def test_a_dry_look_leaves_no_trace():
    setup = Setup(Scaler())
    done = setup.service.manage(JOB, now=now, is_dry=True)
    assert round_to_json(done)["change"]["outcome"] == "would be done"
    assert setup.fleet.applied == [] and setup.journal.kept == [] and setup.records.kept == {}
    assert setup.alerts.now == {}


def test_one_policy_is_asked_alone_and_a_wrong_name_is_told():
    setup = Setup(Scaler(), Raises())
    done = setup.service.manage(JOB, now=now, policy="raises")
    assert [(said.policy, said.outcome) for said in done.decision.outcomes] == [("raises", "broken")]
    assert "KeyError" in done.decision.outcomes[0].reason and setup.fleet.applied == []
    with pytest.raises(NotFound, match="no policy 'scaller'") as caught:
        setup.service.manage(JOB, now=now, policy="scaller")
    assert "scaler" in caught.value.fix
    with pytest.raises(Refused, match="does not run"):
        setup.service.manage("no.such", now=now)


def test_a_policy_that_is_off_is_named():
    setup = Setup(Scaler())
    setup.fleet.settings = {"scaler": {"enabled": False}}
    done = setup.service.manage(JOB, now=now)
    assert done.off == ("scaler",) and round_to_json(done)["said"][0]["outcome"] == "off"


def test_a_scheduled_round_gives_way():
    workers = LaterWorkers()
    setup = Setup(Scaler(), workers=workers)
    setup.service.tick(NOW_MS)
    setup.service.manage(JOB, now=now, asked_by="olga")
    workers.is_open = True
    setup.service.tick(NOW_MS + 100)
    assert len(setup.fleet.applied) == 1


def test_a_second_look_is_refused_while_the_first_is_under_way():
    policy = Waits()
    setup = Setup(policy)
    first = threading.Thread(target=lambda: setup.service.manage(JOB, now=now))
    first.start()
    try:
        assert policy.asked.wait(LIMIT_S)
        with pytest.raises(Refused, match=r"run on .* already"):
            setup.service.manage(JOB, now=now)
        setup.service.tick(NOW_MS)
        assert setup.journal.kept == [], "the schedule leaves it alone"
    finally:
        policy.go_on.set()
        join(first)
    setup.service.manage(JOB, now=now)


def test_another_instance_that_wrote_first_is_told():
    setup = Setup(Scaler())
    load = setup.records.load

    def load_and_lose(job):
        found = load(job)
        setup.records.kept[job] = found[0], found[1] + 1
        return found

    setup.records.load = load_and_lose  # type: ignore[method-assign]
    with pytest.raises(Refused, match="at the same time"):
        setup.service.manage(JOB, now=now, asked_by="olga")
    assert setup.fleet.applied == []


def test_policies_of_different_schedules_do_not_flood_the_journal():
    setup = Setup(Seldom(), Counts())
    setup.fleet.settings = {"seldom": {"every_s": 300}}
    for minute in range(60):
        setup.fleet.frame = a_frame(lag_s=100.0 + minute)
        setup.service.tick(NOW_MS + minute * 60_000)
    assert len(setup.journal.kept) == 1
    said = {said["policy"]: said for said in setup.journal.kept[0].data["said"]}["counts"]
    assert (said["formula"], said["bound"]) == ("X / P", "quota") and said["inputs"] == {
        "lag_s": 100.0,
        "x": 3,
    }
    setup.fleet.frame = a_frame(lag_s=900.0)
    setup.service.tick(NOW_MS + 3_600_000)
    assert len(setup.journal.kept) == 2, "another cause is news"
    setup.fleet.frame = NoFrame(job=JOB, reason="3 minutes are missing")
    setup.service.tick(NOW_MS + 3_660_000)
    setup.fleet.frame = NoFrame(job=JOB, reason="4 minutes are missing")
    setup.service.tick(NOW_MS + 3_720_000)
    assert len(setup.journal.kept) == 3


def test_a_damaged_record_stops_only_its_job():
    setup = Setup(Scaler(), jobs=("a", "b"))
    load_all = setup.records.load_all

    def damaged(jobs):
        return load_all(jobs) | {"a": CorruptData("cannot be read")}

    setup.records.load_all = damaged  # type: ignore[method-assign]
    setup.service.tick(NOW_MS)
    assert [job for job, _, _ in setup.fleet.applied] == ["b"]


def test_a_policy_whose_turn_does_not_come_costs_its_own_answer():
    own, users = InlineWorkers(), LaterWorkers()
    setup = Setup(Scaler(), Seldom(), workers=SplitWorkers(own, users, frozenset({"scaler"})))
    setup.service.tick(NOW_MS)
    assert setup.fleet.applied == []
    setup.service.tick(NOW_MS + ROUND_MS)
    assert [policy for _, policy, _ in setup.fleet.applied] == ["scaler"]
    said = {said.policy: said for said in setup.service.last[JOB].outcomes}
    assert "was not started" in said["seldom"].reason


def test_an_instance_that_stands_by_gives_its_rounds_up():
    workers = LaterWorkers()
    setup = Setup(Scaler(), workers=workers)
    setup.service.tick(NOW_MS)
    setup.service.stand_by()
    workers.is_open = True
    setup.service._collect(NOW_MS)
    assert setup.fleet.applied == [] and not setup.service._rounds
