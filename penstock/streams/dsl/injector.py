"""Publishes external records on the bus, with a low watermark (MillWheel 5.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, Fenced, NotFound, PenstockError, Refused, SequenceGap
from penstock.core.system_clock import SystemClock, sleep_ms
from penstock.streams.bus.log import HEADERS_FIELD, LOW_MAX, LOW_MIN, CategorySpec, Log, partitions_of

SKEW_CHECK_MS: Millis = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """How far an injector is ahead of the slowest category in `paced_by`."""

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
    """`lows`: the watermarks of the categories in `paced_by`; `first`: this injector's low when it started.

    A category without a watermark counts as `first`, so that the injector can start.
    """
    category = min(lows, key=lambda name: (lows[name], name))
    slowest = lows[category] if lows[category] > LOW_MIN else first
    spread = 0 if low >= LOW_MAX or low <= LOW_MIN or slowest >= LOW_MAX else max(0, low - slowest)
    return Skew(low=low, slowest=slowest, category=category, spread_ms=spread, skew_max_ms=skew_max_ms)


class EventTimes:
    """The newest event time sent to each partition of an event-time category."""

    def __init__(self, spec: CategorySpec) -> None:
        self._spec = spec
        self._newest: dict[int, Millis] = {}
        self.are_watermark = spec.watermark == "event_time"

    def add(self, batches: Mapping[int, pa.RecordBatch], *, now_ms: Millis) -> None:
        """Add sent records. Records from the future are ignored: they become dead letters."""
        if not self.are_watermark:
            return
        latest = now_ms + self._spec.ahead_max_ms if self._spec.ahead_max_ms else LOW_MAX
        for partition, batch in batches.items():
            newest = max((time for time in self._times(batch) if time <= latest), default=LOW_MIN)
            self._newest[partition] = max(newest, self._newest.get(partition, LOW_MIN))

    def low(self, partitions: Iterable[int]) -> Millis:
        """The minimum low of these partitions: the watermark is that of the slowest partition.

        A partition without sent records has the lowest low.
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
                continue  # it becomes a dead letter
            if isinstance(found, int):
                yield found


class SkewLimit:
    """Makes an injector wait while it is too far ahead. `on_wait` is called after each check that fails."""

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
                "a skew limit needs a limit and categories",
                why=f"the limit is {skew_max_ms} ms, the categories are {list(paced_by)}",
                fix="set skew_max_ms above 0, and paced_by to the categories that the consumers write",
            )
        self._log, self._skew_max_ms, self._paced_by = log, skew_max_ms, tuple(paced_by)
        self._on_wait, self._pause = on_wait, pause
        self._first: Millis | None = None
        self.waits: Skew | None = None  # while it waits: the skew

    def measure(self, low: Millis) -> Skew:
        """How far records from `low` on would be ahead."""
        if self._first is None and LOW_MIN < low < LOW_MAX:
            self._first = low
        lows = {name: self._log.watermark(name) for name in self._paced_by}
        first = low if self._first is None else self._first
        return measure_skew(low, lows, first=first, skew_max_ms=self._skew_max_ms)

    def wait(self, low: Millis) -> None:
        """Wait until records from `low` on may be sent."""
        while (skew := self.measure(low)).is_too_far:
            self.waits = skew
            self._on_wait(skew)
            self._pause(SKEW_CHECK_MS)
        self.waits = None


Headers = Sequence[tuple[str, bytes | None]]
# Errors of the bus before it writes anything. After any other error the records may have been written.
_NOTHING_WRITTEN = (ConfigError, NotFound, Fenced, SequenceGap)


class PublishUnheard(Refused):
    """New records were refused, because the outcome of the last publish is unknown."""

    def __init__(self, category: str, name: str, records: int) -> None:
        super().__init__(
            f"injector {name!r} does not know whether its last {records} records are in {category!r}",
            why="their publish failed but may have been written; other records with the same sequences would "
            "be dropped as duplicates",
            fix="first publish the same records again, in the same order: records that were written are "
            "deduplicated. If you do not have them any more, open a new Injector with a larger epoch: it "
            "continues after the records that were written",
        )


