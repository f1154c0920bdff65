"""Who owns which shard, and whose lease is alive: the tables the Shard Manager decides on.

Every write checks the writer's term in its transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, Refused, VersionConflict
from penstock.core.journal import Entry
from penstock.db.bulk import ByName, insert_rows
from penstock.db.database import METADATA, Database, check_term, current_value, next_values
from penstock.db.journal_store import JournalStore
from penstock.fleet.container_store import (
    ContainerRow,
    ContainerState,
    decode_tasks,
    insert_container,
    live_containers,
    read_container,
    read_containers,
    read_leases,
    read_reports,
    renew_containers,
    update_container,
    write_container,
)
from penstock.fleet.messages import Heartbeat, HeartbeatVerdict, ShardEntry, ShardState, TaskReport
from penstock.fleet.placement.placement import Move, Placement

EPOCHS = "shard_epoch"

SHARDS = sa.Table(
    "shards",
    METADATA,
    sa.Column("shard", sa.Integer, primary_key=True),
    sa.Column("container", sa.String, nullable=True, index=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("target", sa.String, nullable=True),  # where it goes once `container` has dropped it
    sa.Column("blame", sa.Integer, nullable=False, server_default="0"),  # containers it cost
)
BLAME_MAX = 2  # a shard that cost this many containers goes to no other


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRow:
    """One shard's record."""

    shard: int
    container: str | None
    epoch: int
    state: ShardState
    target: str | None
    blame: int = 0

    @property
    def is_quarantined(self) -> bool:
        """Whether it may not be placed until somebody has looked at it."""
        return self.blame >= BLAME_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One container's whole set of shards at one version."""

    version: int
    shards: tuple[ShardEntry, ...]


class ShardUpdate(NamedTuple):
    """A shard as it was read, and what becomes of it."""

    row: ShardRow
    container: str | None
    state: ShardState
    target: str | None = None


def update_shards(connection: sa.Connection, puts: Sequence[ShardUpdate]) -> None:
    """The one place that changes shards' records: compare-and-set on the epochs, and new epochs."""
    if not puts:
        return
    epochs = next_values(connection, EPOCHS, len(puts))
    values = [
        {
            "of_shard": put.row.shard,
            "of_epoch": put.row.epoch,
            "container": put.container,
            "epoch": epoch,
            "state": str(put.state),
            "target": put.target,
        }
        for put, epoch in zip(puts, epochs, strict=True)
    ]
    changed = connection.execute(_PUT, values[0] if len(values) == 1 else values)
    if changed.rowcount != len(puts):
        first = puts[0].row
        raise VersionConflict(f"shard {first.shard} or one with it", expected=first.epoch, actual=epochs[0])


def read_shards(connection: sa.Connection) -> tuple[ShardRow, ...]:
    """Every shard's record, in order."""
    return _typed(connection.execute(_ALL))


def read_shards_of(connection: sa.Connection, container: str) -> tuple[ShardRow, ...]:
    """The records of the shards that a container has, in order."""
    return _typed(connection.execute(_ALL_OF, {"key": container}))


def _typed(rows: Iterable[Any]) -> tuple[ShardRow, ...]:
    return tuple(
        ShardRow(
            shard=shard, container=container, epoch=epoch, state=_STATES[state], target=target, blame=blame
        )
        for shard, container, epoch, state, target, blame in rows
    )


_STATES = {str(state): state for state in ShardState}
_ALL = sa.select(
    SHARDS.c.shard, SHARDS.c.container, SHARDS.c.epoch, SHARDS.c.state, SHARDS.c.target, SHARDS.c.blame
).order_by(SHARDS.c.shard)
_ALL_OF = _ALL.where(SHARDS.c.container == sa.bindparam("key"))
_OF_CONTAINERS = ByName(
    sa.select(SHARDS.c.container, SHARDS.c.shard, SHARDS.c.epoch, SHARDS.c.state).order_by(SHARDS.c.shard),
    SHARDS.c.container,
)
# Sets the columns that it is given values for.
_PUT = sa.update(SHARDS).where(
    SHARDS.c.shard == sa.bindparam("of_shard"), SHARDS.c.epoch == sa.bindparam("of_epoch")
)


