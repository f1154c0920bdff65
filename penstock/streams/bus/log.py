"""The contract of the bus: categories of partitions, idempotent fenced publishing, marks; and the checks that
all implementations share, so that they cannot differ; and text and partition of a key, which never change.
Pure.

A record on the bus is a row of an Arrow batch: `_seq` int64, `_ts` int64 (event time, ms), `_key` string,
`_late` bool, then the category's own columns. A `json`, `avro` or `bytes` category has one own column,
`_value` (binary), which readers decode into the declared columns. A category with headers has `_headers`
last: pairs of name and bytes in the order in which they were given, null for none.
Offsets ascend in each partition. Memory and embedded log count from 0 without gaps; on Kafka there are gaps,
because the end of a transaction takes an offset too. A position is an offset; a range [start, end) has the
records whose offsets lie in it, which may be fewer than end - start.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.clock import Millis
from penstock.core.errors import (
    ConfigError,
    CorruptData,
    EpochUsed,
    Fenced,
    NotFound,
    PenstockError,
    RecordsExpired,
    SequenceGap,
    StoreUnavailable,
)

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


# Marks are at most this often, but for the last one (LOW_MAX).
MARK_EVERY_MS: Millis = 200

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_AVRO_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FORMATS = ("typed", "json", "avro", "bytes")
_WATERMARKS = ("producers", "injector", "event_time")


def check_name(name: str) -> None:
    """Check a category's name, which is also a folder's name: it must not contain path elements."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{name!r} cannot name a category",
            why="a name is a letter or digit, then up to 127 letters, digits, dots, dashes and underscores",
            fix="choose another name",
        )


def check_spec(spec: CategorySpec) -> None:
    """Refuse a spec that cannot be stored."""
    check_name(spec.name)
    names = Counter(name for name, _ in spec.columns)
    reserved = {field.name for field in (*SYSTEM_FIELDS, HEADERS_FIELD)} & set(names)
    doubled = sorted(name for name, count in names.items() if count > 1)
    unknown = sorted({kind for _, kind in spec.columns} - set(ARROW_TYPES))
    complaints = [
        (spec.partitions < 1, f"it has {spec.partitions} partitions", "give it at least one"),
        (bool(reserved), f"columns {sorted(reserved)} belong to the bus", "rename them"),
        (bool(doubled), f"columns {doubled} occur twice", "rename them"),
        (bool(unknown), f"types {unknown} are not known", f"use one of {sorted(ARROW_TYPES)}"),
        (spec.format not in _FORMATS, f"format {spec.format!r} is not known", f"use one of {list(_FORMATS)}"),
        (
            spec.format == "bytes" and [kind for _, kind in spec.columns] != ["binary"],
            "a bytes category has one column, of type binary",
            "give it one, or choose another format",
        ),
        (
            spec.format == "avro" and not all(_AVRO_NAME.fullmatch(name) for name in names),
            "Avro fields are named by letters, digits and underscores",
            "rename the columns",
        ),
        (
            bool(spec.ts_column) and dict(spec.columns).get(spec.ts_column) not in ("bigint", "int"),
            f"its event time column {spec.ts_column!r} is not among its columns, or no whole number",
            "declare it as bigint",
        ),
        (
            spec.watermark not in _WATERMARKS,
            f"watermark {spec.watermark!r} is not known",
            f"use one of {list(_WATERMARKS)}",
        ),
        (spec.retention_ms < 0, f"its retention is {spec.retention_ms} ms", "use 0 or more"),
        (spec.lateness_ms < 0, f"its lateness is {spec.lateness_ms} ms", "use 0 or more"),
        (spec.ahead_max_ms < 0, f"its ahead_max is {spec.ahead_max_ms} ms", "use 0 (no limit) or more"),
        (spec.idle_after_ms < 0, f"its idle_after is {spec.idle_after_ms} ms", "use 0 (off) or more"),
        (
            spec.idle_after_ms > 0 and spec.watermark != "event_time",
            f"its watermark follows {spec.watermark}, which speak for all partitions: none is ever idle",
            "leave idle_after_ms out; a producer that is gone is unregistered",
        ),
    ]
    for is_wrong, why, fix in complaints:
        if is_wrong:
            raise ConfigError(f"category {spec.name!r} cannot be created", why=why, fix=fix)


