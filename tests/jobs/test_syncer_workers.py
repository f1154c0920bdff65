"""Plans beside the rounds: parallel across jobs, serial within one, and a job that hangs delays nobody (I13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import CorruptData, Fenced, StoreUnavailable
from penstock.core.loop import WorkerThreads
from penstock.core.system_clock import SystemClock
from penstock.db.journal_store import JournalStore
from penstock.jobs.syncer.plan_runner import PlanOutcome
from penstock.jobs.syncer.state_syncer import SyncerSettings
from penstock.jobs.syncer.sync_plan import PlanStep
from tests.builders import a_job, an_output
from tests.jobs.world import Fail, Hang, Lie, World, producers_of
from tests.waiting import LIMIT_S, until

JOBS = [f"demo.j{number}" for number in range(6)]


class Clock(SystemClock):
    """Real time, but a test may let the time of hanging calls pass."""

    later_ms = 0

    def boot_ms(self) -> int:
        return super().boot_ms() + self.later_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def world(place: Path | str | None, clock: Clock) -> Iterator[World]:
    """Six jobs that run, and workers for four calls at a time."""
    workers: WorkerThreads[PlanOutcome] = WorkerThreads("test", clock, size=4, threads_max=6)
    world = World(place, settings=SyncerSettings(fence_after_ms=0), workers=workers)
    for job in JOBS:
        a_job(world.service, job)
    settle(world)
    world.data.calls.clear()
    yield world
    for trouble in world.data.trouble.values():
        if isinstance(trouble, Hang):
            trouble.released.set()
    until(lambda: not workers.busy())  # one that was written off writes too, when it is released
    workers.stop()
    world.database.close()


def round_(world: World) -> Any:
    return world.syncer.sync_once(SystemClock().now_ms())


def rounds(world: World, condition: Callable[[Any], bool]) -> Any:
    """Rounds until a report is as it should be."""
    return until(lambda: report if condition(report := round_(world)) else None)


def settle(world: World) -> None:
    rounds(world, lambda report: report.is_idle)


def rescale(world: World, *jobs: str) -> None:
    for job in jobs:
        world.write("provisioner", job=job, task_count=3)


def is_rescaled(world: World, job: str) -> bool:
    row = world.store.running.row(job)
    return row is not None and row.config.task_count == 3 and row.is_served


def hang(world: World, call: str, job: str) -> Hang:
    trouble = world.data.trouble[call, job] = Hang()
    return trouble


def test_a_round_does_not_wait_for_calls_and_reports_what_is_under_way(world: World) -> None:
    call = hang(world, "prepare", JOBS[0])
    rescale(world, JOBS[0])
    assert round_(world).open == (JOBS[0],)
    assert call.is_entered.wait(LIMIT_S)
    for _ in range(5):
        assert round_(world).open == (JOBS[0],)
    assert world.data.calls == [("prepare", JOBS[0])], "a call under way is not made a second time"
    call.released.set()
    settle(world)
    assert is_rescaled(world, JOBS[0])


@pytest.mark.parametrize("call", ["prepare", "is_stopped", "fence", "retire"])
def test_a_job_that_hangs_anywhere_delays_no_other(world: World, call: str) -> None:
    """I13: its plan stands where it is, the others' are over, and simple changes go on."""
    hanging = hang(world, call, JOBS[0])
    rescale(world, *JOBS[:5])
    world.write("provisioner", job=JOBS[5], threads=2)
    rounds(world, lambda report: all(is_rescaled(world, job) for job in JOBS[1:5]))
    rounds(world, lambda report: report.open == (JOBS[0],) and hanging.is_entered.is_set())
    row = world.store.running.row(JOBS[5])
    assert row is not None and row.config.threads == 2
    assert is_rescaled(world, JOBS[0]) is (call == "retire")


def test_more_jobs_hang_than_there_are_workers_and_the_others_still_come_to_their_end(
    world: World, clock: Clock
) -> None:
    """Four workers, four jobs that hang: after a minute other workers take their places."""
    calls = [hang(world, "prepare", job) for job in JOBS[:4]]
    rescale(world, *JOBS)
    round_(world)
    assert all(call.is_entered.wait(LIMIT_S) for call in calls)
    assert round_(world).failed == () and not is_rescaled(world, JOBS[4])
    clock.later_ms = 60_000
    report = rounds(world, lambda report: is_rescaled(world, JOBS[4]) and is_rescaled(world, JOBS[5]))
    report = rounds(world, lambda report: len(report.open) == 4)
    assert {job for job, _ in report.failed} == set(JOBS[:4])
    assert "a call that hangs" in report.failed[0][1] and "What to do" in report.failed[0][1]


def test_people_are_told_once_of_a_call_that_does_not_come_back(world: World, clock: Clock) -> None:
    call = hang(world, "fence", JOBS[0])
    rescale(world, JOBS[0])
    round_(world)
    assert call.is_entered.wait(LIMIT_S)
    clock.later_ms = 60_000
    for _ in range(3):
        assert round_(world).failed[0][0] == JOBS[0]
    alerts = JournalStore(world.database).entries(JOBS[0], kind="alert")
    assert [(entry.decision, "a call that hangs" in entry.reason) for entry in alerts] == [
        ("job.stuck", True)
    ]
    call.released.set()
    settle(world)
    assert is_rescaled(world, JOBS[0]) and round_(world).failed == ()


