"""The tables of shards and container leases, on which the Shard Manager decides.

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
    sa.Column("target", sa.String, nullable=True),  # its next owner once `container` has released it
    sa.Column(
        "blame", sa.Integer, nullable=False, server_default="0"
    ),  # containers that lost their lease because of it
)
BLAME_MAX = 2  # with this much blame a shard is quarantined


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
        """Whether it is not placed until an operator releases it."""
        return self.blame >= BLAME_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """All shards of one container at one version."""

    version: int
    shards: tuple[ShardEntry, ...]


class ShardUpdate(NamedTuple):
    """A shard's row as it was read, and its new values."""

    row: ShardRow
    container: str | None
    state: ShardState
    target: str | None = None


def update_shards(connection: sa.Connection, updates: Sequence[ShardUpdate]) -> None:
    """Update shards by compare-and-set on their epochs, under new epochs. No other code changes
    their owners.
    """
    if not updates:
        return
    epochs = next_values(connection, EPOCHS, len(updates))
    values = [
        {
            "of_shard": update.row.shard,
            "of_epoch": update.row.epoch,
            "container": update.container,
            "epoch": epoch,
            "state": str(update.state),
            "target": update.target,
        }
        for update, epoch in zip(updates, epochs, strict=True)
    ]
    changed = connection.execute(_PUT, values[0] if len(values) == 1 else values)
    if changed.rowcount != len(updates):
        first = updates[0].row
        raise VersionConflict(
            f"shard {first.shard} or another of the same write", expected=first.epoch, actual=epochs[0]
        )


def read_shards(connection: sa.Connection) -> tuple[ShardRow, ...]:
    """All shards, in order."""
    return _typed(connection.execute(_ALL))


def read_shards_of(connection: sa.Connection, container: str) -> tuple[ShardRow, ...]:
    """The shards of one container, in order."""
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
    """The assignment of each of these containers, at the current version."""
    entries: dict[str, list[ShardEntry]] = {name: [] for name in names}
    for container, shard, epoch, state in _OF_CONTAINERS.rows(connection, names):
        entries[container].append(ShardEntry(shard=shard, epoch=epoch, state=_STATES[state]))
    version = current_value(connection, EPOCHS)
    return {name: Assignment(version=version, shards=tuple(found)) for name, found in entries.items()}


def assignment_of(connection: sa.Connection, name: str) -> Assignment:
    """The assignment of one container, at the current version."""
    return assignments_of(connection, [name])[name]


ROLE = "shard_manager"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatOutcome:
    """The result of one heartbeat: verdict and assignment."""

    verdict: HeartbeatVerdict
    assignment: Assignment
    renewals: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedOver:
    """The lease was revoked, and its shards have new owners."""

    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """Not failed over: the lease row was renewed since it was last read."""

    renewals: int


MovePlanner = Callable[[tuple[ShardRow, ...], tuple[ContainerRow, ...]], Placement]


