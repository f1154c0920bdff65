"""How far an injector may run ahead of what its consumers have finished (MillWheel 5.2).

An injector that is far ahead fills the bus and the state of joins with what cannot be used yet. What
consumers have finished shows in the watermarks of the categories they write. How far the injector is, it
says itself, or its records do: where the watermark follows event times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError
from penstock.core.system_clock import sleep_ms
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, CategorySpec, Log

LOOK_EVERY_MS: Millis = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """How far an injector is ahead of the slowest of those it is paced by."""

    low: Millis
    slowest: Millis
    category: str
    spread_ms: Millis
    skew_max_ms: Millis

    @property
    def is_too_far(self) -> bool:
        """Whether it must wait."""
        return self.spread_ms > self.skew_max_ms


def measure_skew(low: Millis, lows: dict[str, Millis], *, first: Millis, skew_max_ms: Millis) -> Skew:
    """`lows`: the watermarks of the categories it is paced by; `first`: this injector's low when it began.

    One that has not begun counts as if it were where the injector began: it may start that far ahead.
    """
    category = min(lows, key=lambda name: (lows[name], name))
    slowest = lows[category] if lows[category] > LOW_MIN else first
    spread = 0 if low >= LOW_MAX or low <= LOW_MIN or slowest >= LOW_MAX else max(0, low - slowest)
    return Skew(low=low, slowest=slowest, category=category, spread_ms=spread, skew_max_ms=skew_max_ms)


class EventTimes:
    """How far each partition of an event-time category is by what was sent to it."""

    def __init__(self, spec: CategorySpec) -> None:
        self._spec = spec
        self._newest: dict[int, Millis] = {}
        self.are_watermark = spec.watermark == "event_time"

    def add(self, batches: Mapping[int, pa.RecordBatch], *, now_ms: Millis) -> None:
        """These were sent. Records from the future become dead letters and move no watermark."""
        if not self.are_watermark:
            return
        latest = now_ms + self._spec.ahead_max_ms if self._spec.ahead_max_ms else LOW_MAX
        for partition, batch in batches.items():
            newest = max((time for time in self._times(batch) if time <= latest), default=LOW_MIN)
            self._newest[partition] = max(newest, self._newest.get(partition, LOW_MIN))

    def low(self, partitions: Iterable[int]) -> Millis:
        """The low of that of these partitions which is least far: what goes there may be what all wait for.

        The watermark is that of the slowest partition. One to which nothing was sent yet is not ahead.
        """
        newest = min((self._newest.get(partition, LOW_MIN) for partition in partitions), default=LOW_MIN)
        return newest if newest <= LOW_MIN else newest - self._spec.lateness_ms

    def _times(self, batch: pa.RecordBatch) -> Iterable[Millis]:
        column = self._spec.ts_column
        if not column:
            yield from batch.column("_ts").to_pylist()
            return
        for value in batch.column("_value").to_pylist():
            try:
                found = msgspec.json.decode(value).get(column)
            except (msgspec.MsgspecError, UnicodeError, TypeError, AttributeError):
                continue  # its readers put it aside
            if isinstance(found, int):
                yield found


class SkewLimit:
    """Lets an injector wait. `on_wait` is told each time it looks and must go on waiting."""

    def __init__(
        self,
        log: Log,
        *,
        skew_max_ms: Millis,
        paced_by: Sequence[str],
        on_wait: Callable[[Skew], None] = lambda skew: None,
        pause: Callable[[Millis], None] = sleep_ms,
    ) -> None:
        if skew_max_ms <= 0 or not paced_by:
            raise ConfigError(
                "a skew limit needs a bound and categories",
                why=f"the bound is {skew_max_ms} ms, the categories are {list(paced_by)}",
                fix="give skew_max_ms above 0, and in paced_by what the consumers write",
            )
        self._log, self._skew_max_ms, self._paced_by = log, skew_max_ms, tuple(paced_by)
        self._on_wait, self._pause = on_wait, pause
        self._first: Millis | None = None
        self.waits: Skew | None = None  # while it waits: how far it is ahead, and of whom

    def look(self, low: Millis) -> Skew:
        """How far ahead records from `low` on would be."""
        if self._first is None and LOW_MIN < low < LOW_MAX:
            self._first = low
        lows = {name: self._log.watermark(name) for name in self._paced_by}
        first = low if self._first is None else self._first
        return measure_skew(low, lows, first=first, skew_max_ms=self._skew_max_ms)

    def wait(self, low: Millis) -> None:
        """Return once records from `low` on may be sent."""
        while (skew := self.look(low)).is_too_far:
            self.waits = skew
            self._on_wait(skew)
            self._pause(LOOK_EVERY_MS)
        self.waits = None
