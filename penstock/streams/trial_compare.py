"""A script repeated with a crash after every effect, or with other cuts of batches: does it end the same?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from penstock.core.errors import PipelineError
from penstock.streams.computation import Computation
from penstock.streams.trial import Faults
from penstock.streams.trial_run import Run, Schedule, Scripted

CUTS_MAX = 200
Factory = Callable[[], Any]  # a Computation (its class will do), a Run or a PipelineRun
Script = Callable[[Any], object]


class OutputsDiffer(AssertionError):
    """The same script ended otherwise. Says where it was disturbed, and what is different."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """How often a script was repeated, and what came out each time: productions, states, timers by name."""

    runs: int
    result: Mapping[str, Any]


def crash_everywhere(factory: Factory, script: Script) -> Tried:
    """Repeat the script with a crash after every effect, and before every commit, when user code has run.

    An effect is what others can see: a commit, a publish, a report of a low watermark, taking over. Whoever
    crashed starts again and goes on. `OutputsDiffer` if productions, states or timers are not those of a run
    without a crash.
    """
    faults = Faults()
    expected = _played(factory, script, Schedule(), faults)
    for at in range(faults.passed):
        here = Faults(at=at)
        found = _played(factory, script, Schedule(), here)
        assert here.where, f"crash {at} did not come"
        _compare(expected, found, f"with a crash {here.where}")
    return Tried(runs=faults.passed + 1, result=expected)


def cut_everywhere(factory: Factory, script: Script, *, seed: int = 0) -> Tried:
    """Repeat the script with its calls cut into other batches: all at once, and up to 200 other ways.

    `advance_clock` always ends a batch, and so does asking for outputs, state or timers. Results must be a
    function of the records and the watermarks between them: `OutputsDiffer` if they are not.
    """
    first = Schedule()
    expected, runs = _played(factory, script, first, Faults()), 1
    for settles, rows_max in _cuts(len(first.calls), random.Random(seed)):
        ends = (
            "at the end alone"
            if not settles
            else f"after call {', '.join(str(n + 1) for n in sorted(settles))}"
        )
        where = f"with steps {ends}, of {rows_max} records at most"
        schedule = Schedule(settles=settles, rows_max=rows_max)
        _compare(expected, _played(factory, script, schedule, Faults(), where), where)
        runs += 1
    return Tried(runs=runs, result=expected)


def _cuts(calls: int, dice: random.Random) -> Iterator[tuple[frozenset[int], int]]:
    """All ways if there are few; else none, each single one, and drawn ones."""
    places = range(calls)
    whole = 1_000_000
    if 2**calls <= CUTS_MAX:
        for count in range(calls):
            yield from ((frozenset(chosen), whole) for chosen in combinations(places, count))
    else:
        yield frozenset(), whole
        yield from ((frozenset({place}), whole) for place in list(places)[: CUTS_MAX // 2])
        for _ in range(CUTS_MAX // 2):
            yield (
                frozenset(place for place in places if dice.random() < 0.3),
                dice.choice((1, 2, 3, 5, whole)),
            )
    yield from ((frozenset(), rows_max) for rows_max in (1, 2, 3))


def _played(
    factory: Factory,
    script: Script,
    schedule: Schedule,
    faults: Faults,
    where: str = "",
) -> dict[str, Any]:
    run = _run_of(factory)
    run.prepare(schedule, faults)
    with _Noting(faults, where):
        script(run)
        run.trial.settle()
    return run.result()


def _run_of(factory: Factory) -> Scripted:
    made = factory()
    if isinstance(made, Computation):
        made = Run(made)
    if not isinstance(made, Scripted) or made.schedule.calls:
        raise PipelineError(
            "there is nothing to repeat",
            why=f"the factory returned {made!r}; it must make a new computation or run each time",
            fix="give a Computation's class, or: lambda: testing.Run(MyComputation(), inputs=…)",
        )
    return made


class _Noting:
    """An error of the script itself says under which disturbance it came."""

    def __init__(self, faults: Faults, where: str) -> None:
        self._faults, self._where = faults, where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        where = f"with a crash {self._faults.where}" if self._faults.where else self._where
        if error is not None and where:
            error.add_note(f"the script was run {where}")


def _compare(expected: Mapping[str, Any], found: Mapping[str, Any], where: str) -> None:
    for name in (*expected, *(name for name in found if name not in expected)):
        before, after = expected.get(name, "nothing"), found.get(name, "nothing")
        if before != after:
            raise OutputsDiffer(f"{name} differs {where}:\n  expected {before}\n  found    {after}")
