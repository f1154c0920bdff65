"""Simple changes of many jobs: short transactions, one audit row per job, nothing over what moved meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from penstock.core.errors import Fenced, StoreUnavailable
from penstock.db.database import COUNTERS, take_term
from penstock.db.journal_store import AUDIT, JOURNAL
from penstock.jobs.job_store import EXPECTED_COUNTER, JOBS
from penstock.jobs.layer_store import LAYERS
from penstock.jobs.running_store import PLANS, RUNNING
from penstock.jobs.syncer.batches import LeaderStore, commit_simple, open_plans, simple_commit
from penstock.jobs.syncer.plan_runner import expected_of
from penstock.jobs.syncer.state_syncer import StateSyncer, SyncerSettings
from penstock.jobs.syncer.sync_plan import plan_sync
from tests.builders import DEVELOPER, a_body, a_pipeline
from tests.jobs.world import World

NAMES = [f"demo.j{number:03d}" for number in range(60)]


@pytest.fixture
def world(place: Path | str | None) -> Iterator[World]:
    """Sixty jobs that run."""
    world = World(place)
    submit(world, "1")
    world.settle()
    yield world
    world.database.close()


def submit(world: World, version: str) -> None:
    numbers = iter(range(1000))
    world.service.submit_pipeline(
        a_pipeline(*(a_body(name, arguments={"v": version}) for name in NAMES)),
        actor=DEVELOPER,
        reason="release",
        idempotency_key=None,
        now_ms=0,
        new_birth=lambda: f"birth{next(numbers)}",
    )


def rows(world: World, table: sa.Table) -> list[Any]:
    with world.database.reading() as connection:
        return list(connection.execute(sa.select(table)))


def leader(world: World) -> LeaderStore:
    return LeaderStore(world.database, term=take_term(world.database, "syncer", "test"))


def test_a_release_is_one_round_with_one_audit_row_and_one_entry_per_job(world: World) -> None:
    before = {row.job: row for row in rows(world, RUNNING)}
    submit(world, "2")
    assert world.round().simple == tuple(NAMES)
    after = {row.job: row for row in rows(world, RUNNING)}
    for name in NAMES:
        old, new = before[name], after[name]
        assert (
            new.config == {**old.config, "arguments": {"v": "2"}}
            and new.expected_version > old.expected_version
        )
        assert new.version == new.restart_version > old.version
        kept = ("birth", "generation", "mapping", "hold_generation", "state")
        assert [getattr(new, column) for column in kept] == [getattr(old, column) for column in kept]
    assert len({row.version for row in after.values()}) == len(NAMES)
    audits = [row for row in rows(world, AUDIT) if row.action == "sync.simple"]
    assert Counter(row.subject for row in audits) == Counter(NAMES)
    assert {row.reason for row in audits} == {"arguments.v changed"}
    version = after[audits[0].subject].expected_version
    assert audits[0].data == {"expected_version": version, "paths": ["arguments.v"]}
    entries = [row for row in rows(world, JOURNAL) if row.decision == "sync.simple"]
    assert Counter(row.subject for row in entries) == Counter(NAMES)
    assert all(view.is_in_sync for view in world.service.views()) and world.round().is_idle


def test_readers_of_the_task_list_see_every_job_of_a_release_once(world: World) -> None:
    since = world.store.running.snapshot().version
    submit(world, "2")
    world.round()
    snapshot = world.store.running.snapshot(since=since)
    assert sorted(row.job for row in snapshot.rows) == NAMES
    assert snapshot.version == max(row.version for row in snapshot.rows)


def test_a_round_with_nothing_to_do_reads_twice_and_loads_nothing(world: World) -> None:
    """Its leader's term, and the counter of expected versions; whatever the number of jobs."""
    world.round()
    world.round_ms = 1
    world.fail_at(0)
    assert world.round().is_idle
    assert world.points == 2