def test_plans_of_several_jobs_are_under_way_at_once(world: World) -> None:
    calls = [hang(world, "prepare", job) for job in JOBS[:4]]
    rescale(world, *JOBS[:4])
    round_(world)
    assert all(call.is_entered.wait(LIMIT_S) for call in calls), "all four are in their call at the same time"
    for call in calls:
        call.released.set()
    settle(world)
    assert all(is_rescaled(world, job) for job in JOBS[:4])


def test_the_calls_of_one_job_come_one_after_another(world: World) -> None:
    rescale(world, *JOBS)
    settle(world)
    for job in JOBS:
        mine = [call for call, name in world.data.calls if name == job]
        assert mine == ["prepare", "is_stopped", "fence", "retire"]


@pytest.mark.parametrize("call", ["prepare", "is_stopped", "fence", "retire"])
@pytest.mark.parametrize("trouble", [Fail, Lie])
def test_a_call_that_fails_or_says_so_after_its_work_is_repeated(
    world: World, call: str, trouble: type[Fail] | type[Lie]
) -> None:
    """Nobody can tell the two apart, so the call is made again, and doing it twice changes nothing."""
    world.data.trouble[call, JOBS[0]] = trouble(StoreUnavailable("away"))
    world.write("provisioner", job=JOBS[0], outputs=[an_output(category="other")], task_count=3)
    rounds(world, lambda report: any("away" in error for _, error in report.failed))
    world.data.trouble.clear()
    settle(world)
    row = world.store.running.row(JOBS[0])
    assert row is not None and is_rescaled(world, JOBS[0]) and row.generation == 2
    assert {entry for entry in world.data.registered if row.birth in entry[1]} == producers_of(
        row.birth, row.config
    )


def test_a_job_that_always_fails_is_quarantined_with_an_alert_and_the_others_never_notice(
    world: World,
) -> None:
    world.data.trouble["prepare", JOBS[0]] = Fail(CorruptData("poison"))
    rescale(world, *JOBS)
    rounds(world, lambda report: report.is_idle)
    assert round_(world).quarantined == (JOBS[0],)
    assert all(is_rescaled(world, job) for job in JOBS[1:])
    alert = JournalStore(world.database).entries(JOBS[0], kind="alert")[-1]
    assert alert.decision == "job.quarantined" and "poison" in alert.reason


def test_an_error_nobody_expected_counts_as_the_jobs_failure(world: World) -> None:
    """A bug behind a port: the worker lives on, the job is quarantined after as many attempts as for any error."""
    world.data.trouble["prepare", JOBS[0]] = Fail(ZeroDivisionError("a bug"))
    rescale(world, *JOBS[:2])
    report = rounds(world, lambda report: report.quarantined == (JOBS[0],))
    assert "ZeroDivisionError: a bug" in report.failed[0][1]
    view = world.service.view(JOBS[0])
    assert view.quarantine is not None and "unexpected error" in view.quarantine.reason
    settle(world)
    assert is_rescaled(world, JOBS[1])
    world.data.trouble.clear()
    world.write("oncall", job=JOBS[0], task_count=3)
    settle(world)
    assert is_rescaled(world, JOBS[0])


def test_a_worker_that_comes_back_after_its_term_writes_nothing(world: World) -> None:
    """The older syncer's call returns when a successor has taken over: its next write is refused, and nothing
    of it counts against the successor, which shares the workers."""
    call = hang(world, "prepare", JOBS[0])
    rescale(world, JOBS[0])
    old = world.syncer
    round_(world)
    assert call.is_entered.wait(LIMIT_S)
    new = world.restart()
    assert new.sync_once(0).open == (JOBS[0],), (
        "the call under way is not made a second time by the successor"
    )
    before = world.outcome()
    call.released.set()
    until(lambda: not world.workers.busy())
    assert world.outcome() == before and world.service.view(JOBS[0]).plan.step is PlanStep.PREPARE
    with pytest.raises(Fenced):
        old.sync_once(0)
    settle(world)
    assert is_rescaled(world, JOBS[0])
    row = world.store.running.row(JOBS[0])
    assert row is not None and row.generation == 2


def test_a_syncer_learns_from_a_worker_that_it_was_replaced(world: World) -> None:
    """The term is lost between two rounds and the worker meets it first: the next round stops at once."""
    call = hang(world, "fence", JOBS[0])
    rescale(world, JOBS[0])
    old = world.syncer
    round_(world)
    assert call.is_entered.wait(LIMIT_S)
    world.restart()
    call.released.set()
    until(lambda: not world.workers.busy())
    finished = world.workers.take_finished()
    assert isinstance(finished[0].result.fenced, Fenced)
    with pytest.raises(Fenced):
        old.sync_once(0)
