"""Builders for the contract of the bus."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pyarrow as pa

from penstock.core.errors import PenstockError
from penstock.streams.bus.log import LOW_MIN, CategorySpec, Log

SPEC = CategorySpec(name="clicks", partitions=2, columns=(("query", "string"), ("n", "bigint")))
NewLog = Callable[[], Log]
EXAMPLES = count()  # numbers the examples that share one bus


def records(*seqs: int, ts: int = 1000, note: str = "q") -> pa.RecordBatch:
    """A batch for SPEC; `n` repeats the sequence, so that reads can be compared."""
    return pa.RecordBatch.from_arrays(
        [
            pa.array(seqs, pa.int64()),
            pa.array([ts + seq for seq in seqs], pa.int64()),
            pa.array([f"k{seq}" for seq in seqs], pa.string()),
            pa.array([False] * len(seqs), pa.bool_()),
            pa.array([note] * len(seqs), pa.string()),
            pa.array(seqs, pa.int64()),
        ],
        schema=SPEC.schema(),
    )


def publish(log: Log, partition: int, *seqs: int, producer: str = "a", epoch: int = 1, gapless: bool = False):
    return log.publish(
        "clicks", producer=producer, epoch=epoch, batches={partition: records(*seqs)}, gapless=gapless
    )


def stored(log: Log, partition: int, start: int = 0, end: int | None = None) -> list[int]:
    last = log.end_offsets("clicks")[partition] if end is None else end
    return [n for batch in log.read("clicks", partition, start, last) for n in batch.column("n").to_pylist()]


def offsets(log: Log, partition: int) -> list[int]:
    """Where the records of a partition lie."""
    end = log.end_offsets("clicks")[partition]
    return [int(offset) for run, _ in log.scan("clicks", partition, 0, end) for offset in run]


def report(log: Log, producer: str, low: int, now_ms: int, epoch: int = 1) -> None:
    log.report_low("clicks", producer=producer, epoch=epoch, low=low, now_ms=now_ms)


def all_marks(log: Log, partition: int = 0) -> list[tuple[int, int]]:
    """Each mark's low, and how many records of the partition lie before it."""
    marks = log.marks("clicks", partition, above=LOW_MIN, up_to=2**40)
    places = offsets(log, partition)
    return [(mark.low, sum(place < mark.end for place in places)) for mark in marks]


def assert_three_parts(error: PenstockError) -> None:
    assert error.what and error.why and error.fix
