"""What a category accepts: names, specs, batches; which records of a publish are new; when a mark is due.

Pure: every implementation of the bus asks here, so that they cannot differ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

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
from penstock.streams.bus.log import (
    ARROW_TYPES,
    HEADERS_FIELD,
    LOW_MAX,
    SYSTEM_FIELDS,
    Category,
    CategorySpec,
    Lag,
    Run,
)

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
