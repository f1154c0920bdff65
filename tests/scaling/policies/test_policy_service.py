"""Policies on a fleet: due ones are asked, one decision is applied, broken ones cost only themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.core.errors import StoreUnavailable, VersionConflict
from penstock.core.loop import WorkerThreads
from penstock.core.system_clock import SystemClock
from penstock.core.workers import InlineWorkers
from penstock.scaling.metrics.frames import NoFrame
from penstock.scaling.policies.policy import Cause, ChangeLayer, Policy, Symptom
from penstock.scaling.policies.process import BuiltInPolicy
from penstock.scaling.policies.service import PolicyService
from tests.scaling.policies.kit import (
    NOW_MS,
    MemoryAlerts,
    MemoryFleet,
    MemoryJournal,
    MemoryRecords,
    a_config,
    a_frame,
)
from tests.waiting import LIMIT_S, until


class Scaler(Policy):
    """More tasks while the job lags."""

    name, metrics, priority = "scaler", ("lag_s",), 10

    def detect(self, facts, settings):
        return Symptom(name="lag", text="it lags") if facts.last("lag_s") > 90 else None

    def diagnose(self, symptom, facts, settings):
        return Cause(name="small", text="too small")

    def resolve(self, cause, facts, settings):
        return ChangeLayer(changes={"task_count": 8}, text="8 tasks")


class Raises(Scaler):
    name = "raises"

    def detect(self, facts, settings):
        raise KeyError("no such thing")


class Hangs(Scaler):
    name, go_on = "hangs", threading.Event()

    def detect(self, facts, settings):
        self.go_on.wait(LIMIT_S)
        return Symptom(name="late", text="an answer that comes too late")


class Nonsense(Scaler):
    name = "nonsense"

    def resolve(self, cause, facts, settings):
        return {"task_count": 9}


class Setup:
    """One service over a fleet in memory."""

    def __init__(self, *policies: Policy, workers=None, load=None, jobs=("shops.total",)) -> None:
        self.fleet = MemoryFleet(configs={name: a_config() for name in jobs}, frame=a_frame(lag_s=200.0))
        self.alerts, self.journal = MemoryAlerts(), MemoryJournal()
        self.records = MemoryRecords(journal=self.journal)
        self.service = self.instance(*policies, workers=workers, load=load)

    def instance(self, *policies: Policy, workers=None, load=None) -> PolicyService:
        own = [BuiltInPolicy(policy) for policy in policies]
        return PolicyService(
            self.fleet,
            self.records,
            self.alerts,
            self.journal,
            own,
            workers or InlineWorkers(),
            load=load,
        )


@pytest.fixture
def threads() -> Iterator[WorkerThreads]:
    """Workers that give a piece up after 50 ms."""
    Hangs.go_on.clear()
    workers: WorkerThreads = WorkerThreads("policies", SystemClock(), size=4, stuck_after_ms=50)
    yield workers
    Hangs.go_on.set()
    workers.stop()


def test_a_job_that_lags_is_changed_once_and_the_journal_says_why():
    setup = Setup(Scaler())
    for second in range(0, 240, 10):
        setup.service.tick(NOW_MS + second * 1000)
    assert [(policy, action.changes) for _, policy, action in setup.fleet.applied] == [
        ("scaler", {"task_count": 8})
    ]
    assert [entry.decision for entry in setup.journal.kept] == ["scaler: 8 tasks", "nothing done: held"]
    assert setup.journal.kept[0].reason == "it lags; too small; 8 tasks"


def test_what_did_not_help_is_undone_and_somebody_is_told():
    setup = Setup(Scaler())
    for minute in range(16):
        setup.service.tick(NOW_MS + minute * 60_000)
    assert [action.changes for _, _, action in setup.fleet.applied] == [
        {"task_count": 8},
        {"task_count": None},
    ]
    assert setup.alerts.keys() == {"action_useless"}


def test_without_metrics_nothing_is_done():
    setup = Setup(Scaler())
    setup.fleet.frame = NoFrame(job="shops.total", reason="3 minutes are missing", metrics=("lag_s",))
    setup.service.tick(NOW_MS)
    assert setup.fleet.applied == [] and setup.alerts.keys() == set()
    assert "3 minutes are missing" in setup.journal.kept[0].reason


def test_a_job_says_how_many_minutes_a_policy_must_know():
    setup = Setup(Scaler())
    setup.service.tick(NOW_MS)
    setup.fleet.settings = {"scaler": {"minutes": 2}}
    setup.service.tick(NOW_MS + 60_000)
    assert setup.fleet.minutes == [Scaler.minutes, 2]
    for wrong in (0, -1, 14 * 24 * 60 + 1, "two"):
        setup.fleet.settings = {"scaler": {"minutes": wrong}}
        setup.service.manage("shops.total", now=lambda: NOW_MS, asked_by="olga")
    assert len(setup.fleet.minutes) == 2 and setup.alerts.keys() == {"policy_settings"}


def test_policies_that_raise_hang_or_talk_nonsense_cost_nobody_else(threads):
    setup = Setup(Scaler(), Raises(), Hangs(), Nonsense(), workers=threads)
    setup.service.tick(NOW_MS)
    until(lambda: setup.service.tick(NOW_MS) or setup.fleet.applied)
    assert [policy for _, policy, _ in setup.fleet.applied] == ["scaler"]
    said = {said.policy: said for said in setup.service.last["shops.total"].outcomes}
    assert {name: found.outcome for name, found in said.items()} == {
        "scaler": "applied",
        "raises": "broken",
        "hangs": "broken",
        "nonsense": "broken",
    }
    assert "KeyError" in said["raises"].reason and "hung" in said["hangs"].reason
    assert setup.alerts.keys() == {"policy_raised", "policy_hung", "policy_nonsense"}
    # While it hangs it is not asked again; when it comes back its old answer is nobody's.
    later = NOW_MS + 3_600_000
    setup.service.tick(later)
    until(lambda: setup.service.tick(later) or "not ended" in str(setup.service.last["shops.total"].outcomes))
    Hangs.go_on.set()
    until(lambda: not threads.busy())
    setup.service.tick(later)
    assert "late" not in str(setup.service.last["shops.total"].outcomes)


def test_a_hanging_policy_of_one_job_does_not_hold_up_another(threads):
    setup = Setup(Hangs(), Scaler(), workers=threads, jobs=("a", "b", "c"))
    until(lambda: setup.service.tick(NOW_MS) or len(setup.fleet.applied) == 3)
    assert {job for job, _, _ in setup.fleet.applied} == {"a", "b", "c"}


class LaterWorkers(InlineWorkers):
    """Results come when they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = False

    def take_finished(self):
        return super().take_finished() if self.is_open else ()


