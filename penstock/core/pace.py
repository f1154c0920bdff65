"""Long rounds beside which others are served: after so many steps they rest, and whoever waits has its turn.

Python runs one thread at a time. A request of many short steps waits for its turn at each of them as long as
a round over all jobs computes: ten milliseconds of work become a hundred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from penstock.core.clock import Millis

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
