"""Brings external records onto the bus and publishes its own low watermark (MillWheel 5.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, Fenced, NotFound, PenstockError, Refused, SequenceGap
from penstock.core.system_clock import SystemClock, sleep_ms
from penstock.streams.bus.log import HEADERS_FIELD, LOW_MAX, LOW_MIN, Log
from penstock.streams.keys import partitions_of
from penstock.streams.skew import EventTimes, Skew, SkewLimit

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
