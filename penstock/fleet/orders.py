"""What people may ask of shards, and what the solver is told of containers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.core.clock import Millis
from penstock.core.errors import NotFound, Refused
from penstock.core.text import did_you_mean, some_of
from penstock.fleet.container_store import ContainerRow
from penstock.fleet.exclusions import Bars, bars_in_force
from penstock.fleet.liveness import ShardManagerSettings
from penstock.fleet.messages import Heartbeat, RestartOrder, ShardState
from penstock.fleet.placement.placement import Fleet, Mode, Placement, Refusal, place_shards
from penstock.fleet.shard_load import KINDS, Vector
from penstock.fleet.shard_store import BLAME_MAX, ROLE, FleetView, MovePlanner, ShardRow, ShardStore


def no_shard(shard: int) -> NotFound:
    """The error for a number that no shard has."""
    return NotFound(
        f"there is no shard {shard}", why="shards are numbered from 0", fix="`penstock shard ls` lists them"
    )


def no_container(name: str, containers: Iterable[ContainerRow]) -> NotFound:
    """The error for a name that no container ever had."""
    known = [row.name for row in containers]
    return NotFound(
        f"there is no container {name!r}",
        why=f"those that ever registered: {some_of(known)}",
        fix=did_you_mean(name, known, otherwise="`penstock container ls` lists them"),
    )


def check_move(
    row: ShardRow | None,
    shard: int,
    target: str,
    containers: tuple[ContainerRow, ...],
    accepting: tuple[str, ...],
    bars: Bars,
) -> bool:
    """False: it is there or on its way there. Refuses what is unknown, on its way elsewhere, or unable."""
    if row is None:
        raise no_shard(shard)
    if target not in {known.name for known in containers}:
        raise no_container(target, containers)
    if (row.target if row.state is ShardState.DROPPING else row.container) == target:
        return False
    if row.state is ShardState.DROPPING:
        raise Refused(
            f"shard {shard} is on its way already",
            why=f"{row.container} drops it for {row.target or 'nobody'}",
            fix="wait until it has arrived",
        )
    if row.is_quarantined:
        raise Refused(
            f"shard {shard} is quarantined",
            why=f"it cost {row.blame} containers",
            fix=f"look at its tasks, then `penstock shard release {shard}` and move it",
        )
    if target not in accepting:
        raise Refused(
            f"{target} cannot take a shard now",
            why=f"those that can: {some_of(accepting)}",
            fix="choose one of them, or uncordon it",
        )
    if (shard, target) in bars:
        raise Refused(
            f"shard {shard} should not be on {target}",
            why=f"{bars[shard, target]}, which a policy decided",
            fix="choose another container; to end that: `penstock job readmit JOB`",
        )
    return True


def fleet_of(containers: tuple[ContainerRow, ...], bars: Bars) -> Fleet:
    """What containers said of their size and place, and where shards should not be."""
    # The solver knows exclusions by job: here a shard stands for itself.
    shards = {shard: frozenset({f"shard {shard}"}) for shard, _ in bars}
    return Fleet(
        jobs=shards,
        excluded=frozenset((f"shard {shard}", name) for shard, name in bars),
        kinds=KINDS,
        capacities={row.name: row.capacity for row in containers if len(row.capacity) == len(KINDS)},
        regions={row.name: row.region for row in containers if row.region},
    )


def plan_moves(
    shards: tuple[ShardRow, ...],
    containers: tuple[ContainerRow, ...],
    *,
    accepting: tuple[str, ...],
    loads: Mapping[int, Vector],
    mode: Mode,
    pace: ShardManagerSettings,
    bars: Bars,
) -> Placement:
    """What the solver makes of the store's rows; shards that cost containers are left out, and said so."""
    moving = frozenset(row.shard for row in shards if row.state is ShardState.DROPPING)
    heading = {row.shard: row.target if row.shard in moving else row.container for row in shards}
    barred = [row.shard for row in shards if row.is_quarantined and row.container is None]

    def place(bars: Bars) -> Placement:
        return place_shards(
            [row.shard for row in shards if row.shard not in moving and row.shard not in barred],
            accepting,
            {shard: name for shard, name in heading.items() if name is not None},
            loads=loads,
            mode=mode,
            leaving=frozenset(row.name for row in containers if row.draining),
            in_motion={row.shard: row.container or "" for row in shards if row.shard in moving},
            moves_max=max(0, pace.moves_of(len(accepting)) - len(moving)),
            fleet=fleet_of(containers, bars),
        )

    bars = bars_in_force(bars, accepting)
    placement = place(bars)
    homeless = {refusal.shard for refusal in placement.refusals if heading[refusal.shard] is None}
    if any(shard in homeless for shard, _ in bars):
        # Better in a place that somebody would rather not have than nowhere.
        placement = place({key: why for key, why in bars.items() if key[0] not in homeless})
    moves = tuple(replace(m, reason=bars.get((m.shard, m.source or ""), m.reason)) for m in placement.moves)
    why = f"it cost {BLAME_MAX} containers: look at its tasks, then `penstock shard release` it"
    quarantined = tuple(Refusal(shard=shard, reason=why) for shard in barred)
    return replace(placement, moves=moves, refusals=(*quarantined, *placement.refusals))


