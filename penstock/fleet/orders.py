"""Operators' orders for shards, containers and tasks, and the input and output of the placement solver."""

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
    """The error for a shard number that does not exist."""
    return NotFound(
        f"there is no shard {shard}", why="shards are numbered from 0", fix="`penstock shard ls` lists them"
    )


def no_container(name: str, containers: Iterable[ContainerRow]) -> NotFound:
    """The error for an unknown container name."""
    known = [row.name for row in containers]
    return NotFound(
        f"there is no container {name!r}",
        why=f"containers that ever registered: {some_of(known)}",
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
    """Whether a move has to begin; False: the shard is there or moving there. Refused if it cannot begin."""
    if row is None:
        raise no_shard(shard)
    if target not in {known.name for known in containers}:
        raise no_container(target, containers)
    if (row.target if row.state is ShardState.DROPPING else row.container) == target:
        return False
    if row.state is ShardState.DROPPING:
        raise Refused(
            f"shard {shard} is already moving",
            why=f"{row.container} is releasing it, to {row.target or 'be placed again'}",
            fix="wait until this move has ended",
        )
    if row.is_quarantined:
        raise Refused(
            f"shard {shard} is quarantined",
            why=f"{row.blame} containers lost their lease because they could not release it",
            fix=f"inspect its tasks, then run `penstock shard release {shard}` and move it",
        )
    if target not in accepting:
        raise Refused(
            f"{target} cannot take a shard now",
            why=f"containers that accept shards: {some_of(accepting)}",
            fix="choose one of them, or uncordon this one",
        )
    if (shard, target) in bars:
        raise Refused(
            f"shard {shard} should not be on {target}",
            why=f"a policy decided: {bars[shard, target]}",
            fix="choose another container, or end the exclusion: `penstock job readmit JOB`",
        )
    return True


def fleet_of(containers: tuple[ContainerRow, ...], bars: Bars) -> Fleet:
    """The solver's input: capacities and regions that containers reported, and the bars."""
    # The solver excludes jobs from containers: here each barred shard is its own job.
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
    settings: ShardManagerSettings,
    bars: Bars,
) -> Placement:
    """Run the solver on the store's rows. Quarantined shards are not placed, but reported as refusals."""
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
            moves_max=max(0, settings.moves_of(len(accepting)) - len(moving)),
            fleet=fleet_of(containers, bars),
        )

    bars = bars_in_force(bars, accepting)
    placement = place(bars)
    unplaced = {refusal.shard for refusal in placement.refusals if heading[refusal.shard] is None}
    if any(shard in unplaced for shard, _ in bars):
        # A barred container is better than none.
        placement = place({key: why for key, why in bars.items() if key[0] not in unplaced})
    moves = tuple(replace(m, reason=bars.get((m.shard, m.source or ""), m.reason)) for m in placement.moves)
    why = (
        f"quarantined: {BLAME_MAX} containers could not release it; inspect it, then `penstock shard release`"
    )
    quarantined = tuple(Refusal(shard=shard, reason=why) for shard in barred)
    return replace(placement, moves=moves, refusals=(*quarantined, *placement.refusals))


