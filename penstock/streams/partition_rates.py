"""How much arrives in each partition of a task, over the last minute. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

WINDOW_S = 60.0
# A rate must stand on so many seconds: what is looked at is looked at every few.
SPAN_MIN_S = 5.0


@dataclass(slots=True)
class PartitionRates:
    """By look: when, and what each partition has had so far, read or not."""

    _looks: deque[tuple[float, Mapping[int, int]]] = field(default_factory=deque)

    def look(self, at_s: float, there: Mapping[int, int]) -> None:
        """Requires: `at_s` is of a clock that never jumps."""
        if self._looks and self._looks[-1][1].keys() != there.keys():
            self._looks.clear()
        self._looks.append((at_s, there))
        while at_s - self._looks[0][0] > WINDOW_S:
            self._looks.popleft()

    def metrics(self) -> dict[str, float]:
        """`input_rate.3` and so on, records per second; none before there are two looks."""
        if len(self._looks) < 2:
            return {}
        (first_s, first), (last_s, last) = self._looks[0], self._looks[-1]
        span_s = last_s - first_s
        if span_s < SPAN_MIN_S:
            return {}
        return {
            f"input_rate.{partition}": round(max(0, there - first[partition]) / span_s, 3)
            for partition, there in last.items()
        }
