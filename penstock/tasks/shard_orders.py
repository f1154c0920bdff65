"""What people may ask of shards, and what the solver is told of containers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from penstock.core.errors import NotFound, Refused
from penstock.core.near_names import did_you_mean, some_of
from penstock.tasks.container_store import ContainerRow
from penstock.tasks.exclusions import Bars, bars_in_force
from penstock.tasks.messages import ShardState
from penstock.tasks.placement import Fleet, Mode, Placement, Refusal, place_shards
from penstock.tasks.shard_load import KINDS, Vector
from penstock.tasks.shard_pace import Pace
from penstock.tasks.shard_rows_store import BLAME_MAX, ShardRow
from penstock.tasks.shard_store import Plan


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
    pace: Pace,
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


def take_back(
    slow: ShardRow,
    accepting: Callable[[tuple[ContainerRow, ...]], Collection[str]],
    loads: Mapping[int, Vector],
    reason: str,
    bars: Bars,
) -> Plan:
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


def give_away(
    leaving: Mapping[ShardRow, str],
    accepting: Callable[[tuple[ContainerRow, ...]], Collection[str]],
    loads: Mapping[int, Vector],
    bars: Bars,
) -> Plan:
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