def assignments_of(connection: sa.Connection, names: Sequence[str]) -> dict[str, Assignment]:
    """The shards of each of these containers, and the version of the whole assignment."""
    entries: dict[str, list[ShardEntry]] = {name: [] for name in names}
    for container, shard, epoch, state in _OF_CONTAINERS.rows(connection, names):
        entries[container].append(ShardEntry(shard=shard, epoch=epoch, state=_STATES[state]))
    version = current_value(connection, EPOCHS)
    return {name: Assignment(version=version, shards=tuple(found)) for name, found in entries.items()}


def assignment_of(connection: sa.Connection, name: str) -> Assignment:
    """A container's shards, and the version of the whole assignment."""
    return assignments_of(connection, [name])[name]


ROLE = "shard_manager"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatOutcome:
    """What a beat did to the lease."""

    verdict: HeartbeatVerdict
    assignment: Assignment
    renewals: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedOver:
    """The lease was revoked; these shards have new owners already."""

    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """Not failed over: its lease row was renewed since it was last looked at."""

    renewals: int


MovePlanner = Callable[[tuple[ShardRow, ...], tuple[ContainerRow, ...]], Placement]


class ShardStore:
    """The tables `shards` and `containers`. One writer: the Shard Manager of the newest term."""

    def __init__(self, database: Database, journal: JournalStore) -> None:
        self._database, self._journal = database, journal

    def shards(self) -> tuple[ShardRow, ...]:
        with self._database.reading() as connection:
            return read_shards(connection)

    def read(self) -> tuple[tuple[ShardRow, ...], tuple[ContainerRow, ...]]:
        """Both tables at one moment."""
        with self._database.reading() as connection:
            return read_shards(connection), read_containers(connection, with_tasks=False)

    def reports(self) -> list[tuple[str, str]]:
        """(container, what it said of its tasks, as JSON) of those that may still run something."""
        with self._database.reading() as connection:
            return read_reports(connection)

    def containers(self) -> tuple[ContainerRow, ...]:
        with self._database.reading() as connection:
            return read_containers(connection)

    def ensure_shards(self, count: int, *, term: int) -> None:
        """Create the shards, owned by nobody, the first time."""
        with self._writing(term) as connection:
            present = {row.shard for row in read_shards(connection)}
            if present and present != set(range(count)):
                raise ConfigError(
                    f"this store has {len(present)} shards, not {count}",
                    why="tasks are spread over shards by hash, so another number moves every task",
                    fix=f"start with {len(present)} shards",
                )
            missing = sorted(set(range(count)) - present)
            if missing:
                epochs = next_values(connection, EPOCHS, len(missing))
                rows = zip(missing, epochs, [str(ShardState.OWNED)] * len(missing), strict=True)
                insert_rows(connection, SHARDS, ("shard", "epoch", "state"), list(rows))

    def register(
        self, name: str, incarnation: str, *, folder_id: str, host: str, pid: int, term: int, at_ms: Millis
    ) -> tuple[ContainerRow, Assignment]:
        """Begin an incarnation. May be repeated. What the name still owns stays, under new epochs."""
        with self._writing(term) as connection:
            old = read_container(connection, name)
            if old is not None and old.incarnation == incarnation:
                if old.may_run:
                    return old, assignment_of(connection, name)
                raise Refused(
                    f"this life of container {name} is over",
                    why="its shards were given away after a silence, or its exit was seen",
                    fix="stop what still runs of it, then register with a new incarnation",
                )
            if old is not None and old.may_run and (not folder_id or old.folder_id != folder_id):
                raise Refused(
                    f"container {name} is already running",
                    why=f"its lease is not over; host {old.host or '?'}, process {old.pid}",
                    fix="choose another name, or wait until the running one is gone",
                )
            row = ContainerRow(
                name=name,
                incarnation=incarnation,
                folder_id=folder_id,
                state=ContainerState.LIVE,
                renewals=1 if old is None else old.renewals + 1,
                registered_ms=at_ms,
                seen_ms=at_ms,
                sequence=0,
                list_version=0,
                assignment_version=0,
                engine_ready=False,
                host=host,
                pid=pid,
                known_dead=False,
                cordoned=old is not None and old.cordoned,
                draining=old is not None and old.draining,
            )
            if old is None:
                insert_container(connection, row)
            else:
                write_container(connection, row)
            kept = read_shards_of(connection, name)
            update_shards(connection, [ShardUpdate(shard, name, shard.state, shard.target) for shard in kept])
            reason = "returned in time" if kept else "new and empty"
            self._note(connection, at_ms, "container", name, f"registered, keeps {len(kept)} shards", reason)
            return row, assignment_of(connection, name)

    def beats(self, beats: Sequence[Heartbeat], *, term: int, at_ms: Millis) -> tuple[HeartbeatOutcome, ...]:
        """Extend leases, take the acknowledgements in, and read the assignments: one transaction for all."""
        found: list[HeartbeatOutcome] = []
        with self._writing(term) as connection:
            while len(found) < len(beats):
                found += self._beats(connection, _first_of_each(beats[len(found) :]), at_ms)
        return tuple(found)

    def _beats(
        self, connection: sa.Connection, beats: Sequence[Heartbeat], at_ms: Millis
    ) -> Iterator[HeartbeatOutcome]:
        """Requires: at most one of each container. A few statements for all: the lock is held meanwhile."""
        rows = {row.name: row for row in read_leases(connection, [beat.container for beat in beats])}
        valid: dict[str, ContainerRow] = {}
        for beat in beats:
            row = rows.get(beat.container)
            if row is not None and row.incarnation == beat.incarnation and row.may_run:
                valid[row.name] = row
                _free_dropped(connection, beat)
        news = [
            (_after(row, beat, at_ms), beat.tasks if _is_news(row, beat) else None)
            for beat in beats
            if (row := valid.get(beat.container)) is not None
        ]
        renew_containers(connection, news)
        assigned = assignments_of(connection, list(valid))
        nothing = Assignment(version=current_value(connection, EPOCHS), shards=())
        for beat in beats:
            row = valid.get(beat.container)
            if row is None:
                why = "this incarnation is over"
                yield HeartbeatOutcome(verdict=HeartbeatVerdict.REBOOT, assignment=nothing, reason=why)
                continue
            is_live = row.state is ContainerState.LIVE
            yield HeartbeatOutcome(
                verdict=HeartbeatVerdict.OK if is_live else HeartbeatVerdict.WITHHELD,
                assignment=assigned[row.name],
                renewals=row.renewals + is_live,
                reason="" if is_live else "it does not do as asked: its lease runs out",
            )

    def renew(self, name: str, incarnation: str) -> Assignment | None:
        """A container renews its row while no Shard Manager answers, and reads its shards. None: over."""
        with self._database.transaction() as connection:
            row = read_container(connection, name)
            if (
                row is None
                or row.incarnation != incarnation
                or row.state is not ContainerState.LIVE
                or row.known_dead
            ):
                return None
            update_container(connection, name, renewals=row.renewals + 1)
            return assignment_of(connection, name)

    def fail_over(
        self,
        name: str,
        incarnation: str,
        *,
        renewals: int | None,
        plan: MovePlanner,
        term: int,
        at_ms: Millis,
        reason: str,
    ) -> FailedOver | Renewed | None:
        """Revoke a lease and give its shards away, in one transaction. None: there is nothing to revoke.

        Requires: `renewals` was observed a full interval ago, or belongs to a life that has not beaten since
        it registered and so runs nothing, or is None and the exit was seen.
        """
        with self._writing(term) as connection:
            row = read_container(connection, name)
            if row is None or row.incarnation != incarnation or row.state is ContainerState.GONE:
                return None
            if renewals is None:
                assert row.known_dead, f"{name} is not known to be dead"
            elif row.renewals != renewals:
                self._note(connection, at_ms, "failover", name, "kept", "its lease row was renewed meanwhile")
                return Renewed(renewals=row.renewals)
            update_container(connection, name, state=ContainerState.GONE, engine_ready=False, tasks="[]")
            lost = read_shards_of(connection, name)
            update_shards(connection, [ShardUpdate(shard, None, ShardState.OWNED) for shard in lost])
            placement = plan(read_shards(connection), read_containers(connection, with_tasks=False))
            self._apply(connection, placement.moves)
            given = {move.shard: move.target for move in placement.moves}
            has_left = renewals is None and row.draining and not lost
            said = "left" if has_left else f"failed over, {len(given)} shards given"
            self._note(connection, at_ms, "failover", name, said, reason, shards=given)
            return FailedOver(placement=placement)

    def rearrange(self, plan: MovePlanner, *, term: int, at_ms: Millis, actor: str = ROLE) -> Placement:
        """Decide on what the store holds now, and begin those moves: one transaction."""
        with self._writing(term) as connection:
            placement = plan(read_shards(connection), read_containers(connection, with_tasks=False))
            self._apply(connection, placement.moves)
            for reason in sorted({move.reason for move in placement.moves}):
                moves = {m.shard: [m.source, m.target] for m in placement.moves if m.reason == reason}
                decision = f"move {len(moves)}"
                self._note(
                    connection, at_ms, "placement", "shards", decision, reason, actor=actor, moves=moves
                )
            return placement

    def mark_dead(self, name: str, incarnation: str, *, term: int, at_ms: Millis) -> bool:
        """Its exit was seen. False: not this incarnation any more."""
        with self._writing(term) as connection:
            row = read_container(connection, name)
            if row is None or row.incarnation != incarnation or not row.may_run:
                return False
            update_container(connection, name, known_dead=True)
            self._note(connection, at_ms, "container", name, "dead", "its exit was seen")
            return True

    def withhold(
        self, name: str, incarnation: str, *, shard: int, term: int, at_ms: Millis, reason: str
    ) -> bool:
        """Stop extending a lease, so that it can be failed over though the container still beats; `shard` is
        to blame.
        """
        with self._writing(term) as connection:
            row = read_container(connection, name)
            if row is None or row.incarnation != incarnation or row.state is not ContainerState.LIVE:
                return False
            update_container(connection, name, state=ContainerState.WITHHELD)
            blamed = sa.update(SHARDS).where(SHARDS.c.shard == shard).values(blame=SHARDS.c.blame + 1)
            connection.execute(blamed)
            self._note(connection, at_ms, "container", name, "acknowledgements withheld", reason)
            return True

    def cordon(
        self,
        name: str,
        *,
        cordoned: bool,
        draining: bool,
        term: int,
        at_ms: Millis,
        reason: str,
        actor: str = ROLE,
    ) -> bool:
        """Give a container no new shards, let it lose those it has too, or take it back. False: unknown."""
        with self._writing(term) as connection:
            if read_container(connection, name) is None:
                return False
            update_container(connection, name, cordoned=cordoned, draining=draining)
            decision = "draining" if draining else "cordoned" if cordoned else "uncordoned"
            self._note(connection, at_ms, "container", name, decision, reason, actor=actor)
            return True

    def forgive(self, shard: int, *, term: int, at_ms: Millis, reason: str, actor: str = ROLE) -> bool:
        """Let a quarantined shard be placed again. False: no such shard."""
        with self._writing(term) as connection:
            done = connection.execute(sa.update(SHARDS).where(SHARDS.c.shard == shard).values(blame=0))
            if done.rowcount:
                subject = f"shard {shard}"
                self._note(connection, at_ms, "placement", subject, "released", reason, actor=actor)
            return bool(done.rowcount)

    def note(
        self, kind: str, subject: str, decision: str, reason: str, *, at_ms: Millis, actor: str = ROLE
    ) -> None:
        """Journal a decision that changes no row."""
        with self._database.transaction() as connection:
            self._note(connection, at_ms, kind, subject, decision, reason, actor=actor)

    @contextmanager
    def _writing(self, term: int) -> Iterator[sa.Connection]:
        with self._database.transaction() as connection:
            check_term(connection, ROLE, term)
            yield connection

    def _apply(self, connection: sa.Connection, moves: Iterable[Move]) -> None:
        rows, puts = {row.shard: row for row in read_shards(connection)}, list[ShardUpdate]()
        for move in moves:
            row = rows[move.shard]
            assert row.container == move.source and row.state is ShardState.OWNED, (
                f"{move} does not start from {row}"
            )
            if row.container is None:
                puts.append(ShardUpdate(row, move.target, ShardState.OWNED))
            else:
                puts.append(ShardUpdate(row, row.container, ShardState.DROPPING, move.target))
        update_shards(connection, puts)

    def _note(
        self,
        connection: sa.Connection,
        at_ms: Millis,
        kind: str,
        subject: str,
        decision: str,
        reason: str,
        actor: str = ROLE,
        **data: Any,
    ) -> None:
        entry = Entry(
            at_ms=at_ms, actor=actor, kind=kind, subject=subject, decision=decision, reason=reason, data=data
        )
        self._journal.append(connection, entry)