@pytest.mark.parametrize("moved", ["version", "hold", "plan", "gone"])
def test_a_job_that_moved_after_it_was_decided_on_is_left_out(world: World, moved: str) -> None:
    submit(world, "2")
    batch = []
    for record in world.store.load(NAMES[:3]).values():
        batch.append(simple_commit(record, plan_sync(expected_of(record), record.old.view())))
    target = NAMES[1]
    with world.store.transaction() as connection:
        chosen = sa.update(RUNNING).where(RUNNING.c.job == target)
        if moved == "version":
            connection.execute(chosen.values(version=10**6))
        elif moved == "hold":
            connection.execute(chosen.values(version=10**6, hold_generation=RUNNING.c.generation))
        elif moved == "gone":
            connection.execute(sa.delete(RUNNING).where(RUNNING.c.job == target))
    if moved == "plan":
        record = world.store.load([target])[target]
        open_plans(leader(world), [(record, plan_sync(None, record.old.view()))], 0)
    before = [row for row in rows(world, RUNNING) if row.job == target]
    result = commit_simple(leader(world), batch, 5)
    assert set(result.versions) == {NAMES[0], NAMES[2]}
    assert [row for row in rows(world, RUNNING) if row.job == target] == before
    audits = [row.subject for row in rows(world, AUDIT) if row.action == "sync.simple"]
    assert sorted(audits) == [NAMES[0], NAMES[2]]


def test_a_held_job_gets_no_simple_change(world: World) -> None:
    submit(world, "2")
    with world.store.transaction() as connection:
        connection.execute(sa.update(RUNNING).values(hold_generation=RUNNING.c.generation))
    record = world.store.load(NAMES[:1])[NAMES[0]]
    with pytest.raises(AssertionError):
        simple_commit(record, plan_sync(expected_of(record), record.old.view()))


def test_plans_are_opened_in_a_batch_each_with_a_number_and_a_generation_of_its_own(world: World) -> None:
    records = world.store.load(NAMES[:5])
    decided = [(record, plan_sync(None, record.old.view())) for record in records.values()]
    with world.store.transaction() as connection:
        connection.execute(sa.update(RUNNING).where(RUNNING.c.job == NAMES[0]).values(version=10**6))
    result = open_plans(leader(world), decided, 7)
    assert set(result.versions) == set(NAMES[1:5])
    again = open_plans(leader(world), decided, 8)
    assert again.versions == {}, "a job has one plan"
    plans = rows(world, PLANS)
    assert sorted(row.job for row in plans) == NAMES[1:5] and len({row.id for row in plans}) == 4
    assert {(row.generation, row.started_ms, row.step) for row in plans} == {(2, 7, "hold")}
    audits = [row.subject for row in rows(world, AUDIT) if row.action == "plan.opened" and row.at_ms == 7]
    assert sorted(audits) == NAMES[1:5]


def test_a_syncer_of_an_older_term_writes_no_batch(world: World) -> None:
    submit(world, "2")
    record = world.store.load(NAMES[:1])[NAMES[0]]
    old = leader(world)
    leader(world)
    before = world.outcome()
    with pytest.raises(Fenced):
        commit_simple(old, [simple_commit(record, plan_sync(expected_of(record), record.old.view()))], 0)
    with pytest.raises(Fenced):
        open_plans(old, [(record, plan_sync(None, record.old.view()))], 0)
    assert world.outcome() == before


class Slow:
    """A store where each row takes a millisecond; tells how many rows each transaction had."""

    def __init__(self, world: World) -> None:
        self.ms, self.batches, self._world, self._seen = 0, list[int](), world, self._rows(world)

    def reach(self, point: str) -> None:
        if point == "simple.after":
            rows = self._rows(self._world)
            self.batches.append(rows - self._seen)
            self.ms, self._seen = self.ms + rows - self._seen, rows

    def _rows(self, world: World) -> int:
        return sum(row.action == "sync.simple" for row in rows(world, AUDIT))


def slow_syncer(world: World, slow: Slow, **settings: Any) -> StateSyncer:
    return StateSyncer(
        world.store,
        world.tasks,
        world.data,
        term=take_term(world.database, "syncer", "slow"),
        settings=SyncerSettings(**settings),
        measure_ms=lambda: slow.ms,
        reach=slow.reach,
    )


def test_no_transaction_keeps_others_waiting_for_long(world: World) -> None:
    """The first batch is as large as it is told; the next ones follow the time that one took."""
    slow = Slow(world)
    syncer = slow_syncer(world, slow, batch_jobs=40, batch_ms=10)
    syncer.sync_once(1)
    submit(world, "2")
    assert len(syncer.sync_once(2).simple) == len(NAMES)
    assert slow.batches == [40, 10, 10]


