"""One log, cut into batches in a hundred ways, with restarts and in other orders of arrival: the same output.

Some of its records are beyond the lateness. Each way is compared with the log read at once by one that lives.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.streams.bus.log import LOW_MAX, LOW_MIN
from penstock.streams.dsl.windows import Firing, Spans, session, sliding, tumbling
from penstock.streams.operators.build import operator_of
from tests.streams.operator_world import Columns, Event, Low, OperatorWorld, Rec

WAYS = 100
KEYS = ["a", "b", "c", ""]
SUMS: list[dict[str, Any]] = [
    {"name": "n", "function": "count", "column": None, "parameter": None, "type": "bigint"},
    {"name": "s", "function": "sum", "column": "x", "parameter": None, "type": "bigint"},
]
SUMMED = (
    ("k", "string"),
    ("window_start", "bigint"),
    ("window_end", "bigint"),
    ("n", "bigint"),
    ("s", "bigint"),
)
Build = Callable[[list[Event]], OperatorWorld]


def aggregated(spans: Spans, firing: Firing | None = None) -> Build:
    plan = {
        "operator": "aggregate",
        "keys": ["k"],
        "window": spans.to_json(),
        "firing": (firing or Firing()).to_json(),
        "columns": SUMS,
    }
    return a_builder(plan, ((("x", "bigint"),),), SUMMED)


def a_builder(plan: dict[str, Any], inputs: tuple[Columns, ...], out: Columns) -> Build:
    return lambda events: OperatorWorld(
        logic=lambda: operator_of(plan, out), inputs=inputs, out=out, partitions=1
    ).build(events)


def around(draw: random.Random, low: int) -> int:
    return max(0, low + draw.randrange(-15, 30))


def some_log(draw: random.Random, record: Callable[[int, int], Rec], inputs: int = 1) -> list[Event]:
    """Records around the low of their input, which rises three times."""
    events, lows = [], [0] * inputs
    for number in range(12):
        mine = draw.randrange(inputs)
        events.append(record(mine, around(draw, lows[mine])))
        if number % 4 == 3:
            lows[mine] += draw.randrange(1, 25)
            events.append(Low(low=lows[mine], input=mine))
    return [*events, *(Low(low=LOW_MAX, input=number) for number in range(inputs))]


def numbers(draw: random.Random) -> list[Event]:
    values = [None, 5, 7, -(2**40)]
    return some_log(draw, lambda _, ts: Rec(key=draw.choice(KEYS), ts=ts, values=(draw.choice(values),)))


def pairs(draw: random.Random) -> list[Event]:
    def record(side: int, ts: int) -> Rec:
        key = draw.choice(KEYS)
        return Rec(key=key, ts=ts, values=(side, key, draw.randrange(1000)), input=side)

    return some_log(draw, record, inputs=2)


def results(draw: random.Random) -> list[Event]:
    def record(_: int, ts: int) -> Rec:
        start = ts // 10 * 10
        values = (f"q{draw.randrange(10**6)}", start, start + 10, draw.choice([1, 2, 2, 3, None]))
        return Rec(key=str(start), ts=start + 9, values=values)

    return some_log(draw, record)


JOIN = {
    "operator": "join",
    "how": "outer",
    "keys": [["k"], ["k"]],
    "columns": [[["k", "string"], ["a", "bigint"]], [["k", "string"], ["b", "bigint"]]],
    "within": {"before_ms": 9, "after_ms": 5},
}
SIDES = (
    (("side", "int"), ("l0", "string"), ("l1", "bigint")),
    (("side", "int"), ("r0", "string"), ("r1", "bigint")),
)
PAIRS = (("k", "string"), ("a", "bigint"), ("b", "bigint"))
DEDUP = {"operator": "dedup", "keys": ["k"], "within": {"within_ms": 12}}
TOP = {"operator": "top", "keys": ["window_start"], "count": 2, "by": "n", "lowest": False}
LISTED = (("q", "string"), ("window_start", "bigint"), ("window_end", "bigint"), ("n", "bigint"))

CASES: dict[str, tuple[Callable[[random.Random], list[Event]], Build]] = {
    "tumbling": (numbers, aggregated(tumbling(20))),
    "sliding": (numbers, aggregated(sliding(30, every=10))),
    "session": (numbers, aggregated(session(gap=12))),
    "join within": (pairs, a_builder(JOIN, SIDES, PAIRS)),
    "join by window": (
        pairs,
        a_builder({**JOIN, "within": None, "window": sliding(20, every=10).to_json()}, SIDES, PAIRS),
    ),
    "dedup": (numbers, a_builder(DEDUP, ((("x", "bigint"),),), (("x", "bigint"),))),
    "top": (results, a_builder(TOP, (LISTED,), (*LISTED, ("rank", "int")))),
}
UPDATED = Firing(early_ms=7, late="update", lateness_ms=20)
# What they give before and after a window's end depends on what has come by then.
IN_ORDER: dict[str, tuple[Callable[[random.Random], list[Event]], Build]] = {
    "early and late": (numbers, aggregated(tumbling(20), UPDATED)),
    "early and late sessions": (numbers, aggregated(session(gap=12), UPDATED)),
}


def another_order(events: Sequence[Event], draw: random.Random) -> list[Event]:
    """Lows where they are; a record that is on time anywhere where it is on time, a late one where it is late."""
    marks = [event for event in events if isinstance(event, Low)]
    behind: list[list[int]] = [[LOW_MIN, LOW_MIN]]  # of each input, in the stretches between the lows
    for mark in marks:
        behind.append([max(low, mark.low) if n == mark.input else low for n, low in enumerate(behind[-1])])
    stretches: list[list[Event]] = [[] for _ in behind]
    number = 0
    for event in events:
        if isinstance(event, Low):
            number += 1
            continue
        late = event.ts < behind[number][event.input]
        fitting = [place for place, lows in enumerate(behind) if (event.ts < lows[event.input]) == late]
        stretches[draw.choice(fitting)].append(event)
    found: list[Event] = []
    for stretch, mark in zip(stretches, [*marks, None], strict=True):
        draw.shuffle(stretch)
        found += [*stretch, *([mark] if mark else [])]
    return found


def lived(world: OperatorWorld, draw: random.Random) -> OperatorWorld:
    """In batches of any size, and perhaps not at the first attempt."""
    if not draw.randrange(3):
        world.live_and_die([draw.randrange(1, 12) for _ in range(4)], draw.randrange(15))
    world.live([draw.randrange(2, 17) for _ in range(3)])
    return world


def told(world: OperatorWorld) -> tuple[Any, ...]:
    result = world.result()
    rows = Counter(repr(sorted(row.items())) for row in result["out"])
    return rows, result["lows"], result["counters"]


@pytest.mark.parametrize("case", [*CASES, *IN_ORDER])
def test_a_log_gives_the_same_in_a_hundred_ways(case: str):
    draw = random.Random(f"a hundred ways, {case}")
    make, build = {**CASES, **IN_ORDER}[case]
    events = make(draw)
    whole = build(events)
    whole.live([1000])
    expected = told(whole)
    assert len(expected[0]) >= 5 and expected[2]["late"] >= 1
    for way in range(WAYS):
        arrived = another_order(events, draw) if case in CASES and way % 2 else events
        found = told(lived(build(arrived), draw))
        assert found == expected, f"way {way}: {arrived}"


def test_two_phases_give_the_same_in_many_ways():
    """The partial results of two partitions, each cut in its own way, are the log of the second phase."""
    draw = random.Random("a hundred ways, in two phases")
    events = numbers(draw)
    plan = {
        "operator": "partial",
        "keys": ["k"],
        "window": sliding(30, every=10).to_json(),
        "firing": Firing().to_json(),
        "columns": SUMS,
    }
    columns = (("window_start", "bigint"), ("partial", "binary"))
    partial = a_builder(plan, ((("x", "bigint"),),), columns)
    combine = a_builder({**plan, "operator": "combine"}, (columns,), SUMMED)
    whole = aggregated(sliding(30, every=10))(events)
    whole.live([1000])
    for way in range(30):  # of three intervals each
        arrived = another_order(events, draw)
        sides: list[list[Event]] = [[], []]
        for event in arrived:
            for side in sides if isinstance(event, Low) else [draw.choice(sides)]:
                side.append(event)
        parts = [row for side in sides for row in lived(partial(side), draw).out_rows()]
        draw.shuffle(parts)
        log: list[Event] = [
            Rec(key=row["_key"], ts=row["_ts"], values=(row["window_start"], row["partial"])) for row in parts
        ]
        found = lived(combine([*log, Low(low=LOW_MAX)]), draw)
        assert told(found)[0] == told(whole)[0], f"way {way}"
