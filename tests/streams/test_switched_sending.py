"""Strong or weak, deduplicated or not, said otherwise between two lives: nothing is lost, and where dedup is on
again everything that is made from then on is there once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from penstock.streams.bus.log import LOW_MAX
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.rows.row_store import LIFE_SEQ, RowStore
from penstock.streams.rows.sqlite import SqliteRows
from penstock.streams.step.outbox import Sending
from penstock.streams.step.stateful import StatefulStep
from tests.streams.step_world import (
    REF,
    CountPerSecond,
    Crash,
    Event,
    Points,
    World,
    crash,
    deaths,
    faulty,
    published,
)

STRONG, OFF = Sending(), Sending(dedup=False)
WEAK, WEAK_OFF = Sending(weak=True), Sending(weak=True, dedup=False)
# Every production of a weak job is a straggler: it is checkpointed and sent from there.
SLOW, SLOW_OFF = (replace(kind, straggler_ms=-1) for kind in (WEAK, WEAK_OFF))
KINDS = {"strong": STRONG, "off": OFF, "weak": WEAK, "weak off": WEAK_OFF, "slow": SLOW, "slow off": SLOW_OFF}


def said(kind: Sending) -> str:
    return next(name for name, known in KINDS.items() if known is kind)


PAIRS = [
    pytest.param(KINDS[one], KINDS[other], id=f"{one} to {other}") for one, other in product(KINDS, KINDS)
]

FIRST: tuple[Event, ...] = (("a", 100), ("b", 300), 0, ("a", 1100), 1000)
SECOND: tuple[Event, ...] = (("b", 1500), 2000, ("c", 2100))
THIRD: tuple[Event, ...] = (("d", 5100), ("e", 5300), 6000, LOW_MAX)


class Driven(World):
    """A world whose lives say how they send."""

    sending = STRONG

    def step(self, token: int) -> StatefulStep:
        return StatefulStep(
            ref=REF,
            token=token,
            rows=self.rows,
            log=self.log,
            outputs=self.outputs(),
            computation=CountPerSecond(),
            sending=self.sending,
        )


def a_world(rows: RowStore | None = None) -> Driven:
    return Driven(rows=rows or MemoryRows(), log=MemoryLog()).build()  # type: ignore[return-value]


def life(world: Driven, sending: Sending, events: Sequence[Event] = (), at: int = -1) -> int:
    """These events, and one life that reads all there is, or dies at a point; how many points it passed."""
    world.append(events)
    points = Points(at, crash)
    seen = faulty(world, points)
    driven = Driven(rows=seen.rows, log=seen.log, clock_ms=world.clock_ms + 100_000)
    driven.sending = sending
    with suppress(Crash):
        driven.live([2])
    world.clock_ms = driven.clock_ms
    return points.passed


def bag(world: World) -> Counter[str]:
    rows = published(world.log, list(world.columns))
    return Counter(
        str({name: value for name, value in row.items() if name != "_seq"})
        for parts in rows.values()
        for part in parts.values()
        for row in part
    )


@cache
def expected() -> set[str]:
    world = a_world()
    life(world, STRONG, (*FIRST, *SECOND, *THIRD))
    found = bag(world)
    assert set(found.values()) == {1}
    return set(found)


def of_third(found: Counter[str]) -> dict[str, int]:
    """What was made of the last events alone: times from 5 s on."""
    return {made: count for made, count in found.items() if "'_ts': 5" in made}


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_any_switch_under_a_crash_loses_nothing_and_dedup_on_is_exactly_once_again(
    one: Sending, other: Sending
):
    """Plan: a life dies at each of its points, the next one sends otherwise, the third as by default."""
    whole, are_left, passed = expected(), 0, life(a_world(), one, FIRST)
    for at in (*deaths(passed), passed):
        world = a_world()
        life(world, one, FIRST, at)
        snapshot = world.rows.snapshot(REF, token=world.rows.peek(REF).token, keys=(), timers_up_to=0)
        are_left += bool(snapshot.outbox)
        life(world, other, SECOND)
        life(world, STRONG, THIRD)
        found = bag(world)
        assert set(found) == whole, at
        assert set(of_third(found).values()) == {1}, at
        if one in (STRONG, OFF) and other in (STRONG, OFF) and at == passed:
            assert set(found.values()) == {1}, "without a crash nothing comes twice"
        if one is STRONG and other in (STRONG, OFF):
            assert set(found.values()) == {1}, "what was checkpointed as deduplicated stays so"
    assert are_left or one in (WEAK, WEAK_OFF), "some of these lives leave something in the outbox"


@pytest.mark.parametrize("one", [STRONG, OFF, SLOW, SLOW_OFF], ids=said)
@pytest.mark.parametrize("other", [STRONG, OFF, WEAK_OFF], ids=said)
def test_what_is_made_once_dedup_is_on_again_is_there_once_wherever_that_life_dies(
    one: Sending, other: Sending
):
    """Plan: two lives, the first dead with leftovers; then dedup is on, and dies at each of its points."""
    whole = expected()

    def switched(at: int) -> tuple[Driven, int]:
        world = a_world()
        life(world, one, FIRST, at=11)
        life(world, other, SECOND, at=13)
        return world, life(world, STRONG, THIRD, at)

    passed = switched(-1)[1]
    assert passed > 10
    for at in deaths(passed):
        world = switched(at)[0]
        life(world, STRONG)
        found = bag(world)
        assert set(found) == whole, at
        assert set(of_third(found).values()) == {1}, at


def test_each_name_has_its_own_sequences_without_gaps_whichever_setting_holds(tmp_path: Path):
    world = a_world(SqliteRows(tmp_path))
    lives = ((STRONG, FIRST), (OFF, SECOND), (STRONG, (("d", 5100), 6000)), (OFF, (("e", 6100), LOW_MAX)))
    for sending, events in lives:
        life(world, sending, events)
    birth = world.birth("seen")
    counters = {
        name: count for name, count in world.rows.peek(REF).next_seq.items() if name.startswith(birth)
    }
    rows = [row for part in published(world.log, ["seen"])["seen"].values() for row in part]
    own = [row for row in rows if row["_seq"] <= LIFE_SEQ]
    sent = sum(world.log.published_to("seen", REF.birth).values())
    assert sent == len(own) == sum(count - 1 for name, count in counters.items() if not name.endswith("~"))
    assert len(rows) - len(own) == sum(
        count - 1 - LIFE_SEQ for name, count in counters.items() if name.endswith("~")
    )
    assert 0 < len(own) < len(rows) == 7