def check_same(existing: Category, asked: CategorySpec) -> None:
    """ConfigError if an existing category has another spec."""
    if existing.spec != asked:
        raise ConfigError(
            f"category {asked.name!r} exists with another spec",
            why=f"it is {existing.spec}, but {asked} was requested",
            fix="choose another name, or declare it with the existing spec",
        )


def arrange(spec: CategorySpec, batches: Mapping[int, pa.RecordBatch]) -> dict[int, pa.RecordBatch]:
    """The batches, ordered by partition, in exactly the category's schema; ConfigError if they do not fit."""
    schema = spec.schema()
    arranged = {}
    for partition in sorted(batches):
        batch = batches[partition]
        check_partition(spec, partition)
        if batch.schema.names != schema.names or batch.schema.types != schema.types:
            raise _misfit(spec, f"it has {_fields(batch.schema)}, the category has {_fields(schema)}")
        nulls = [f.name for f in SYSTEM_FIELDS if not f.nullable and batch.column(f.name).null_count]
        if nulls:
            raise _misfit(spec, f"columns {nulls} contain nulls")
        assert (np.diff(sequences(batch)) > 0).all(), (
            f"_seq must ascend in a batch for {spec.name}[{partition}]"
        )
        arranged[partition] = pa.RecordBatch.from_arrays(batch.columns, schema=schema)
    return arranged


def check_partition(spec: CategorySpec, partition: int) -> None:
    """ConfigError if the category does not have this partition."""
    if not 0 <= partition < spec.partitions:
        raise ConfigError(
            f"category {spec.name!r} has no partition {partition}",
            why=f"its partitions are 0 to {spec.partitions - 1}",
            fix="compute partitions from the category as it exists",
        )


def check_range(spec: CategorySpec, partition: int, end: int, end_offset: int) -> None:
    """CorruptData if a reader requests records beyond the end, which this log must have lost."""
    check_partition(spec, partition)
    if end > end_offset:
        raise CorruptData(
            f"category {spec.name!r} partition {partition} ends at {end_offset}, asked for was up to {end}",
            why="the reader's offsets are beyond the end of the log, so the log is older than its readers",
            fix="restore the log and its readers' rows from backups of the same time; nothing was skipped",
        )


def check_start(category: str, partition: int, start: int, first: int) -> None:
    """RecordsExpired if records of the range are deleted: a reader never gets only the rest."""
    if start < first:
        raise RecordsExpired(
            f"records of category {category!r} partition {partition} are gone before they were read",
            why=f"the reader needs offset {start}, the first existing one is {first}",
            fix="set a longer retention than the slowest reader needs; deleted records cannot be restored",
        )


def check_truncate(spec: CategorySpec, before: Mapping[int, int], ends: Sequence[int]) -> None:
    """CorruptData if a truncation goes beyond the end."""
    for partition, offset in before.items():
        check_partition(spec, partition)
        check_range(spec, partition, offset, ends[partition])


def times_of(batches: Iterable[pa.RecordBatch]) -> tuple[Millis, Millis] | None:
    """The smallest and the largest `_ts` of some records."""
    found = [pc.min_max(batch.column("_ts")).as_py() for batch in batches if batch.num_rows]
    if not found:
        return None
    return min(times["min"] for times in found), max(times["max"] for times in found)


def sum_lags(lags: Iterable[Lag]) -> Lag:
    """The sum of records and bytes, and the largest age."""
    found = list(lags)
    return Lag(
        records=sum(lag.records for lag in found),
        bytes=sum(lag.bytes for lag in found),
        ms=max((lag.ms for lag in found), default=0),
    )


