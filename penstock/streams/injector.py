"""Brings external records onto the bus and publishes its own low watermark (MillWheel 5.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError
from penstock.streams.bus.log import HEADERS_FIELD, LOW_MAX, Log
from penstock.streams.keys import partitions_of

Headers = Sequence[tuple[str, bytes | None]]


class Injector:
    """One writer of one JSON category. Records go by key to partitions; sequences are gapless, so a repeat
    does nothing.

    `epoch` must grow with every life of the same name: the older life is then refused.
    """

    def __init__(self, log: Log, category: str, name: str, *, epoch: int) -> None:
        self._log, self._category, self._name, self._epoch = log, category, name, epoch
        self._spec = log.describe(category).spec
        log.register_producer(category, name)
        log.fence(category, name, epoch)
        self._sequences = dict(log.published_to(category, name))

    def publish(
        self,
        keys: Sequence[str],
        stamps: Sequence[Millis],
        values: Sequence[bytes],
        headers: Sequence[Headers | None] = (),
    ) -> None:
        """Append records; they are durable when this returns. `headers`: one for each, or none at all."""
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
        table = pa.table(columns)
        targets = partitions_of(columns["_key"], self._spec.partitions)
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
        self._log.publish(
            self._category, producer=self._name, epoch=self._epoch, batches=batches, gapless=True
        )
        for partition, batch in batches.items():
            self._sequences[partition] = self._sequences.get(partition, 0) + batch.num_rows

    def report_low(self, low: Millis, *, now_ms: Millis) -> None:
        """Promise: every record that I still send has a later time than `low`, or is late."""
        self._log.report_low(self._category, producer=self._name, epoch=self._epoch, low=low, now_ms=now_ms)

    def close(self, *, now_ms: Millis) -> None:
        """Everything has been sent."""
        self.report_low(LOW_MAX, now_ms=now_ms)
