"""Who owns which shard, and whose lease is alive: the tables the Shard Manager decides on.

Every change of a shard's record takes the next number of one counter as its epoch, so the last one given out
is also the version of the whole assignment. Every write checks the writer's term in its transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, Refused, VersionConflict
from penstock.core.journal import Entry
from penstock.core.journal_store import JournalStore
from penstock.core.sql_store import MADE_ONCE, METADATA, Database, check_term, current_value, next_value
from penstock.tasks.container_store import (
    ContainerRow,
    ContainerState,
    insert_container,
    read_container,
    read_containers,
    tasks_to_text,
    update_container,
    write_container,
)
from penstock.tasks.messages import Heartbeat, ShardEntry, ShardState, Verdict
from penstock.tasks.placement import Move, Placement

ROLE = "shard_manager"
_EPOCHS = "shard_epoch"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatOutcome:
    """What a beat did to the lease."""

    verdict: Verdict
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


Plan = Callable[[tuple[ShardRow, ...], tuple[ContainerRow, ...]], Placement]


class ShardStore:
    """The tables `shards` and `containers`. One writer: the Shard Manager of the newest term."""

    def __init__(self, database: Database, journal: JournalStore) -> None:
        self._database, self._journal = database, journal

    def shards(self) -> tuple[ShardRow, ...]:
        with self._database.reading() as connection:
            return _shards(connection)

    def read(self) -> tuple[tuple[ShardRow, ...], tuple[ContainerRow, ...]]:
        """Both tables at one moment."""
        with self._database.reading() as connection:
            return _shards(connection), read_containers(connection, with_tasks=False)

    def containers(self) -> tuple[ContainerRow, ...]:
        with self._database.reading() as connection:
            return read_containers(connection)

    def ensure_shards(self, count: int, *, term: int) -> None:
        """Create the shards, owned by nobody, the first time."""
        with self._writing(term) as connection:
            present = {row.shard for row in _shards(connection)}
            if present and present != set(range(count)):
                raise ConfigError(
                    f"this store has {len(present)} shards, not {count}",
                    why="tasks are spread over shards by hash, so another number moves every task",
                    fix=f"start with {len(present)} shards",
                )
            for shard in sorted(set(range(count)) - present):
                epoch = next_value(connection, _EPOCHS)
                connection.execute(sa.insert(SHARDS).values(shard=shard, epoch=epoch, state=ShardState.OWNED))

    def register(
        self, name: str, incarnation: str, *, folder_id: str, host: str, pid: int, term: int, at_ms: Millis
    ) -> tuple[ContainerRow, Assignment]:
        """Begin an incarnation. May be repeated. What the name still owns stays, under new epochs."""
        with self._writing(term) as connection:
            old = read_container(connection, name)
            if old is not None and old.incarnation == incarnation:
                if old.may_run:
                    return old, _assignment(connection, name)
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
            kept = [shard for shard in _shards(connection) if shard.container == name]
            for shard in kept:
                _put(connection, shard, container=name, state=shard.state, target=shard.target)
            reason = "returned in time" if kept else "new and empty"
            self._note(connection, at_ms, "container", name, f"registered, keeps {len(kept)} shards", reason)
            return row, _assignment(connection, name)

    def beat(self, beat: Heartbeat, *, term: int, at_ms: Millis) -> BeatOutcome:
        """Extend the lease, take the acknowledgements in, and read the assignment: one transaction."""
        with self._writing(term) as connection:
            row = read_container(connection, beat.container)
            if row is None or row.incarnation != beat.incarnation or not row.may_run:
                nothing = Assignment(version=current_value(connection, _EPOCHS), shards=())
                return BeatOutcome(
                    verdict=Verdict.REBOOT, assignment=nothing, reason="this incarnation is over"
                )
            _free_dropped(connection, beat)
            is_live = row.state is ContainerState.LIVE
            row = replace(row, seen_ms=at_ms, renewals=row.renewals + is_live)
            if (
                beat.sequence > row.sequence
            ):  # a late beat still counts as a sign of life, but its news is old
                row = replace(
                    row,
                    sequence=beat.sequence,
                    list_version=max(row.list_version, beat.list_version),
                    assignment_version=max(row.assignment_version, beat.assignment_version),
                    engine_ready=beat.engine_ready,
                    host=beat.host or row.host,
                    pid=beat.pid or row.pid,
                    tasks_text=tasks_to_text(beat.tasks),
                    capacity=beat.capacity,
                    region=beat.region,
                )
            write_container(connection, row)
            return BeatOutcome(
                verdict=Verdict.OK if is_live else Verdict.WITHHELD,
                assignment=_assignment(connection, row.name),
                renewals=row.renewals,
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
            return _assignment(connection, name)

    def fail_over(
        self,
        name: str,
        incarnation: str,
        *,
        renewals: int | None,
        plan: Plan,
        term: int,
        at_ms: Millis,
        reason: str,
    ) -> FailedOver | Renewed | None:
        """Revoke a lease and give its shards away, in one transaction. None: there is nothing to revoke.

        Requires: `renewals` was observed a full interval ago, or is None and the exit was seen.
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
            for shard in _shards(connection):
                if shard.container == name:
                    _put(connection, shard, container=None, state=ShardState.OWNED, target=None)
            placement = plan(_shards(connection), read_containers(connection, with_tasks=False))
            self._apply(connection, placement.moves)
            given = {move.shard: move.target for move in placement.moves}
            self._note(
                connection,
                at_ms,
                "failover",
                name,
                f"failed over, {len(given)} shards given",
                reason,
                shards=given,
            )
            return FailedOver(placement=placement)

    def rearrange(self, plan: Plan, *, term: int, at_ms: Millis) -> Placement:
        """Decide on what the store holds now, and begin those moves: one transaction."""
        with self._writing(term) as connection:
            placement = plan(_shards(connection), read_containers(connection, with_tasks=False))
            self._apply(connection, placement.moves)
            for reason in sorted({move.reason for move in placement.moves}):
                moves = {m.shard: [m.source, m.target] for m in placement.moves if m.reason == reason}
                self._note(
                    connection, at_ms, "placement", "shards", f"move {len(moves)}", reason, moves=moves
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
        self, name: str, *, cordoned: bool, draining: bool, term: int, at_ms: Millis, reason: str
    ) -> bool:
        """Give a container no new shards, let it lose those it has too, or take it back. False: unknown."""
        with self._writing(term) as connection:
            if read_container(connection, name) is None:
                return False
            update_container(connection, name, cordoned=cordoned, draining=draining)
            decision = "draining" if draining else "cordoned" if cordoned else "uncordoned"
            self._note(connection, at_ms, "container", name, decision, reason)
            return True

    def forgive(self, shard: int, *, term: int, at_ms: Millis, reason: str) -> bool:
        """Let a quarantined shard be placed again. False: no such shard."""
        with self._writing(term) as connection:
            done = connection.execute(sa.update(SHARDS).where(SHARDS.c.shard == shard).values(blame=0))
            if done.rowcount:
                self._note(connection, at_ms, "placement", f"shard {shard}", "released", reason)
            return bool(done.rowcount)

    def note(self, kind: str, subject: str, decision: str, reason: str, *, at_ms: Millis) -> None:
        """Journal a decision that changes no row."""
        with self._database.transaction() as connection:
            self._note(connection, at_ms, kind, subject, decision, reason)

    @contextmanager
    def _writing(self, term: int) -> Iterator[sa.Connection]:
        with self._database.transaction() as connection:
            check_term(connection, ROLE, term)
            yield connection

    def _apply(self, connection: sa.Connection, moves: Iterable[Move]) -> None:
        rows = {row.shard: row for row in _shards(connection)}
        for move in moves:
            row = rows[move.shard]
            assert row.container == move.source and row.state is ShardState.OWNED, (
                f"{move} does not start from {row}"
            )
            if row.container is None:
                _put(connection, row, container=move.target, state=ShardState.OWNED, target=None)
            else:
                _put(connection, row, container=row.container, state=ShardState.DROPPING, target=move.target)

    def _note(
        self,
        connection: sa.Connection,
        at_ms: Millis,
        kind: str,
        subject: str,
        decision: str,
        reason: str,
        **data: Any,
    ) -> None:
        entry = Entry(
            at_ms=at_ms, actor=ROLE, kind=kind, subject=subject, decision=decision, reason=reason, data=data
        )
        self._journal.append(connection, entry)


