"""Protocols for calls that may take long or hang, and inline versions of them without threads.

The versions with threads are in `core/loop.py`. Simulations and most tests use the inline ones, so that their
order of execution is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from penstock.core.clock import Millis

Result = TypeVar("Result")
Now = Callable[[], Millis]  # the wall clock, for work that reads the time more than once


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Generic[Result]):
    """A finished call: its result, or an unexpected error."""

    key: str
    work: Callable[[Now], Result]  # as passed to `start`, so that the caller recognises it
    result: Result | None
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """A call that has been running for too long; it may still return."""

    key: str
    for_ms: Millis


class Workers(Protocol[Result]):
    """Runs calls in the background, at most one per key at a time."""

    def start(self, key: str, work: Callable[[Now], Result], now_ms: Millis) -> None:
        """Run it as soon as a worker is free. Requires: `key` is not busy."""

    def busy(self) -> frozenset[str]:
        """The keys whose call is queued or running. A key whose call hangs stays busy."""

    def take_finished(self) -> tuple[Finished[Result], ...]:
        """The calls that finished since the last `take_finished`; each is returned once."""

    def stuck(self) -> tuple[Stuck, ...]:
        """The calls that have been running for too long."""


class BackgroundExecutor(Protocol):
    """Runs a call in the background while its caller continues."""

    def start(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Start the call. The returned function waits for its result, or raises its error."""


class InlineExecutor:
    """Runs the call when its result is requested."""

    def start(self, work: Callable[[], Result]) -> Callable[[], Result]:
        return work


@dataclass(slots=True)
class InlineWorkers(Generic[Result]):
    """Runs the call inside `start`. An unexpected error is raised to the caller."""

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


SLICE = 10  # jobs between two pauses: some milliseconds of work
REST_MS: Millis = 20

Rest = Callable[[], None]
Item = TypeVar("Item")


def no_rest() -> None:
    """A `Rest` without a pause."""


def jobs_per_round(count: int, *, least: int, rounds: int) -> int:
    """The number of jobs per round, so that `rounds` rounds serve all `count` of them; at least `least`."""
    return max(least, -(-count // rounds))


class RoundPace:
    """Calls `rest` after every `size` steps of a long round, so that other threads can run."""

    def __init__(self, rest: Rest = no_rest, *, size: int = SLICE) -> None:
        self.rest, self._size, self._steps = rest, size, 0

    def step(self, steps: int = 1) -> None:
        """Count steps, and pause when `size` of them are done."""
        self._steps += steps
        if self._steps >= self._size:
            self._steps = 0
            self.rest()

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Iterate; each item is a step."""
        for item in items:
            yield item
            self.step()

    def slices(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """Iterate over slices of `size` items, with a pause after each slice."""
        for start in range(0, len(items), self._size):
            yield items[start : start + self._size]
            self.rest()