def _is_news(row: ContainerRow, beat: Heartbeat) -> bool:
    """A late beat still counts as a sign of life, but its news is old."""
    return beat.sequence > row.sequence


def _after(row: ContainerRow, beat: Heartbeat, at_ms: Millis) -> ContainerRow:
    """A container's row after its beat."""
    row = replace(row, seen_ms=at_ms, renewals=row.renewals + (row.state is ContainerState.LIVE))
    if not _is_news(row, beat):
        return row
    return replace(
        row,
        sequence=beat.sequence,
        list_version=max(row.list_version, beat.list_version),
        assignment_version=max(row.assignment_version, beat.assignment_version),
        engine_ready=beat.engine_ready,
        host=beat.host or row.host,
        pid=beat.pid or row.pid,
        capacity=beat.capacity,
        region=beat.region,
    )


def _first_of_each(beats: Sequence[Heartbeat]) -> list[Heartbeat]:
    """As many as there are before a container beats for the second time."""
    names: set[str] = set()
    for number, beat in enumerate(beats):
        if beat.container in names:
            return list(beats[:number])
        names.add(beat.container)
    return list(beats)


def _free_dropped(connection: sa.Connection, beat: Heartbeat) -> None:
    """A reaped shard goes to its target under a larger epoch, or to nobody if that one cannot have it."""
    reaped = {entry.shard: entry.epoch for entry in beat.acked if entry.state is ShardState.DROPPING}
    if not reaped:
        return
    mine = read_shards_of(connection, beat.container)
    done = [row for row in mine if row.state is ShardState.DROPPING and reaped.get(row.shard) == row.epoch]
    # Those few alone: reading every container would make a beat cost as much as the fleet.
    takers = live_containers(connection, {row.target for row in done if row.target is not None})
    # One that cost two containers goes to no third, though the second dropped it after its restart.
    given = {row.shard: row.target for row in done if row.target in takers and not row.is_quarantined}
    update_shards(connection, [ShardUpdate(row, given.get(row.shard), ShardState.OWNED) for row in done])


class FleetView:
    """Containers, shards and tasks as last recorded. No lock: nobody waits for a round."""

    def __init__(self, store: ShardStore) -> None:
        self._store = store

    def is_stopped(self, job: str, *, generation: int, list_version: int) -> bool:
        """Whether no task of `job` up to `generation` runs: each container proved it or its lease is over."""
        return all(
            row.list_version >= list_version
            and not any(task.generation <= generation for task in row.tasks_of(job))
            for row in self._store.containers()
            if row.may_run
        )

    def containers(self) -> tuple[ContainerRow, ...]:
        """Every container ever heard of; `state` says whether it lives."""
        return self._store.containers()

    def shards(self) -> tuple[ShardRow, ...]:
        """Every shard's record."""
        return self._store.shards()

    def task_reports(self, job: str | None = None) -> tuple[tuple[str, TaskReport], ...]:
        """(container, task) as last reported by containers that may still run something."""
        return tuple(
            (name, task)
            for name, text in self._store.reports()
            if job is None or f'"{job}"' in text
            for task in decode_tasks(text)
            if job is None or task.job == job
        )