class ShardStore:
    """Reads and writes the tables `shards` and `containers`. One writer: the Shard Manager of the newest
    term.
    """

    def __init__(self, database: Database, journal: JournalStore) -> None:
        self._database, self._journal = database, journal

    def shards(self) -> tuple[ShardRow, ...]:
        with self._database.reading() as connection:
            return read_shards(connection)

    def read(self) -> tuple[tuple[ShardRow, ...], tuple[ContainerRow, ...]]:
        """Both tables, from one snapshot."""
        with self._database.reading() as connection:
            return read_shards(connection), read_containers(connection, with_tasks=False)

    def reports(self) -> list[tuple[str, str]]:
        """(container, its task reports as JSON) of containers that may still run tasks."""
        with self._database.reading() as connection:
            return read_reports(connection)

    def containers(self) -> tuple[ContainerRow, ...]:
        with self._database.reading() as connection:
            return read_containers(connection)

    def ensure_shards(self, count: int, *, term: int) -> None:
        """Create the shards, without owners, the first time."""
        with self._writing(term) as connection:
            present = {row.shard for row in read_shards(connection)}
            if present and present != set(range(count)):
                raise ConfigError(
                    f"this store has {len(present)} shards, not {count}",
                    why="tasks are assigned to shards by hash, so another number would move every task",
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
        """Register an incarnation; idempotent. Shards that the container still owns stay, under
        new epochs.
        """
        with self._writing(term) as connection:
            old = read_container(connection, name)
            if old is not None and old.incarnation == incarnation:
                if old.may_run:
                    return old, assignment_of(connection, name)
                raise Refused(
                    f"this incarnation of container {name} has ended",
                    why="it was failed over after missing heartbeats, or its exit was observed",
                    fix="stop its remaining processes, then register a new incarnation",
                )
            if old is not None and old.may_run and (not folder_id or old.folder_id != folder_id):
                raise Refused(
                    f"container {name} is already running",
                    why=f"its lease has not expired; host {old.host or '?'}, process {old.pid}",
                    fix="choose another name, or wait until the running container has ended",
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
            owned = read_shards_of(connection, name)
            update_shards(
                connection, [ShardUpdate(shard, name, shard.state, shard.target) for shard in owned]
            )
            reason = "returned in time" if owned else "new and empty"
            self._note(connection, at_ms, "container", name, f"registered, keeps {len(owned)} shards", reason)
            return row, assignment_of(connection, name)

    def heartbeats(
        self, heartbeats: Sequence[Heartbeat], *, term: int, at_ms: Millis
    ) -> tuple[HeartbeatOutcome, ...]:
        """Extend leases, apply acknowledgements and read assignments, in one transaction for all
        heartbeats.
        """
        found: list[HeartbeatOutcome] = []
        with self._writing(term) as connection:
            while len(found) < len(heartbeats):
                found += self._heartbeats(connection, _distinct_prefix(heartbeats[len(found) :]), at_ms)
        return tuple(found)

    def _heartbeats(
        self, connection: sa.Connection, heartbeats: Sequence[Heartbeat], at_ms: Millis
    ) -> Iterator[HeartbeatOutcome]:
        """Requires: at most one heartbeat of each container. Uses few statements: the lock is
        held meanwhile.
        """
        rows = {
            row.name: row
            for row in read_leases(connection, [heartbeat.container for heartbeat in heartbeats])
        }
        valid: dict[str, ContainerRow] = {}
        for heartbeat in heartbeats:
            row = rows.get(heartbeat.container)
            if row is not None and row.incarnation == heartbeat.incarnation and row.may_run:
                valid[row.name] = row
                _release_dropped(connection, heartbeat)
        renewals = [
            (_after(row, heartbeat, at_ms), heartbeat.tasks if _is_newer(row, heartbeat) else None)
            for heartbeat in heartbeats
            if (row := valid.get(heartbeat.container)) is not None
        ]
        renew_containers(connection, renewals)
        assigned = assignments_of(connection, list(valid))
        nothing = Assignment(version=current_value(connection, EPOCHS), shards=())
        for heartbeat in heartbeats:
            row = valid.get(heartbeat.container)
            if row is None:
                why = "this incarnation has ended"
                yield HeartbeatOutcome(verdict=HeartbeatVerdict.REBOOT, assignment=nothing, reason=why)
                continue
            is_live = row.state is ContainerState.LIVE
            yield HeartbeatOutcome(
                verdict=HeartbeatVerdict.OK if is_live else HeartbeatVerdict.WITHHELD,
                assignment=assigned[row.name],
                renewals=row.renewals + is_live,
                reason=""
                if is_live
                else "it did not release a shard in time: its lease is no longer extended",
            )

    def renew(self, name: str, incarnation: str) -> Assignment | None:
        """Renew a container's lease row while no Shard Manager answers, and read its shards. None: lease
        ended.
        """
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
        """Revoke a lease and give its shards to others, in one transaction. None: there is nothing to revoke.

        Requires one of: `renewals` was observed a full interval ago; it belongs to an incarnation that sent
        no heartbeat since it registered, so it runs nothing; it is None and the exit was observed.
        """
        with self._writing(term) as connection:
            row = read_container(connection, name)
            if row is None or row.incarnation != incarnation or row.state is ContainerState.GONE:
                return None
            if renewals is None:
                assert row.known_dead, f"{name} is not known to be dead"
            elif row.renewals != renewals:
                self._note(
                    connection, at_ms, "failover", name, "kept", "its lease row was renewed in the meantime"
                )
                return Renewed(renewals=row.renewals)
            update_container(connection, name, state=ContainerState.GONE, engine_ready=False, tasks="[]")
            lost = read_shards_of(connection, name)
            update_shards(connection, [ShardUpdate(shard, None, ShardState.OWNED) for shard in lost])
            placement = plan(read_shards(connection), read_containers(connection, with_tasks=False))
            self._apply(connection, placement.moves)
            given = {move.shard: move.target for move in placement.moves}
            has_left = renewals is None and row.draining and not lost
            decision = "left" if has_left else f"failed over, {len(given)} shards given"
            self._note(connection, at_ms, "failover", name, decision, reason, shards=given)
            return FailedOver(placement=placement)

    def rearrange(self, plan: MovePlanner, *, term: int, at_ms: Millis, actor: str = ROLE) -> Placement:
        """Run `plan` on the current rows and begin its moves, in one transaction."""
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
        """Record that its exit was observed. False: another incarnation is registered."""
        with self._writing(term) as connection:
            row = read_container(connection, name)
            if row is None or row.incarnation != incarnation or not row.may_run:
                return False
            update_container(connection, name, known_dead=True)
            self._note(connection, at_ms, "container", name, "dead", "its exit was observed")
            return True

    def withhold(
        self, name: str, incarnation: str, *, shard: int, term: int, at_ms: Millis, reason: str
    ) -> bool:
        """Stop extending a lease, so that a container that still sends heartbeats can be failed over; `shard`
        gets the blame.
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
        """Cordon, drain or uncordon a container. False: there is no such container."""
        with self._writing(term) as connection:
            if read_container(connection, name) is None:
                return False
            update_container(connection, name, cordoned=cordoned, draining=draining)
            decision = "draining" if draining else "cordoned" if cordoned else "uncordoned"
            self._note(connection, at_ms, "container", name, decision, reason, actor=actor)
            return True

    def clear_blame(self, shard: int, *, term: int, at_ms: Millis, reason: str, actor: str = ROLE) -> bool:
        """End the quarantine of a shard. False: there is no such shard."""
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
        rows, updates = {row.shard: row for row in read_shards(connection)}, list[ShardUpdate]()
        for move in moves:
            row = rows[move.shard]
            assert row.container == move.source and row.state is ShardState.OWNED, (
                f"{move} does not start from {row}"
            )
            if row.container is None:
                updates.append(ShardUpdate(row, move.target, ShardState.OWNED))
            else:
                updates.append(ShardUpdate(row, row.container, ShardState.DROPPING, move.target))
        update_shards(connection, updates)

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


def _is_newer(row: ContainerRow, heartbeat: Heartbeat) -> bool:
    """Whether a heartbeat is newer than the row. A late one renews the lease, but its report is outdated."""
    return heartbeat.sequence > row.sequence


def _after(row: ContainerRow, heartbeat: Heartbeat, at_ms: Millis) -> ContainerRow:
    """A container's row after a heartbeat."""
    row = replace(row, seen_ms=at_ms, renewals=row.renewals + (row.state is ContainerState.LIVE))
    if not _is_newer(row, heartbeat):
        return row
    return replace(
        row,
        sequence=heartbeat.sequence,
        list_version=max(row.list_version, heartbeat.list_version),
        assignment_version=max(row.assignment_version, heartbeat.assignment_version),
        engine_ready=heartbeat.engine_ready,
        host=heartbeat.host or row.host,
        pid=heartbeat.pid or row.pid,
        capacity=heartbeat.capacity,
        region=heartbeat.region,
    )


def _distinct_prefix(heartbeats: Sequence[Heartbeat]) -> list[Heartbeat]:
    """The longest prefix with at most one heartbeat of each container."""
    names: set[str] = set()
    for number, heartbeat in enumerate(heartbeats):
        if heartbeat.container in names:
            return list(heartbeats[:number])
        names.add(heartbeat.container)
    return list(heartbeats)


def _release_dropped(connection: sa.Connection, heartbeat: Heartbeat) -> None:
    """Give released shards to their targets, or leave them without an owner where the target cannot take
    them.
    """
    released = {entry.shard: entry.epoch for entry in heartbeat.acked if entry.state is ShardState.DROPPING}
    if not released:
        return
    mine = read_shards_of(connection, heartbeat.container)
    done = [row for row in mine if row.state is ShardState.DROPPING and released.get(row.shard) == row.epoch]
    # Only the targets: reading every container would make a heartbeat cost as much as the fleet is large.
    takers = live_containers(connection, {row.target for row in done if row.target is not None})
    # A quarantined shard gets no new owner, even if its last container released it after a restart.
    given = {row.shard: row.target for row in done if row.target in takers and not row.is_quarantined}
    update_shards(connection, [ShardUpdate(row, given.get(row.shard), ShardState.OWNED) for row in done])


class FleetView:
    """Containers, shards and tasks as last stored. Takes no lock: callers do not wait for a round."""

    def __init__(self, store: ShardStore) -> None:
        self._store = store

    def is_stopped(self, job: str, *, generation: int, list_version: int) -> bool:
        """Whether no task of `job` up to `generation` runs: each container reported so or lost its lease."""
        return all(
            row.list_version >= list_version
            and not any(task.generation <= generation for task in row.tasks_of(job))
            for row in self._store.containers()
            if row.may_run
        )

    def containers(self) -> tuple[ContainerRow, ...]:
        """Every container that ever registered; `state` tells which are live."""
        return self._store.containers()

    def shards(self) -> tuple[ShardRow, ...]:
        """All shards."""
        return self._store.shards()

    def task_reports(self, job: str | None = None) -> tuple[tuple[str, TaskReport], ...]:
        """(container, task) as last reported by containers that may still run tasks."""
        return tuple(
            (name, task)
            for name, text in self._store.reports()
            if job is None or f'"{job}"' in text
            for task in decode_tasks(text)
            if job is None or task.job == job
        )
