"""The stateful step in random cases: logs, cuts, deaths, zombies, twins and caches drawn at random.

`make steps` runs ten thousand; the plain run a few hundred, always the same ones.
"""

from __future__ import annotations

import os
from contextlib import suppress
from random import Random
from typing import Any

from penstock.core.errors import Fenced
from penstock.streams.bus.log import LOW_MAX
from penstock.streams.bus.memory import MemoryLog
from penstock.streams.rows.memory import MemoryRows
from penstock.streams.step.stateful import StateCache
from tests.streams.step_world import REF, Crash, Event, Points, WorkersInTurn, World, crash, faulty

CASES = int(os.environ.get("STEP_CASES", "300"))
LIVES_MAX, POINTS_MAX = 5, 60


def a_log(random: Random) -> tuple[Event, ...]:
    """Records of four keys around a low that rises; some come late; the last low ends it."""
    events: list[Event] = []
    low = 0
    for _ in range(random.randint(1, 20)):
        if random.random() < 0.3:
            low += random.choice([0, 1, 500, 1000, 3000])
            events.append(low)
        else:
            events.append((random.choice("abcd"), max(0, low + random.randint(-700, 2500))))
    return (*events, LOW_MAX)


def play(seed: int) -> list[str]:
    """One case; returns what happened in it. Whatever did, the end must be that of a run without trouble."""
    random = Random(seed)
    events = a_log(random)
    calm = World(rows=MemoryRows(), log=MemoryLog()).build(events)
    calm.live([100])
    expected = calm.result()
    size = random.choice([None, None, 230, 10**6])
    kind = random.choice([StateCache, WorkersInTurn])
    world = World(rows=MemoryRows(), log=MemoryLog(), cache=None if size is None else kind(size)).build(
        events
    )
    story = [_trouble(world, random) for _ in range(random.randint(1, LIVES_MAX))]
    faulty(world, Points()).live(_cuts(random))
    assert world.result() == expected, (seed, events, story)
    world.check_marks()
    return story


def _cuts(random: Random) -> list[int]:
    return [random.randint(1, 6) for _ in range(random.randint(1, 4))]


def _trouble(world: World, random: Random, depth: int = 0) -> str:
    """A life that dies, one that sleeps while another works, or a worker with a twin."""
    kind = random.choice(["dies", "sleeps", "twin"] if depth < 2 else ["dies"])
    at = random.randint(0, POINTS_MAX)
    if kind == "dies":
        points, gone = Points(at, crash), False
        try:
            faulty(world, points).live(_cuts(random))
        except Crash:
            gone = True
        except Fenced:  # only a life inside which another one began
            return f"fenced before point {at}"
        return f"dies at {at}" if gone else f"lives {points.passed} points"
    if kind == "sleeps":
        told: list[str] = []
        points = Points(at, lambda: told.append(_trouble(world, random, depth + 1)))
        with suppress(Fenced):
            faulty(world, points).live(_cuts(random))
        return f"sleeps at {at}: {told}"
    return _twin(world, random, at)


def _twin(world: World, random: Random, at: int) -> str:
    """Two workers with one token; the ranges overlap, the second runs inside the first, and may die there."""
    world.open()
    token, end = world.rows.peek(REF).token, world.log.end_offsets("in")[0]
    start = world.position()
    first, second = (random.randint(start, end) for _ in range(2))
    dies = random.choice([-1, random.randint(0, 20)])

    def inside() -> None:
        twin = faulty(world, Points(dies, crash))
        with suppress(Crash):
            twin.run(twin.step(token), world.position(), max(second, world.position()))

    slow = faulty(world, Points(at % 12, inside))
    slow.run(slow.step(token), start, first)
    return f"twin at {at % 12}, {start}..{first} and ..{second}, dies at {dies}"


def test_random_cases_end_as_if_nothing_had_happened() -> None:
    met: dict[str, Any] = {}
    for seed in range(CASES):
        for word in " ".join(play(seed)).split():
            met[word] = met.get(word, 0) + 1
    # The cases are worth something only if all kinds of trouble came.
    assert all(met.get(word, 0) >= CASES // 20 for word in ("dies", "sleeps", "twin")), met
