"""Work that may take long or hang: what services ask for, and a twin that does it at once, without threads.

`core/loop.py` has the one with threads. With the twin, simulations and most tests stay in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from penstock.core.clock import Millis

Result = TypeVar("Result")
Now = Callable[[], Millis]  # the wall clock, asked by work that takes its time


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Generic[Result]):
    """A piece of work that is over: its result, or the error that nobody expected."""

    key: str
    work: Callable[[Now], Result]  # what was started, so that whoever started it knows it again
    result: Result | None
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """A piece of work that has been under way for too long; it may still come back."""

    key: str
    for_ms: Millis


class Workers(Protocol[Result]):
    """Runs pieces of work, each key's one after another."""

    def start(self, key: str, work: Callable[[Now], Result], now_ms: Millis) -> None:
        """Run it as soon as a worker is free. Requires: `key` is not busy."""

    def busy(self) -> frozenset[str]:
        """The keys whose work waits or is under way. A key whose work hangs stays busy."""

    def take_finished(self) -> tuple[Finished[Result], ...]:
        """What has ended since the last call; each piece is given out once."""

    def stuck(self) -> tuple[Stuck, ...]:
        """What has been under way for longer than work should."""


class Aside(Protocol):
    """Does one thing beside what its owner goes on with."""

    def start(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Begin; what is returned waits for the result, or raises what the work raised."""


class InlineAside:
    """Does the work when its result is asked for."""

    def start(self, work: Callable[[], Result]) -> Callable[[], Result]:
        return work


@dataclass(slots=True)
class InlineWorkers(Generic[Result]):
    """Does the work inside `start`. An error that nobody expected goes straight to the caller."""

    _finished: list[Finished[Result]] = field(default_factory=list)

    def start(self, key: str, work: Callable[[Now], Result], now_ms: Millis) -> None:
        self._finished.append(Finished(key=key, work=work, result=work(lambda: now_ms)))

    def busy(self) -> frozenset[str]:
        return frozenset()

    def take_finished(self) -> tuple[Finished[Result], ...]:
        finished, self._finished = tuple(self._finished), []
        return finished

    def stuck(self) -> tuple[Stuck, ...]:
        return ()


SLICE = 10  # jobs: some milliseconds of work
REST_MS: Millis = 20

Rest = Callable[[], None]
Item = TypeVar("Item")


def no_rest() -> None:
    """For whom nobody waits."""


def share_of(count: int, *, least: int, rounds: int) -> int:
    """How many of so many jobs one round serves, so that after so many rounds all of them were: spread over
    the time, they never keep anybody waiting for long.
    """
    return max(least, -(-count // rounds))


class RoundPace:
    """Counts the steps of one thread."""

    def __init__(self, rest: Rest = no_rest, *, size: int = SLICE) -> None:
        """`size`: steps between rests."""
        self.rest, self._size, self._steps = rest, size, 0

    def step(self, steps: int = 1) -> None:
        """So much was done."""
        self._steps += steps
        if self._steps >= self._size:
            self._steps = 0
            self.rest()

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Each item is a step."""
        for item in items:
            yield item
            self.step()

    def slices(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """As many as are served in one go, in their order, with a rest after each slice."""
        for start in range(0, len(items), self._size):
            yield items[start : start + self._size]
            self.rest()
