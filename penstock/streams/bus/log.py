"""The contract of the bus: categories of partitions, idempotent fenced publishing, marks.

A record on the bus is a row of an Arrow batch: `_seq` int64, `_ts` int64 (event time, ms), `_key` string,
`_late` bool, then the category's own columns. A `json`, `avro` or `bytes` category has one own column,
`_value` (binary), which readers decode into the declared columns. A category with headers has `_headers`
last: pairs of name and bytes in the order in which they were given, null for none.
Offsets ascend in each partition. Memory and embedded log count from 0 without gaps; on Kafka there are gaps,
because the end of a transaction takes an offset too. A position is an offset; a range [start, end) has the
records whose offsets lie in it, which may be fewer than end - start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.core.clock import Millis

# The low watermark before the first record, and after the last one.
LOW_MIN: Millis = -(2**62)
LOW_MAX: Millis = 2**62
# Default limit of a record's event time beyond its append time.
AHEAD_MAX_MS: Millis = 3_600_000
# Default lateness of external records.
LATENESS_MS: Millis = 1_000

SYSTEM_FIELDS = (
    pa.field("_seq", pa.int64(), nullable=False),
    pa.field("_ts", pa.int64(), nullable=False),
    pa.field("_key", pa.string()),
    pa.field("_late", pa.bool_(), nullable=False),
)
# An additional column of an internal category whose readers process late records: the low watermark at which
# the source read a late record; null for records on time.
LOW_COLUMN = ("_low", "bigint")
HEADERS_FIELD = pa.field("_headers", pa.map_(pa.string(), pa.binary()))
# Spark SQL type names that categories, selects and computations may use.
ARROW_TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "double": pa.float64(),
    "float": pa.float32(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
}
ARROW_TYPES |= {f"array<{name}>": pa.list_(kind) for name, kind in ARROW_TYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CategorySpec:
    """The declaration of a category.

    `watermark` is "producers" (the minimum of its producers' output lows), "injector" (injectors report lows
    under registered producer ids) or "event_time" (running maximum of `_ts` per partition, minus
    `lateness_ms`). A name is a letter or digit, then up to 127 letters, digits, dots, dashes and underscores.

    With event_time only: a partition that did not grow for `idle_after_ms` is idle and follows the others
    (0: never), and records more than `ahead_max_ms` beyond their append time are dead letters (0: no limit).
    """

    name: str
    partitions: int
    columns: tuple[tuple[str, str], ...]  # (name, Spark SQL type); `json`, `avro`: inside the value
    format: str = "typed"  # typed | json | avro | bytes
    watermark: str = "producers"
    lateness_ms: Millis = LOW_MIN  # default: LATENESS_MS for external records, 0 for jobs' outputs
    retention_ms: Millis = 0  # since the append; 0: until it is truncated
    ts_column: str = ""  # json, avro: the column of the event time in ms; "": the record's own `_ts`
    headers: bool = False  # whether records have headers; readers of columns do not see them
    idle_after_ms: Millis = 0
    ahead_max_ms: Millis = AHEAD_MAX_MS

    def __post_init__(self) -> None:
        if self.lateness_ms == LOW_MIN:
            is_from_outside = self.watermark in ("event_time", "injector")
            object.__setattr__(self, "lateness_ms", LATENESS_MS if is_from_outside else 0)

    def schema(self) -> pa.Schema:
        """The Arrow schema of records on the bus."""
        own = (
            [pa.field("_value", pa.binary())]
            if self.format != "typed"
            else [pa.field(name, ARROW_TYPES[kind]) for name, kind in self.columns]
        )
        return pa.schema([*SYSTEM_FIELDS, *own, *([HEADERS_FIELD] if self.headers else [])])


def has_dead_letters(spec: CategorySpec) -> bool:
    """Whether some of its records may become dead letters: they do not parse, or are in the future."""
    return spec.format in ("json", "avro") or (spec.watermark == "event_time" and spec.ahead_max_ms > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Category:
    """A category as it exists: its spec and its birth id."""

    spec: CategorySpec
    birth: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """From offset `end` of one partition on, only late records have ts < `low`.

    `idle`: a mark of this partition alone, which is idle and follows the others.
    """

    low: Millis
    end: int
    idle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The recorded progress of one partition, from which idle partitions are detected.

    `low`: the event-time low that a reader of it has reached. `end`, `since_ms`: its end offset, and since
    when it is unchanged. `follows`: the low of its last idle mark.
    """

    low: Millis = LOW_MIN
    end: int = -1
    since_ms: Millis = 0
    noted_ms: Millis | None = None
    follows: Millis = LOW_MIN

    @property
    def reached(self) -> Millis:
        """The low that its readers have reached, by their own records or by an idle mark."""
        return max(self.low, self.follows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The result of a publish, per partition: records appended, and duplicates trimmed.

    `retried`: the bus retried, so trimmed records may be those of its own first try.
    """

    appended: Mapping[int, int] = field(default_factory=dict)
    trimmed: Mapping[int, int] = field(default_factory=dict)
    retried: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """Records beyond a reader's positions: number, bytes, and the age of the oldest."""

    records: int
    bytes: int
    ms: Millis


Run = tuple[npt.NDArray[np.int64], pa.RecordBatch]  # offsets and their rows
# Offsets, append times to the second (0: unknown), rows.
TimedRun = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], pa.RecordBatch]


