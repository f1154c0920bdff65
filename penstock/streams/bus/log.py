"""What the bus promises: categories of partitions, idempotent fenced publishing, marks.

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

# The low watermark before anything is known, and after everything has come.
LOW_MIN: Millis = -(2**62)
LOW_MAX: Millis = 2**62
# How far beyond its append time a record's event time may lie, unless its category says otherwise.
AHEAD_MAX_MS: Millis = 3_600_000
# How late records from outside may come, unless their category says otherwise.
LATENESS_MS: Millis = 1_000

SYSTEM_FIELDS = (
    pa.field("_seq", pa.int64(), nullable=False),
    pa.field("_ts", pa.int64(), nullable=False),
    pa.field("_key", pa.string()),
    pa.field("_late", pa.bool_(), nullable=False),
)
# Of an internal category whose readers take late records: for each of them the low watermark at which its
# source read it. Beside the category's own columns, and null for records on time.
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
    """What a category is declared to be.

    `watermark` is "producers" (the minimum of its producers' output lows), "injector" (whoever injects
    publishes lows under registered producer ids) or "event_time" (running maximum of `_ts` per partition,
    minus `lateness_ms`). A name is a letter or digit, then up to 127 letters, digits, dots, dashes and
    underscores.

    Of event_time alone: a partition that did not grow for `idle_after_ms` follows the others (0: it holds),
    and records more than `ahead_max_ms` beyond their append time are dead letters (0: none are).
    """

    name: str
    partitions: int
    columns: tuple[tuple[str, str], ...]  # (name, Spark SQL type); `json`, `avro`: inside the value
    format: str = "typed"  # typed | json | avro | bytes
    watermark: str = "producers"
    lateness_ms: Millis = LOW_MIN  # not said: LATENESS_MS of records from outside, 0 of jobs' outputs
    retention_ms: Millis = 0  # how long a record stays after it was appended; 0: until it is truncated
    ts_column: str = ""  # json, avro: which column holds the event time in ms ("" = the record's own `_ts`)
    headers: bool = False  # whether records have headers; readers of columns do not see them
    idle_after_ms: Millis = 0
    ahead_max_ms: Millis = AHEAD_MAX_MS

    def __post_init__(self) -> None:
        if self.lateness_ms == LOW_MIN:
            is_from_outside = self.watermark in ("event_time", "injector")
            object.__setattr__(self, "lateness_ms", LATENESS_MS if is_from_outside else 0)

    def schema(self) -> pa.Schema:
        """The Arrow schema of what lies on the bus."""
        own = (
            [pa.field("_value", pa.binary())]
            if self.format != "typed"
            else [pa.field(name, ARROW_TYPES[kind]) for name, kind in self.columns]
        )
        return pa.schema([*SYSTEM_FIELDS, *own, *([HEADERS_FIELD] if self.headers else [])])


def has_dead_letters(spec: CategorySpec) -> bool:
    """Whether some of its records may be found unfit to be read: they do not parse, or come from the
    future.
    """
    return spec.format in ("json", "avro") or (spec.watermark == "event_time" and spec.ahead_max_ms > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Category:
    """A category as it exists: its spec and its birth id."""

    spec: CategorySpec
    birth: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """After offset `end` (in one partition) no record with ts < `low` follows, but late ones.

    `idle`: this partition alone, because it had no records for long and follows the others.
    """

    low: Millis
    end: int
    idle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of one partition.

    `low`: the event-time low that some reader of it has reached. `end`, `since_ms`: how long it was when it
    last grew, as far as anybody looked. `follows`: the low of its last idle mark.
    """

    low: Millis = LOW_MIN
    end: int = -1
    since_ms: Millis = 0
    noted_ms: Millis | None = None
    follows: Millis = LOW_MIN

    @property
    def reached(self) -> Millis:
        """Up to where its readers are, on their own or by following."""
        return max(self.low, self.follows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a publish did, per partition: records appended, records trimmed as already there.

    `retried`: the bus tried more than once, and cannot tell whether what it trimmed was of its first try.
    """

    appended: Mapping[int, int] = field(default_factory=dict)
    trimmed: Mapping[int, int] = field(default_factory=dict)
    retried: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """What lies beyond a reader's positions: how much, and how long the oldest of it has been there."""

    records: int
    bytes: int
    ms: Millis


Run = tuple[npt.NDArray[np.int64], pa.RecordBatch]  # offsets, and the rows that lie there
# The same, between them when each row was appended, to a second; 0: not known.
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
        """The names of all categories, also of those that cannot be read; one that is just being made may be
        among them, and is NotFound.
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
        """The first offset of each partition that retention and truncation left."""

    def end_offsets(self, category: str) -> tuple[int, ...]:
        """One past the last record of each partition."""

    def truncate(self, category: str, before: Mapping[int, int]) -> None:
        """Let the records of these partitions below these offsets go; what is gone already is no matter.

        Beyond the end: CorruptData. Sequences and epochs stay, and so does the watermark.
        """

    def read(self, category: str, partition: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Records [start, end) in offset order, schema = spec.schema(); CorruptData on a bad checksum.

        An empty range yields nothing. `end` above the end offset is CorruptData too: whoever asks was told of
        records that this log does not have, and a shorter answer would lose them in silence. `start` below
        the start offset, or records that go while they are read: RecordsExpired.
        """

    def scan(self, category: str, partition: int, start: int, end: int) -> Iterator[Run]:
        """As `read`, each batch with the offsets of its rows."""

    def scan_timed(self, category: str, partition: int, start: int, end: int) -> Iterator[TimedRun]:
        """As `scan`, with the time at which each row was appended. It never changes: decisions rest on it."""

    def times(self, category: str, partition: int, start: int, end: int) -> tuple[Millis, Millis] | None:
        """The smallest and the largest `_ts` of the records in [start, end); None if there are none."""

    def lag(self, category: str, positions: Mapping[int, int], *, now_ms: Millis) -> Lag:
        """What a reader at these positions has yet to read of what is there.

        On Kafka records are counted with the ends of transactions, and bytes are estimated.
        """

    def within(self, category: str, partition: int, start: int, end: int, bytes_max: int) -> int:
        """The end of the longest range from `start` up to `end` that has about so many bytes; one record at
        least, if there is one. Of records that lie together the bytes are their mean's.
        """

    def published_to(self, category: str, producer: str) -> Mapping[int, int]:
        """The highest sequence this producer ever appended, per partition."""

    def fence(self, category: str, producer: str, epoch: int, *, is_new_life: bool = False) -> None:
        """Refuse every smaller epoch of this producer from now on.

        `is_new_life`: the epoch must be above all that this producer ever had, else EpochUsed and nothing
        changes. Of several who ask for the same epoch at once at most one gets it.
        """

    def register_producer(self, category: str, producer: str) -> None:
        """Count this producer in the category's watermark: from LOW_MIN without marks, else from its W.

        Repeated while it is registered it does nothing.
        """

    def unregister_producer(self, category: str, producer: str) -> None:
        """Count it no longer. W rises with the next report of another producer; without producers it stays.

        Its epoch and sequences stay. Repeated it does nothing.
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
        """Append the marks that are due, if any: for producers that reported too soon after a mark and then
        fell silent, and for idle partitions.
        """

    def observe(self, category: str, *, partition: int, low: Millis, now_ms: Millis) -> None:
        """A reader of this partition of an event-time category has reached this low, durably.

        With `idle_after_ms` this is what idle partitions follow: each gets marks of its own (`Mark.idle`),
        (the least low of the partitions that grew, its end), in one transaction. Repeated, or smaller, it
        does nothing.
        """

    def observed(self, category: str) -> tuple[Seen, ...]:
        """What was noted of each partition; nothing of a category without `idle_after_ms`."""

    def marks(self, category: str, partition: int, *, above: Millis, up_to: int) -> tuple[Mark, ...]:
        """Marks of one partition with low > `above` and end <= `up_to`, by low."""

    def watermark(self, category: str) -> Millis:
        """W of the last mark, LOW_MIN if none."""

    def raise_percentile(self, category: str, *, percent: int, low: Millis) -> Millis:
        """Keep the low that so many per cent have reached, never below what was kept; returns what is kept.

        For people who look: it is no mark, and nothing waits for it.
        """

    def clean(self, *, now_ms: Millis, older_than_ms: Millis) -> int:
        """Remove what dead publishers left and what is past its retention; returns how much there was.

        `now_ms` is of the clock that runs since the machine's start, which nobody sets. A record goes when
        calls of `clean` have known of it for its retention. Categories that cannot be cleaned are told at the
        end, when the others are (`NotAllCleaned`).
        """