class SequencesTaken(PenstockError):
    """Another process publishes with this injector's name and epoch."""

    def __init__(self, category: str, name: str, epoch: int, taken: int) -> None:
        super().__init__(
            f"{taken} records of injector {name!r} were not written to {category!r}",
            why=f"the bus has other records with their sequences: another process publishes as {name!r} "
            f"with epoch {epoch}",
            fix="use a unique name for each writer, and a larger epoch at each "
            "start; then open a new Injector "
            "and compare the records in the category: this Injector sends nothing more",
        )


class Injector:
    """One writer of one JSON category. Keys decide the partitions; sequences are gapless, so a repeated
    publish is deduplicated.

    `epoch` must grow at every start with the same name: a used epoch is refused (`EpochUsed`), and injectors
    with older epochs are fenced. A new injector continues after the records on the bus; `published_to` of the
    log returns how many records of this name are in each partition.

    A publish that failed may have been written: until it succeeds, only the same records are accepted
    (`PublishUnheard`), so that they are written once.

    With `skew_max_ms` it waits before a publish while its low is further than this ahead of the slowest
    category in `paced_by`, which its consumers write; `waits` has the skew, and `on_wait` is called. If the
    watermark follows event times, its low is computed from the sent records.
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
        self._unheard: pa.Table | None = None  # sent without a response
        self._taken: SequencesTaken | None = None
        # Before it is registered: a refused injector must not hold the watermark.
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
        """Append records; they are durable when this returns. `headers`: one per record, or empty.

        After an error retry with the same records; others are refused until then.
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
        """One atomic publish. If its outcome is unknown, the records are stored for comparison."""
        is_repeat, self._unheard = self._unheard is not None, table
        try:
            published = self._log.publish(
                self._category, producer=self._name, epoch=self._epoch, batches=batches, gapless=True
            )
        except _NOTHING_WRITTEN:
            if not is_repeat:  # else the outcome of the first attempt is still unknown
                self._unheard = None
            raise
        self._unheard = None
        taken = sum(published.trimmed.values())
        # The bus client may have retried after a lost response; its first attempt was complete then.
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
                why="it was created without headers",
                fix="publish without headers, or use a category that was created with headers",
            )
        return pa.table(columns)

    def _batches(self, table: pa.Table) -> dict[int, pa.RecordBatch]:
        """The records by partition, with the next sequences."""
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
        """Report the low watermark: later records with an event time before `low` are late."""
        self._low = max(low, self._low)
        self._log.report_low(self._category, producer=self._name, epoch=self._epoch, low=low, now_ms=now_ms)

    @property
    def waits(self) -> Skew | None:
        """The skew while `publish` waits for consumers, else None."""
        return None if self._limit is None else self._limit.waits

    def close(self, *, now_ms: Millis) -> None:
        """End the input: all records have been sent."""
        self.report_low(LOW_MAX, now_ms=now_ms)


def expect_injectors(log: Log, category: str, names: Sequence[str]) -> None:
    """Register the injectors of a category: its watermark is the minimum over all of them.

    An injector without a report holds the watermark, in a new category at its beginning. Repeated calls only
    add names. Call it before the first injector starts.
    """
    spec = log.describe(category).spec
    if spec.watermark != "injector":
        raise ConfigError(
            f"category {category!r} does not wait for injectors",
            why=f"its watermark follows {spec.watermark}",
            fix="use a category that was created with the watermark `injector`",
        )
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            "the names of injectors must be unique, and at least one is needed",
            why=f"the names are {list(names)}",
            fix="name each process once",
        )
    for name in names:
        log.register_producer(category, name)


def dismiss_injector(log: Log, category: str, name: str, *, now_ms: Millis) -> None:
    """Unregister an injector, so that the watermark no longer waits for it; its records stay.

    An injector that has only stopped holds the watermark until it returns. If a dismissed injector still
    runs, its next report fails, and its records may be late.
    """
    log.unregister_producer(category, name)
    log.advance(category, now_ms=now_ms)