def fit_bytes(runs: Iterable[tuple[int, int, float]], start: int, end: int, bytes_max: int) -> int:
    """The end of the range from `start` that fits into `bytes_max`; `runs`: first offset, rows, bytes."""
    left = float(bytes_max)
    for first, rows, size in runs:
        begin, stop, each = max(first, start), min(first + rows, end), size / rows
        if (stop - begin) * each > left:
            return max(start + 1, begin + int(left // each))
        left -= (stop - begin) * each
    return end


def count_offsets(start: int, batches: Iterator[pa.RecordBatch]) -> Iterator[Run]:
    """The offsets of batches that follow each other without gaps."""
    for batch in batches:
        yield np.arange(start, start + batch.num_rows, dtype=np.int64), batch
        start += batch.num_rows


def sequences(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """The sequences of a batch's records."""
    return np.asarray(batch.column("_seq").to_numpy(), dtype=np.int64)


def check_epoch(category: str, producer: str, *, epoch: int, highest: int | None) -> None:
    """Fenced if the category has seen a higher epoch of this producer."""
    if highest is not None and epoch < highest:
        raise Fenced(
            f"producer {producer} may no longer write to {category!r}",
            why=f"it has epoch {epoch}, the category has seen {highest}",
            fix="nothing: the successor continues",
        )


def check_new_epoch(category: str, producer: str, *, epoch: int, highest: int | None) -> None:
    """EpochUsed unless the epoch is above all that this producer ever had."""
    if highest is not None and epoch <= highest:
        raise EpochUsed(
            f"{producer!r} cannot begin to write to {category!r} with epoch {epoch}",
            why=f"a writer of this name began with epoch {highest} before: it may still run, and what it "
            "sent could not be told from what this one sends",
            fix=f"begin each life of a writer with a larger epoch, here at least {highest + 1} (a counter "
            "that is kept, or the clock in milliseconds); writers that run side by side need names of their "
            "own",
        )


def not_registered(category: str, producer: str) -> NotFound:
    """The error for a low of a producer that is not registered."""
    return NotFound(
        f"producer {producer} is not registered in {category!r}",
        why="only registered producers move a category's watermark",
        fix="register it first; a plan does so when it commits",
    )


def missing(category: str) -> NotFound:
    """The error for a category that does not exist."""
    return NotFound(
        f"there is no category {category!r}",
        why="it was not created, or its name is misspelt",
        fix="create it, or check its name with `penstock bus ls`",
    )


def decide_trim(batch: pa.RecordBatch, mark: int | None) -> int:
    """The number of duplicates at the front. Sequences ascend, so new records are a suffix."""
    return 0 if mark is None else int(np.searchsorted(sequences(batch), mark, side="right"))


def check_gapless(category: str, partition: int, batch: pa.RecordBatch, mark: int | None) -> None:
    """SequenceGap unless the new records follow the mark without gaps."""
    sent = sequences(batch)
    assert not len(sent) or sent[0] >= 1, "gapless sequences start at 1"
    new = sent[decide_trim(batch, mark) :]
    expected = np.arange(len(new), dtype=np.int64) + (mark or 0) + 1
    wrong = np.flatnonzero(new != expected)
    if len(wrong):
        raise SequenceGap(
            f"a publish to {category!r} partition {partition} skips sequences",
            why=f"sequence {int(expected[wrong[0]])} is expected next, but {int(new[wrong[0]])} was sent",
            fix="send the missing records first; nothing was written",
        )


class NotAllCleaned(StoreUnavailable):
    """Some categories could not be cleaned; all others were."""

    def __init__(self, failed: Mapping[str, PenstockError]) -> None:
        super().__init__(
            f"not cleaned: {', '.join(sorted(failed))}",
            why="; ".join(f"{name}: {error.what} ({error.why})" for name, error in sorted(failed.items())),
            fix="; ".join(dict.fromkeys(error.fix for _, error in sorted(failed.items()))),
        )
        self.failed = failed


def decide_mark(
    lows: Mapping[str, Millis], *, last: Millis, last_ms: Millis | None, now_ms: Millis
) -> Millis | None:
    """The W of the mark that is due now, or None. A category without producers keeps the W it has."""
    low = min(lows.values(), default=last)
    if low <= last:
        return None
    # The absolute difference, so that marks continue after the wall clock was set back.
    if low < LOW_MAX and last_ms is not None and abs(now_ms - last_ms) < MARK_EVERY_MS:
        return None
    return low


def _misfit(spec: CategorySpec, why: str) -> ConfigError:
    return ConfigError(
        f"a batch does not fit category {spec.name!r}",
        why=why,
        fix="send the category's columns, in order; a changed schema needs a new category",
    )


def _fields(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


NULL_KEY = "[null]"
_AFTER_BRACKETS = "null]"
_PARTS = msgspec.json.Decoder(list[str | None])


def key_texts(values: pa.Array) -> pa.Array:
    """The key text of each value, for a key of one expression; never null."""
    bracketed = _is_bracketed(values)
    if bracketed is not None:
        escaped = pc.binary_join_element_wise("[", values, "")
        values = pc.if_else(bracketed, escaped, values)
    return pc.fill_null(values, NULL_KEY)


def key_sql(text: str) -> str:
    """`key_texts` as Spark SQL, for a string expression."""
    return rf"coalesce(regexp_replace({text}, '^(\\[+null\\])\\z', '[$1'), '{NULL_KEY}')"


def key_values(texts: pa.Array) -> pa.Array:
    """The values from the texts of a key of one column."""
    bracketed = _is_bracketed(texts)
    if bracketed is None:
        return texts
    values = pc.if_else(pc.equal(texts, NULL_KEY), pa.scalar(None, pa.string()), texts)
    return pc.if_else(bracketed, pc.utf8_slice_codeunits(values, 1), values)


def key_parts(text: str, count: int) -> list[str | None]:
    """The texts of the columns of a key of several columns; for an empty key all NULL."""
    return _PARTS.decode(text) if text else [None] * count


def has_null_part(texts: pa.Array, count: int) -> npt.NDArray[np.bool_]:
    """Which of these keys of `count` columns contain NULL: such a key is not equal to any key."""
    if count == 1:
        found = pc.equal(texts, NULL_KEY)
    else:
        found = pc.match_substring(texts, "null")
        if pc.any(found).as_py():
            flags = [None in key_parts(text, count) for text in texts.filter(found).to_pylist()]
            found = pc.replace_with_mask(found, found, pa.array(flags, pa.bool_()))
    return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.bool_)


def _is_bracketed(texts: pa.Array) -> pa.Array | None:
    """Which of these are `null]` after one or more opening brackets; None if none is."""
    ends = pc.ends_with(texts, _AFTER_BRACKETS)
    if not pc.any(ends).as_py():
        return None
    bare = pc.equal(pc.utf8_ltrim(texts, "["), _AFTER_BRACKETS)
    return pc.and_(bare, pc.starts_with(texts, "["))


def partition_of(key: str, partitions: int) -> int:
    """CRC-32 of the key's UTF-8 bytes."""
    return zlib.crc32(key.encode()) % partitions


def partitions_of(keys: pa.Array, partitions: int) -> npt.NDArray[np.int64]:
    """`partition_of` for a column; each distinct key is hashed once. A null key counts as the empty key."""
    encoded = pc.dictionary_encode(pc.fill_null(keys.cast(pa.string()), ""))
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    by_key = np.array(
        [partition_of(key, partitions) for key in encoded.dictionary.to_pylist()], dtype=np.int64
    )
    indices = encoded.indices.to_numpy(zero_copy_only=False)
    return by_key[indices] if len(by_key) else np.empty(0, dtype=np.int64)