def plan_take_back(
    slow: ShardRow,
    accepting: Callable[[tuple[ContainerRow, ...]], Collection[str]],
    loads: Mapping[int, Vector],
    reason: str,
    bars: Bars,
) -> MovePlanner:
    """Plans another place for a shard whose container did not record it; nothing if all that has changed."""

    def plan(shards: tuple[ShardRow, ...], containers: tuple[ContainerRow, ...]) -> Placement:
        others = set(accepting(containers)) - {slow.container}
        if slow not in shards or not others:
            return Placement()
        held = {row.shard: row.container for row in shards if row.container is not None and row != slow}
        fleet = fleet_of(containers, bars_in_force(bars, others))
        # Only this shard: whatever else should move is for a round that looks at everything.
        chosen = place_shards(
            [slow.shard], others, held, loads=loads, mode=Mode.EMERGENCY, moves_max=0, fleet=fleet
        ).moves
        return Placement(moves=tuple(replace(move, source=slow.container, reason=reason) for move in chosen))

    return plan


def plan_give_away(
    leaving: Mapping[ShardRow, str],
    accepting: Callable[[tuple[ContainerRow, ...]], Collection[str]],
    loads: Mapping[int, Vector],
    bars: Bars,
) -> MovePlanner:
    """Plans other places for shards whose container cannot run them, each with its reason. One that nobody
    else may have, or has room for, stays.
    """

    def plan(shards: tuple[ShardRow, ...], containers: tuple[ContainerRow, ...]) -> Placement:
        unchanged = set(shards)
        rows = {row.shard: row for row in leaving if row in unchanged}
        if not rows:
            return Placement()
        heading = {row.shard: row.target or row.container for row in shards if row.shard not in rows}
        found = place_shards(
            list(rows),
            accepting(containers),
            {shard: name for shard, name in heading.items() if name is not None},
            loads=loads,
            mode=Mode.EMERGENCY,
            moves_max=0,  # only these: whatever else should move is for a round that looks at everything
            fleet=fleet_of(containers, bars),
        )
        moves = [move for move in found.moves if move.shard in rows]
        return Placement(
            moves=tuple(
                replace(move, source=rows[move.shard].container, reason=leaving[rows[move.shard]])
                for move in moves
            ),
            refusals=tuple(refusal for refusal in found.refusals if refusal.shard in rows),
        )

    return plan


