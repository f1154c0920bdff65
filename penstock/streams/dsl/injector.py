"""Brings external records onto the bus and publishes its own low watermark (MillWheel 5.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, Fenced, NotFound, PenstockError, Refused, SequenceGap
from penstock.core.system_clock import SystemClock, sleep_ms
from penstock.streams.bus.log import HEADERS_FIELD, LOW_MAX, LOW_MIN, CategorySpec, Log
from penstock.streams.keys import partitions_of

SKEW_CHECK_MS: Millis = 100


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

    def measure(self, low: Millis) -> Skew:
        """How far ahead records from `low` on would be."""
        if self._first is None and LOW_MIN < low < LOW_MAX:
            self._first = low
        lows = {name: self._log.watermark(name) for name in self._paced_by}
        first = low if self._first is None else self._first
        return measure_skew(low, lows, first=first, skew_max_ms=self._skew_max_ms)

    def wait(self, low: Millis) -> None:
        """Return once records from `low` on may be sent."""
        while (skew := self.measure(low)).is_too_far:
            self.waits = skew
            self._on_wait(skew)
            self._pause(SKEW_CHECK_MS)
        self.waits = None


Headers = Sequence[tuple[str, bytes | None]]
# What the bus says before it writes anything. After every other error a publish may have been written.
_NOTHING_WRITTEN = (ConfigError, NotFound, Fenced, SequenceGap)


class PublishUnheard(Refused):
    """Other records than those of the publish before, of which nobody knows whether it arrived."""

    def __init__(self, category: str, name: str, records: int) -> None:
        super().__init__(
            f"injector {name!r} does not know yet whether its last {records} records are in {category!r}",
            why="their publish ended with an error and may have been written all the same; other records "
            "under the same sequences would be taken for them, and lost",
            fix="publish the same records again, in the same order: what has arrived is recognised, each is "
            "there once; then send these. Without them: a new Injector with a larger epoch goes on behind "
            "what has arrived",
        )


class SequencesTaken(PenstockError):
    """Somebody else publishes under this injector's name and epoch."""

    def __init__(self, category: str, name: str, epoch: int, taken: int) -> None:
        super().__init__(
            f"{taken} records of injector {name!r} were not written to {category!r}",
            why=f"the bus had others under their sequences: another one publishes as {name!r} "
            f"with epoch {epoch}",
            fix="give each writer a name of its own, and each life of it a larger epoch; then open it anew "
            "and compare what is in the category: this one sends nothing more",
        )