def test_of_two_instances_that_look_at_once_one_acts():
    """Plan: both have read the record before either writes."""
    workers = LaterWorkers(), LaterWorkers()
    setup = Setup(Scaler(), workers=workers[0])
    services = setup.service, setup.instance(Scaler(), workers=workers[1])
    for service in services:
        service.tick(NOW_MS)
    for service, own in zip(services, workers, strict=True):
        own.is_open = True
        service.tick(NOW_MS)
    assert len(setup.fleet.applied) == 1
    services[1].tick(NOW_MS + 60_000)
    assert len(setup.fleet.applied) == 1, "the loser reads what the other did"


def test_a_write_that_is_refused_is_told_and_tried_again_after_the_cool_down():
    setup = Setup(Scaler())
    setup.fleet.refuse = VersionConflict("shops.total", expected=1, actual=2)
    setup.service.tick(NOW_MS)
    assert "another writer" in setup.journal.kept[0].reason
    assert setup.records.load("shops.total")[0].open is None, "there is nothing to watch"
    setup.fleet.refuse = None
    setup.service.tick(NOW_MS + 60_000)
    assert setup.fleet.applied == []
    setup.service.tick(NOW_MS + 700_000)
    assert len(setup.fleet.applied) == 1


def test_a_store_that_is_away_costs_a_round_and_no_more():
    setup = Setup(Scaler())

    def away(job, record, version):
        raise StoreUnavailable("the store did not answer")

    kept, setup.records.save = setup.records.save, away  # type: ignore[method-assign]
    setup.service.tick(NOW_MS)
    assert setup.fleet.applied == []
    setup.records.save = kept  # type: ignore[method-assign]
    setup.service.tick(NOW_MS + 60_000)
    assert len(setup.fleet.applied) == 1


def test_settings_out_of_range_are_told_and_the_rest_goes_on():
    setup = Setup(Scaler(), Nonsense())
    setup.fleet.settings = {"nonsense": {"every_s": -3}, "unheard_of": {}, "scaler": {"cooldown_s": 60}}
    setup.service.tick(NOW_MS)
    assert len(setup.fleet.applied) == 1
    said = {said.policy: said.reason for said in setup.service.last["shops.total"].outcomes}
    assert (
        "policies.nonsense.every_s" in said["nonsense"]
        and "the policy 'unheard_of' does not exist" in said["unheard_of"]
    )
    assert setup.alerts.keys() == {"policy_settings"}


def test_somebody_may_ask_for_a_look_at_any_time():
    setup = Setup(Scaler())
    setup.fleet.frame = a_frame(lag_s=1.0)
    setup.service.tick(NOW_MS)
    setup.fleet.frame = a_frame(lag_s=np.full(15, 300.0))
    setup.service.tick(NOW_MS + 1000)
    assert setup.fleet.applied == []
    setup.service.ask("shops.total")
    setup.service.ask("no.such.job")
    setup.service.tick(NOW_MS + 2000)
    assert len(setup.fleet.applied) == 1


def test_a_job_that_is_gone_is_forgotten():
    setup = Setup(Scaler())
    setup.service.tick(NOW_MS)
    setup.fleet.configs.clear()
    setup.service.tick(NOW_MS + 60_000)
    assert setup.service.last == {}


def test_many_jobs_are_looked_at_over_several_ticks_and_then_at_their_time():
    setup = Setup(Scaler(), jobs=[f"shops.job{number:02}" for number in range(60)])
    setup.fleet.frame = NoFrame(job="shops", reason="nothing is known", metrics=("lag_s",))
    looks = []
    for second in range(120):
        setup.service.tick(NOW_MS + second * 1000)
        looks.append(len(setup.fleet.minutes))
    assert looks[:4] == [25, 50, 60, 60]
    assert looks[59:63] == [60, 85, 110, 120], "each a minute after its last one"


def test_of_too_many_jobs_nobody_is_left_out_and_who_is_asked_for_is_first():
    """Plan: ticks come so rarely that all are due each time."""
    jobs = [f"shops.job{number:02}" for number in range(60)]
    setup = Setup(Scaler(), jobs=jobs)
    setup.fleet.frame = NoFrame(job="shops", reason="nothing is known", metrics=("lag_s",))
    setup.service.ask(jobs[-1])
    seen = []
    for minute in range(3):
        setup.service.tick(NOW_MS + minute * 120_000)
        seen.append({*setup.service.last})
    assert jobs[-1] in seen[0] and len(seen[0]) == 25 and seen[2] == {*jobs}