def _free_dropped(connection: sa.Connection, beat: Heartbeat) -> None:
    """A reaped shard goes to its target under a larger epoch, or to nobody if that one cannot have it."""
    reaped = {entry.shard: entry.epoch for entry in beat.acked if entry.state is ShardState.DROPPING}
    if not reaped:
        return
    takers = {
        row.name
        for row in read_containers(connection, with_tasks=False)
        if row.state is ContainerState.LIVE and not row.known_dead
    }
    for row in _shards(connection):
        is_mine = row.container == beat.container and row.state is ShardState.DROPPING
        if is_mine and reaped.get(row.shard) == row.epoch:
            # One that cost two containers goes to no third, though the second dropped it after its restart.
            taker = row.target if row.target in takers and not row.is_quarantined else None
            _put(connection, row, container=taker, state=ShardState.OWNED, target=None)


def _put(
    connection: sa.Connection, row: ShardRow, *, container: str | None, state: ShardState, target: str | None
) -> None:
    """The one place that changes a shard's record: compare-and-set on the epoch, and a new epoch."""
    epoch = next_value(connection, _EPOCHS)
    values = {"container": container, "epoch": epoch, "state": str(state), "target": target}
    changed = connection.execute(_PUT, {"of_shard": row.shard, "of_epoch": row.epoch, **values})
    if changed.rowcount != 1:
        raise VersionConflict(f"shard {row.shard}", expected=row.epoch, actual=epoch)


def _shards(connection: sa.Connection) -> tuple[ShardRow, ...]:
    return tuple(
        ShardRow(
            shard=shard, container=container, epoch=epoch, state=_STATES[state], target=target, blame=blame
        )
        for shard, container, epoch, state, target, blame in connection.execute(_ALL)
    )


_STATES = {str(state): state for state in ShardState}
_ALL = (
    sa.select(
        SHARDS.c.shard, SHARDS.c.container, SHARDS.c.epoch, SHARDS.c.state, SHARDS.c.target, SHARDS.c.blame
    )
    .order_by(SHARDS.c.shard)
    .execution_options(**MADE_ONCE)
)
_OF_CONTAINER = (
    sa.select(SHARDS.c.shard, SHARDS.c.epoch, SHARDS.c.state)
    .where(SHARDS.c.container == sa.bindparam("key"))
    .order_by(SHARDS.c.shard)
    .execution_options(**MADE_ONCE)
)
_PUT = (
    sa.update(SHARDS)
    .where(SHARDS.c.shard == sa.bindparam("of_shard"), SHARDS.c.epoch == sa.bindparam("of_epoch"))
    .values({name: sa.bindparam(name) for name in ("container", "epoch", "state", "target")})
    .execution_options(**MADE_ONCE)
)


def _assignment(connection: sa.Connection, name: str) -> Assignment:
    entries = tuple(
        ShardEntry(shard=shard, epoch=epoch, state=_STATES[state])
        for shard, epoch, state in connection.execute(_OF_CONTAINER, {"key": name})
    )
    return Assignment(version=current_value(connection, _EPOCHS), shards=entries)