def plan_take_back(
    slow: ShardRow,
    accepting: Callable[[tuple[ContainerRow, ...]], Collection[str]],
    loads: Mapping[int, Vector],
    reason: str,
    bars: Bars,
) -> MovePlanner:
    """Plan another container for a shard that was not acknowledged; no moves if its row has changed."""

    def plan(shards: tuple[ShardRow, ...], containers: tuple[ContainerRow, ...]) -> Placement:
        others = set(accepting(containers)) - {slow.container}
        if slow not in shards or not others:
            return Placement()
        held = {row.shard: row.container for row in shards if row.container is not None and row != slow}
        fleet = fleet_of(containers, bars_in_force(bars, others))
        # Only this shard: other moves are for a regular round.
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
    """Plan other containers for shards whose container cannot run them (shard -> reason). A shard stays if no
    other container may take it or has room for it.
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
            moves_max=0,  # only these shards: other moves are for a regular round
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
    """Executes operators' orders, under the term of this Shard Manager."""

    def __init__(self, store: ShardStore, *, term: int, wall_of: Callable[[Millis], Millis]) -> None:
        super().__init__(store)
        self.term, self._wall_of, self._lock = term, wall_of, threading.RLock()
        self._restarts = RestartOrders(term)

    def cordon(self, container: str, now_ms: Millis, *, reason: str = "requested", actor: str = ROLE) -> None:
        """Give a container no new shards; it keeps those that it has."""
        self._mark(container, True, False, now_ms, reason, actor)

    def drain(self, container: str, now_ms: Millis, *, reason: str = "requested", actor: str = ROLE) -> None:
        """Move all shards away from a container, a few at a time, and give it no new ones."""
        self._mark(container, True, True, now_ms, reason, actor)

    def uncordon(
        self, container: str, now_ms: Millis, *, reason: str = "requested", actor: str = ROLE
    ) -> None:
        """End a cordon or drain."""
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

    def release(self, shard: int, now_ms: Millis, *, reason: str = "requested", actor: str = ROLE) -> None:
        """End the quarantine of a shard, so that it is placed again."""
        with self._lock:
            at_ms = self._wall_of(now_ms)
            if not self._store.clear_blame(shard, term=self.term, at_ms=at_ms, reason=reason, actor=actor):
                raise no_shard(shard)

    def restart(self, task_id: str, now_ms: Millis, *, reason: str, actor: str = ROLE) -> str:
        """Order the restart of a task in its container; returns the container's name."""
        with self._lock:
            row = find_task_container(task_id, self._store.containers())
            self._restarts.add(task_id, row.name, row.incarnation)
            at_ms, decision = self._wall_of(now_ms), f"restart on {row.name}"
            self._store.note("task", task_id, decision, reason, at_ms=at_ms, actor=actor)
            return row.name


_TERM_BITS = 32  # order numbers of a later term are larger than all before


@dataclass(slots=True)
class RestartOrders:
    """Pending restart orders, repeated in each reply until a heartbeat acknowledges them.

    A task has at most one pending order. Orders are held in memory only: one that is lost with its Shard
    Manager has no effect and may be given again.
    """

    term: int
    _count: int = 0
    _open: dict[str, tuple[str, str, RestartOrder]] = field(default_factory=dict)

    def add(self, task_id: str, container: str, incarnation: str) -> None:
        """Add an order, unless the same one is pending."""
        known = self._open.get(task_id)
        if known is not None and known[:2] == (container, incarnation):
            return
        self._count += 1
        order = RestartOrder(task_id=task_id, number=(self.term << _TERM_BITS) + self._count)
        self._open[task_id] = container, incarnation, order

    def on_heartbeat(self, heartbeat: Heartbeat) -> tuple[RestartOrder, ...]:
        """The pending orders of this container. A new incarnation clears them: its tasks have
        just started.
        """
        mine = [(life, order) for name, life, order in self._open.values() if name == heartbeat.container]
        for life, order in mine:
            if life != heartbeat.incarnation or order.number <= heartbeat.order:
                del self._open[order.task_id]
        return tuple(
            order for life, order in mine if life == heartbeat.incarnation and order.number > heartbeat.order
        )


def find_task_container(task_id: str, containers: Sequence[ContainerRow]) -> ContainerRow:
    """The container that last reported a task, running or waiting to start."""
    job = task_id.rpartition("/")[0]
    for row in containers:
        if row.may_run and any(task.task_id == task_id for task in row.tasks_of(job)):
            return row
    raise Refused(
        f"no container runs {task_id} now",
        why="its job is stopped or changing, or its shard is moving",
        fix="`penstock task ls` shows where tasks run; try again once it is listed there",
    )