class Injector:
    """One writer of one JSON category. Records go by key to partitions; sequences are gapless, so a repeat
    does nothing.

    `epoch` must grow with every life of the same name: an epoch that was used is refused (`EpochUsed`), and
    the older life may write no more. A new life goes on behind what has arrived; what that was,
    `published_to` of the log says: how many records of this name are in each partition.

    A publish that ended with an error may have been written: then only the same records are taken, until
    they went through (`PublishUnheard`). They are there once.

    With `skew_max_ms` it waits before it publishes while its own low is further than that ahead of the
    slowest category in `paced_by`, which its consumers write. `waits` says so, and `on_wait` is told. Where
    the watermark follows event times, its low is what the records that it sent make of it.
    """

    def __init__(
        self,
        log: Log,
        category: str,
        name: str,
        *,
        epoch: int,
        skew_max_ms: Millis = 0,
        paced_by: Sequence[str] = (),
        on_wait: Callable[[Skew], None] = lambda skew: None,
        pause: Callable[[Millis], None] = sleep_ms,
    ) -> None:
        self._limit = (
            SkewLimit(log, skew_max_ms=skew_max_ms, paced_by=paced_by, on_wait=on_wait, pause=pause)
            if skew_max_ms or paced_by
            else None
        )
        self._low = LOW_MIN
        self._log, self._category, self._name, self._epoch = log, category, name, epoch
        self._spec = log.describe(category).spec
        self._times = EventTimes(self._spec)
        self._clock = SystemClock()
        self._unheard: pa.Table | None = None  # sent, and no answer came
        self._taken: SequencesTaken | None = None
        # Before it is registered: one that is refused must not hold a watermark that nobody waits for.
        log.fence(category, name, epoch, is_new_life=True)
        log.register_producer(category, name)
        self._sequences = dict(log.published_to(category, name))

    def publish(
        self,
        keys: Sequence[str],
        stamps: Sequence[Millis],
        values: Sequence[bytes],
        headers: Sequence[Headers | None] = (),
    ) -> None:
        """Append records; they are durable when this returns. `headers`: one for each, or none at all.

        After an error repeat it with the same records; others are refused until then.
        """
        table = self._table(keys, stamps, values, headers)
        if self._taken is not None:
            raise self._taken
        if self._unheard is not None and not table.equals(self._unheard):
            raise PublishUnheard(self._category, self._name, self._unheard.num_rows)
        batches = self._batches(table)
        if self._limit is not None:
            self._limit.wait(self._times.low(batches) if self._times.are_watermark else self._low)
        self._send(table, batches)
        for partition, batch in batches.items():
            self._sequences[partition] = self._sequences.get(partition, 0) + batch.num_rows
        if self._limit is not None:
            self._times.add(batches, now_ms=self._clock.now_ms())

    def _send(self, table: pa.Table, batches: Mapping[int, pa.RecordBatch]) -> None:
        """One publish, which is on the bus whole or not at all. What stays open is kept."""
        is_repeat, self._unheard = self._unheard is not None, table
        try:
            published = self._log.publish(
                self._category, producer=self._name, epoch=self._epoch, batches=batches, gapless=True
            )
        except _NOTHING_WRITTEN:
            if not is_repeat:  # of the attempt before nothing is known yet
                self._unheard = None
            raise
        self._unheard = None
        taken = sum(published.trimmed.values())
        # The bus may have lost the answer to a first try of its own; that one was whole.
        is_own = published.retried and not any(published.appended.values())
        if taken and not is_repeat and not is_own:
            self._taken = SequencesTaken(self._category, self._name, self._epoch, taken)
            raise self._taken

    def _table(
        self,
        keys: Sequence[str],
        stamps: Sequence[Millis],
        values: Sequence[bytes],
        headers: Sequence[Headers | None],
    ) -> pa.Table:
        columns = {
            "_ts": pa.array(stamps, pa.int64()),
            "_key": pa.array(keys, pa.string()),
            "_late": pa.array(np.zeros(len(keys), dtype=np.bool_)),
            "_value": pa.array(values, pa.binary()),
        }
        if self._spec.headers:
            columns["_headers"] = pa.array(headers or [None] * len(keys), HEADERS_FIELD.type)
        elif headers:
            raise ConfigError(
                f"category {self._category!r} has no headers",
                why="it was created without",
                fix="send none, or write to a category that was created with headers",
            )
        return pa.table(columns)

    def _batches(self, table: pa.Table) -> dict[int, pa.RecordBatch]:
        """By partition, each with the sequences that come next."""
        targets = partitions_of(table.column("_key").combine_chunks(), self._spec.partitions)
        batches = {}
        for partition in np.unique(targets).tolist():
            part = table.take(pa.array(np.flatnonzero(targets == partition)))
            first = self._sequences.get(partition, 0) + 1
            part = part.add_column(
                0, "_seq", pa.array(np.arange(first, first + part.num_rows, dtype=np.int64))
            )
            batches[partition] = pa.RecordBatch.from_arrays(
                [part.column(name).combine_chunks() for name in self._spec.schema().names],
                schema=self._spec.schema(),
            )
        return batches

    def report_low(self, low: Millis, *, now_ms: Millis) -> None:
        """Promise: every record that I still send has a later time than `low`, or is late."""
        self._low = max(low, self._low)
        self._log.report_low(self._category, producer=self._name, epoch=self._epoch, low=low, now_ms=now_ms)

    @property
    def waits(self) -> Skew | None:
        """While `publish` waits for consumers: how far it is ahead, and of which category."""
        return None if self._limit is None else self._limit.waits

    def close(self, *, now_ms: Millis) -> None:
        """Everything has been sent."""
        self.report_low(LOW_MAX, now_ms=now_ms)


def expect_injectors(log: Log, category: str, names: Sequence[str]) -> None:
    """Name the processes that together are the injector of a category: its watermark is the minimum over all.

    One that has not reported yet holds it: from the beginning in a new category, from its watermark else.
    Repeated it only adds. To be called before the first of them begins.
    """
    spec = log.describe(category).spec
    if spec.watermark != "injector":
        raise ConfigError(
            f"category {category!r} does not wait for injectors",
            why=f"its watermark follows {spec.watermark}",
            fix="create it with the watermark `injector`",
        )
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            "the injectors of a category have names of their own",
            why=f"given were {list(names)}",
            fix="name each process once",
        )
    for name in names:
        log.register_producer(category, name)


def dismiss_injector(log: Log, category: str, name: str, *, now_ms: Millis) -> None:
    """This process comes no more, and the watermark waits for it no longer; its records stay.

    One that has only stopped is not dismissed: it holds the watermark until it comes back. Should a
    dismissed one live on, its next report fails, and what it still sends is late by the others' watermark.
    """
    log.unregister_producer(category, name)
    log.advance(category, now_ms=now_ms)