class Log(Protocol):
    """The bus. Safe for many processes at once; every method opens what it needs."""

    def create(self, spec: CategorySpec) -> Category:
        """Create, or return the existing category if its spec is the same; else ConfigError."""

    def describe(self, name: str) -> Category:
        """NotFound if there is none."""

    def categories(self) -> tuple[Category, ...]:
        """All categories, by name. An error if one of them cannot be read."""

    def names(self) -> tuple[str, ...]:
        """The names of all categories, also of those that cannot be read. One whose creation is not complete
        may be included; `describe` raises NotFound for it.
        """

    def publish(
        self,
        category: str,
        *,
        producer: str,
        epoch: int,
        batches: Mapping[int, pa.RecordBatch],
        gapless: bool,
    ) -> Published:
        """Append to several partitions in one transaction; durable when it returns.

        `_seq` strictly ascends within each batch (a bug otherwise: AssertionError). Records with `_seq` <=
        the mark of (producer, partition) are trimmed one by one; a producer without a mark is not trimmed.
        `epoch` below the producer's highest: Fenced; a higher one becomes the highest, also if all was
        trimmed. `gapless`, and the untrimmed sequences are not mark + 1, mark + 2, ... (from 1): SequenceGap.
        A batch of another schema or for a partition that is not there: ConfigError. After an error nothing is
        written. `Published` has every given partition, with 0 where nothing was appended or trimmed.
        """

    def start_offsets(self, category: str) -> tuple[int, ...]:
        """The first offset of each partition that retention and truncation have kept."""

    def end_offsets(self, category: str) -> tuple[int, ...]:
        """One past the last record of each partition."""

    def truncate(self, category: str, before: Mapping[int, int]) -> None:
        """Delete the records of these partitions below these offsets. May be repeated.

        Beyond the end: CorruptData. Sequences, epochs and the watermark are kept.
        """

    def read(self, category: str, partition: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Records [start, end) in offset order, schema = spec.schema(); CorruptData on a bad checksum.

        An empty range yields nothing. `end` above the end offset is CorruptData too: the reader knows of
        records that this log has lost, and a shorter result would skip them silently. `start` below the start
        offset, or records that are deleted while they are read: RecordsExpired.
        """

    def scan(self, category: str, partition: int, start: int, end: int) -> Iterator[Run]:
        """As `read`, each batch with the offsets of its rows."""

    def scan_timed(self, category: str, partition: int, start: int, end: int) -> Iterator[TimedRun]:
        """As `scan`, with the append time of each row, which never changes."""

    def times(self, category: str, partition: int, start: int, end: int) -> tuple[Millis, Millis] | None:
        """The smallest and the largest `_ts` of the records in [start, end); None if there are none."""

    def lag(self, category: str, positions: Mapping[int, int], *, now_ms: Millis) -> Lag:
        """The lag of a reader at these positions.

        On Kafka ends of transactions count as records, and bytes are estimated.
        """

    def within(self, category: str, partition: int, start: int, end: int, bytes_max: int) -> int:
        """The end of the longest range from `start` up to `end` with about `bytes_max` bytes; at least one
        record, if there is one. Records of one run count with their mean size.
        """

    def published_to(self, category: str, producer: str) -> Mapping[int, int]:
        """The highest sequence this producer ever appended, per partition."""

    def fence(self, category: str, producer: str, epoch: int, *, is_new_life: bool = False) -> None:
        """Refuse every smaller epoch of this producer from now on.

        `is_new_life`: the epoch must be above all that this producer ever had, else EpochUsed and nothing
        changes. If several callers use the same epoch at once, at most one succeeds.
        """

    def register_producer(self, category: str, producer: str) -> None:
        """Add this producer to the category's watermark: from LOW_MIN without marks, else from its W.

        No effect if it is registered already.
        """

    def unregister_producer(self, category: str, producer: str) -> None:
        """Remove it from the watermark. W rises with the next report of another producer; without producers
        it stays. Its epoch and sequences are kept. May be repeated.
        """

    def producers(self, category: str) -> Mapping[str, Millis]:
        """Registered producers and their output lows."""

    def report_low(self, category: str, *, producer: str, epoch: int, low: Millis, now_ms: Millis) -> None:
        """Raise the producer's output low (max of old and new, under its epoch), and append a mark if W rose.

        W = min of the lows of all registered producers. A mark is (W, end offsets), appended in the same
        transaction, at most one per 200 ms of `now_ms` (LOW_MAX at once); one held back so is appended by a
        later report, also of the same low. Fenced if `epoch` is old; NotFound if not registered.
        """

    def advance(self, category: str, *, now_ms: Millis) -> None:
        """Append due marks: for reports that came too soon after a mark and were not followed by another, and
        for idle partitions.
        """

    def observe(self, category: str, *, partition: int, low: Millis, now_ms: Millis) -> None:
        """Report that a reader of this partition of an event-time category has durably reached this low.

        With `idle_after_ms` idle partitions follow these reports: each gets marks of its own (`Mark.idle`):
        (the smallest low of the partitions that grew, its end), in one transaction. An equal or smaller low
        has no effect.
        """

    def observed(self, category: str) -> tuple[Seen, ...]:
        """The recorded progress of each partition; empty for a category without `idle_after_ms`."""

    def marks(self, category: str, partition: int, *, above: Millis, up_to: int) -> tuple[Mark, ...]:
        """Marks of one partition with low > `above` and end <= `up_to`, by low."""

    def watermark(self, category: str) -> Millis:
        """W of the last mark, LOW_MIN if none."""

    def raise_percentile(self, category: str, *, percent: int, low: Millis) -> Millis:
        """Store the low that so many percent have reached, if it is higher; returns the stored one.

        For inspection only: it is not a mark.
        """

    def clean(self, *, now_ms: Millis, older_than_ms: Millis) -> int:
        """Remove files of dead publishers and records past their retention; returns the number of removed
        items.

        `now_ms` is from the monotonic clock since boot. A record is deleted when calls of `clean` have known
        it for the retention time. After all others were cleaned, categories that failed raise
        `NotAllCleaned`.
        """