def test_batches_grow_while_they_are_quick(world: World) -> None:
    slow = Slow(world)
    syncer = slow_syncer(world, slow, batch_jobs=4, batch_ms=1000, batch_jobs_max=20)
    syncer.sync_once(1)
    submit(world, "2")
    syncer.sync_once(2)
    assert slow.batches == [4, 8, 16, 20, 12]


def test_a_round_ends_in_time_and_the_next_goes_on(world: World) -> None:
    """Jobs that a round did not come to are counted, and forgotten by nobody."""
    slow = Slow(world)
    syncer = slow_syncer(world, slow, batch_jobs=5, batch_jobs_max=5, round_ms=1)
    while syncer.sync_once(1).left:
        pass
    submit(world, "2")
    first = syncer.sync_once(2)
    assert 0 < len(first.simple) < len(NAMES) and first.left == len(NAMES) - len(first.simple)
    assert not first.is_idle
    done = list(first.simple)
    while (report := syncer.sync_once(3)).left:
        done += report.simple
    assert sorted([*done, *report.simple]) == NAMES and syncer.sync_once(4).is_idle


def test_a_batch_that_the_store_refused_is_tried_again_in_smaller_parts(world: World) -> None:
    submit(world, "2")
    failing = {"left": 1}

    def refuse(point: str) -> None:
        if point == "simple.before" and failing["left"]:
            failing["left"] -= 1
            raise StoreUnavailable("away")

    syncer = StateSyncer(
        world.store,
        world.tasks,
        world.data,
        term=take_term(world.database, "syncer", "again"),
        settings=SyncerSettings(batch_jobs=20, batch_jobs_max=20),
        reach=refuse,
    )
    report = syncer.sync_once(1)
    assert {job for job, _ in report.failed} == set(NAMES[:20])
    assert set(report.simple) == set(NAMES[20:])
    assert syncer.sync_once(2).simple == tuple(NAMES[:20])


def edit_behind_everybodys_back(world: World, job: str) -> None:
    with world.store.transaction() as connection:
        body = a_body(job, arguments={"v": "edited"})
        chosen = (LAYERS.c.job == job, LAYERS.c.layer == "provisioner")
        connection.execute(sa.update(LAYERS).where(*chosen).values(body=body))
        raised = {"expected_version": JOBS.c.expected_version + 1}
        connection.execute(sa.update(JOBS).where(JOBS.c.name == job).values(raised))


def test_a_change_that_nobody_told_of_is_found_by_the_next_sweep(world: World) -> None:
    world.round()
    swept_ms = world.now_ms
    edit_behind_everybodys_back(world, NAMES[7])
    world.syncer.sync_once(swept_ms)  # the round of the sweep itself is over
    assert world.syncer.sync_once(swept_ms + 100).is_idle
    reports = [world.syncer.sync_once(swept_ms + ms) for ms in (15_000, 30_000, 45_000)]
    assert [job for report in reports for job in report.simple] == [NAMES[7]]


def test_an_older_copy_of_the_store_is_compared_from_the_beginning(world: World) -> None:
    """Its counter says less than was seen, so nothing that was remembered may be trusted."""
    world.round()
    edit_behind_everybodys_back(world, NAMES[3])
    with world.store.transaction() as connection:
        connection.execute(sa.update(COUNTERS).where(COUNTERS.c.name == EXPECTED_COUNTER).values(value=1))
    assert world.syncer.sync_once(world.now_ms).simple == (NAMES[3],)


def test_a_job_that_changes_while_its_batch_is_written_is_looked_at_again(world: World) -> None:
    """The write comes between the decision and the commit: what is committed is the older version, then the newer."""
    submit(world, "2")
    written = []

    def write_once(point: str) -> None:
        if point == "simple.after" and not written:
            written.append(world.write("provisioner", job=NAMES[0], **{"arguments.v": "3"}))

    syncer = StateSyncer(
        world.store, world.tasks, world.data, term=take_term(world.database, "syncer", "x"), reach=write_once
    )
    assert NAMES[0] in syncer.sync_once(1).simple
    assert syncer.sync_once(2).simple == (NAMES[0],)
    assert world.service.view(NAMES[0]).is_in_sync and syncer.sync_once(3).is_idle