class FleetOrders(FleetView):
    """Orders, written under the term of the one who takes them."""

    def __init__(self, store: ShardStore, *, term: int, wall_of: Callable[[Millis], Millis]) -> None:
        super().__init__(store)
        self.term, self._wall_of, self._lock = term, wall_of, threading.RLock()
        self._restarts = RestartOrders(term)

    def cordon(self, container: str, now_ms: Millis, *, reason: str = "asked to", actor: str = ROLE) -> None:
        """Give a container no new shards; it keeps what it has."""
        self._mark(container, True, False, now_ms, reason, actor)

    def drain(self, container: str, now_ms: Millis, *, reason: str = "asked to", actor: str = ROLE) -> None:
        """Move everything away from a container, a few shards at a time, and give it nothing new."""
        self._mark(container, True, True, now_ms, reason, actor)

    def uncordon(
        self, container: str, now_ms: Millis, *, reason: str = "asked to", actor: str = ROLE
    ) -> None:
        """Take a container back."""
        self._mark(container, False, False, now_ms, reason, actor)

    def _mark(
        self, container: str, cordoned: bool, draining: bool, now_ms: Millis, reason: str, actor: str
    ) -> None:
        with self._lock:
            if not self._store.cordon(
                container,
                cordoned=cordoned,
                draining=draining,
                reason=reason,
                actor=actor,
                term=self.term,
                at_ms=self._wall_of(now_ms),
            ):
                raise no_container(container, self._store.containers())

    def release(self, shard: int, now_ms: Millis, *, reason: str = "asked to", actor: str = ROLE) -> None:
        """Let a quarantined shard be placed again."""
        with self._lock:
            at_ms = self._wall_of(now_ms)
            if not self._store.forgive(shard, term=self.term, at_ms=at_ms, reason=reason, actor=actor):
                raise no_shard(shard)

    def restart(self, task_id: str, now_ms: Millis, *, reason: str, actor: str = ROLE) -> str:
        """Ask for one task to be ended and started again where it is; returns where that is."""
        with self._lock:
            row = find_task_container(task_id, self._store.containers())
            self._restarts.ask(task_id, row.name, row.incarnation)
            at_ms, decision = self._wall_of(now_ms), f"restart on {row.name}"
            self._store.note("task", task_id, decision, reason, at_ms=at_ms, actor=actor)
            return row.name


_TERM_BITS = 32  # orders of a later term are larger than all before


@dataclass(slots=True)
class RestartOrders:
    """Tasks to be ended and started again, repeated in each reply until a heartbeat says that it was done.

    One order per task: asking twice before it is obeyed is asking once. Kept in memory alone: an order that
    is lost with its Shard Manager changes nothing, and may be given again.
    """

    term: int
    _count: int = 0
    _open: dict[str, tuple[str, str, RestartOrder]] = field(default_factory=dict)

    def ask(self, task_id: str, container: str, incarnation: str) -> None:
        """Order a restart of a task where it is now."""
        known = self._open.get(task_id)
        if known is not None and known[:2] == (container, incarnation):
            return
        self._count += 1
        order = RestartOrder(task_id=task_id, number=(self.term << _TERM_BITS) + self._count)
        self._open[task_id] = container, incarnation, order

    def on_beat(self, beat: Heartbeat) -> tuple[RestartOrder, ...]:
        """What this container has yet to obey. Another life of it has started its tasks anew already."""
        mine = [(life, order) for name, life, order in self._open.values() if name == beat.container]
        for life, order in mine:
            if life != beat.incarnation or order.number <= beat.order:
                del self._open[order.task_id]
        return tuple(order for life, order in mine if life == beat.incarnation and order.number > beat.order)


def find_task_container(task_id: str, containers: Sequence[ContainerRow]) -> ContainerRow:
    """Where a task runs or is to run, by what containers last said of themselves."""
    job = task_id.rpartition("/")[0]
    for row in containers:
        if row.may_run and any(task.task_id == task_id for task in row.tasks_of(job)):
            return row
    raise Refused(
        f"no container runs {task_id} now",
        why="its job is stopped or changing, or its shard is on its way",
        fix="`penstock task ls` shows where tasks are; ask again once it is there",
    )
