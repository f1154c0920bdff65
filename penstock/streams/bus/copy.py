"""Copies records from files to the bus, from the bus to files, and between categories.

A record's number in its source is its sequence, so that a repeat under the same producer adds nothing: what
was broken off is simply started again. Every bad line of a file is told before a record is published.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, DiskFull, EnvironmentProblem, PipelineError
from penstock.streams.bus.log import LOW_MAX, Category, CategorySpec, Log, Published
from penstock.streams.inspect.record_lines import (
    LINE_BYTES_MAX,
    BadLine,
    LineRules,
    lines_of,
    parse_lines,
    split_by_partition,
    target_partitions,
)

# Records of one publish. A source is split at multiples of it, so that a repeat splits at the same places.
BATCH_ROWS = 10_000
BATCH_BYTES = 32 * 2**20
BAD_SHOWN_MAX = 20

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The result: records appended to the target, and records that existed there already."""

    appended: int
    repeated: int


class BadLines(PipelineError):
    """A file has lines that are not valid records; nothing of it was published."""

    def __init__(self, name: str, bad: tuple[BadLine, ...], count: int) -> None:
        super().__init__(
            f"{count} line{'s' if count > 1 else ''} of {name} cannot be published",
            why="\n".join(
                [f"line {line.number}: {line.reason}" for line in bad]
                + ([f"and {count - len(bad)} more"] if count > len(bad) else [])
            ),
            fix="correct them and publish again; nothing was written",
        )
        self.bad, self.count = bad, count


def publish_lines(
    log: Log,
    file: BinaryIO,
    rules: LineRules,
    *,
    name: str,
    producer: str,
    epoch: int,
    progress: Progress = lambda done: None,
) -> Copied:
    """Publish every line of a file, or none if one is invalid. Requires: `file` can be read twice."""
    _check_lines(file, rules, name)
    file.seek(0)
    category = rules.spec.name
    log.fence(category, producer, epoch)
    appended = repeated = done = 0
    for lines in _chunks(file):
        records = parse_lines(lines, rules).records
        published = _publish(log, rules.spec, records, producer=producer, epoch=epoch)
        appended += sum(published.appended.values())
        repeated += sum(published.trimmed.values())
        done += records.num_rows
        progress(done)
    return Copied(appended=appended, repeated=repeated)


def _publish(log: Log, spec: CategorySpec, records: pa.Table, *, producer: str, epoch: int) -> Published:
    batches = split_by_partition(records, spec)
    return log.publish(spec.name, producer=producer, epoch=epoch, batches=batches, gapless=False)


def close_input(log: Log, category: str, *, producer: str, epoch: int, now_ms: Millis) -> None:
    """Report that this injector of a category has sent everything, so that the watermark can advance."""
    log.register_producer(category, producer)
    log.report_low(category, producer=producer, epoch=epoch, low=LOW_MAX, now_ms=now_ms)


def copy_category(
    log: Log, source: str, target: str, *, epoch: int, progress: Progress = lambda done: None
) -> Copied:
    """Copy all records that `source` has now, each once, in the order of its partitions."""
    from_, to = log.describe(source), log.describe(target)
    _check_alike(from_, to)
    appended = repeated = done = 0
    spans = zip(log.start_offsets(source), log.end_offsets(source), strict=True)
    for partition, (first, end) in enumerate(spans):
        producer = f"copy:{from_.birth}:{partition}"
        log.fence(target, producer, epoch)
        sent = max(log.published_to(target, producer).values(), default=0)
        # On some buses an interrupted publish may have written some partitions: repeat the whole window.
        start = max(first, sent // BATCH_ROWS * BATCH_ROWS)
        repeated, done = repeated + start - first, done + start - first
        while start < end:
            stop = min(end, start + BATCH_ROWS)
            for records in _pieces(log, source, partition, start, stop, to):
                published = _publish(log, to.spec, records, producer=producer, epoch=epoch)
                appended += sum(published.appended.values())
                repeated += sum(published.trimmed.values())
                done += records.num_rows
                progress(done)
            start = stop
    return Copied(appended=appended, repeated=repeated)


def export_lines(
    log: Log, category: str, path: Path, *, resume: bool, progress: Progress = lambda done: None
) -> Copied:
    """Write all records that a category has now as lines of a file. `resume`: append missing ones."""
    found = log.describe(category)
    ends = log.end_offsets(category)
    lines, seen = _seen_offsets(path, len(ends)) if resume and path.exists() else (0, [0] * len(ends))
    starts = [max(pair) for pair in zip(seen, log.start_offsets(category), strict=True)]
    written = 0
    with _Writing(path), path.open("ab" if resume else "xb") as file:
        for partition, end in enumerate(ends):
            for offsets, batch in log.scan(category, partition, starts[partition], end):
                for line in lines_of(batch, found.spec, partition=partition, offsets=offsets):
                    file.write(line + b"\n")
                written += batch.num_rows
                progress(written)
        file.flush()
        os.fsync(file.fileno())
    return Copied(appended=written, repeated=lines)


def export_parquet(log: Log, category: str, path: Path, *, progress: Progress = lambda done: None) -> Copied:
    """Write all records that a category has now as one Parquet file, atomically."""
    found, written = log.describe(category), 0
    if path.exists():
        raise _exists(path)
    system = [pa.field("_partition", pa.int32()), pa.field("_offset", pa.int64())]
    schema = pa.schema([*system, *found.spec.schema()])
    unfinished = path.with_name(f".{path.name}.unfinished")
    with _Writing(unfinished):
        try:
            with pq.ParquetWriter(unfinished, schema) as writer:
                spans = zip(log.start_offsets(category), log.end_offsets(category), strict=True)
                for partition, (start, end) in enumerate(spans):
                    for offsets, batch in log.scan(category, partition, start, end):
                        places = [
                            pa.repeat(pa.scalar(partition, pa.int32()), batch.num_rows),
                            pa.array(offsets, pa.int64()),
                        ]
                        writer.write_batch(
                            pa.RecordBatch.from_arrays([*places, *batch.columns], schema=schema)
                        )
                        written += batch.num_rows
                        progress(written)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    return Copied(appended=written, repeated=0)


def import_parquet(
    log: Log, path: Path, category: str, *, producer: str, epoch: int, progress: Progress = lambda done: None
) -> Copied:
    """Publish every row of a Parquet file; its columns are those of `export_parquet`."""
    spec = log.describe(category).spec
    try:
        file = pq.ParquetFile(path)
        found = file.schema_arrow
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{path} cannot be read", why=str(error), fix="name a Parquet file") from error
    wanted = [name for name in spec.schema().names if name != "_seq"]
    if spec.headers and "_headers" not in found.names:
        wanted.remove("_headers")
    lacking = [name for name in wanted if name not in found.names]
    if "_headers" in found.names and not spec.headers:
        raise _without_headers(str(path), category)
    if lacking:
        raise ConfigError(
            f"{path} does not fit category {category!r}",
            why=f"it lacks the columns {', '.join(lacking)}; it has {', '.join(found.names)}",
            fix="copy a file that was exported from a category with the same columns",
        )
    log.fence(category, producer, epoch)
    appended = repeated = done = 0
    for batch in file.iter_batches(BATCH_ROWS, columns=wanted):
        rows = batch.num_rows
        places = list(range(done + 1, done + rows + 1))
        records = pa.table(
            {
                "_seq": pa.array(places, pa.int64()),
                **{name: batch.column(name) for name in wanted},
                "_partition": target_partitions(
                    batch.column("_key").cast(pa.string()), places, spec.partitions
                ),
            }
        )
        published = log.publish(
            category,
            producer=producer,
            epoch=epoch,
            batches=split_by_partition(records, spec),
            gapless=False,
        )
        appended += sum(published.appended.values())
        repeated += sum(published.trimmed.values())
        done += rows
        progress(done)
    return Copied(appended=appended, repeated=repeated)


def content_hash(file: BinaryIO) -> str:
    """A hash of a file's content; rewinds the file."""
    file.seek(0)
    digest = hashlib.sha256()
    while piece := file.read(2**20):
        digest.update(piece)
    file.seek(0)
    return digest.hexdigest()[:16]


def _check_lines(file: BinaryIO, rules: LineRules, name: str) -> None:
    shown: list[BadLine] = []
    count = 0
    for lines in _chunks(file):
        bad = parse_lines(lines, rules).bad
        shown += bad[: BAD_SHOWN_MAX - len(shown)]
        count += len(bad)
    if count:
        raise BadLines(name, tuple(shown), count)


def _chunks(file: BinaryIO) -> Iterator[list[tuple[int, bytes]]]:
    """Lines with their numbers, in chunks; empty lines are skipped, too long ones truncated."""
    chunk: list[tuple[int, bytes]] = []
    size = number = 0
    while line := file.readline(LINE_BYTES_MAX + 2):
        number += 1
        if not line.endswith(b"\n") and len(line) > LINE_BYTES_MAX:
            while (rest := file.readline(LINE_BYTES_MAX)) and not rest.endswith(b"\n"):
                pass
        text = line.rstrip(b"\r\n")
        if text.strip():
            chunk.append((number, text))
            size += len(text)
        if len(chunk) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _pieces(log: Log, source: str, partition: int, start: int, stop: int, to: Category) -> Iterator[pa.Table]:
    """The records [start, stop) with their sequences in the target, in pieces for one publish each."""
    for offsets, batch in log.scan(source, partition, start, stop):
        rows = max(1, int(batch.num_rows * BATCH_BYTES / max(batch.nbytes, BATCH_BYTES)))
        for first in range(0, batch.num_rows, rows):
            piece = batch.slice(first, rows)
            count = piece.num_rows
            sequences = pa.array(offsets[first : first + count] + 1, pa.int64())
            targets = target_partitions(piece.column("_key"), [partition] * count, to.spec.partitions)
            table = pa.Table.from_batches([piece])
            yield table.set_column(table.column_names.index("_seq"), "_seq", sequences).append_column(
                "_partition", targets
            )


def _check_alike(source: Category, target: Category) -> None:
    if source.birth == target.birth:
        raise ConfigError(
            f"{source.spec.name!r} would be copied onto itself",
            why="every record would be duplicated",
            fix="name another target",
        )
    one, other = source.spec, target.spec
    if (one.format, one.columns) != (other.format, other.columns):
        raise ConfigError(
            f"{one.name!r} cannot be copied to {other.name!r}",
            why=f"one is {one.format} with {_columns(one.columns)}, the other {other.format} with "
            f"{_columns(other.columns)}",
            fix="create the target with the same format and columns, or convert with a pipeline",
        )
    if one.headers and not other.headers:
        raise _without_headers(one.name, other.name)


def _without_headers(source: str, target: str) -> ConfigError:
    return ConfigError(
        f"{source!r} cannot be copied to {target!r}",
        why="its records have headers, but the target was created without, so they would be lost",
        fix="create the target with headers",
    )


def _columns(columns: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns)


def _seen_offsets(path: Path, partitions: int) -> tuple[int, list[int]]:
    """How many lines a file that was broken off has, and where it goes on; a half-written last line is cut
    away. Offsets ascend, but need not be without gaps.
    """
    lines, seen = 0, [0] * partitions
    with path.open("r+b") as file:
        whole = 0
        while line := file.readline():
            if not line.endswith(b"\n"):
                break
            try:
                record = msgspec.json.decode(line)
                partition, offset = record["partition"], record["offset"]
                is_next = 0 <= partition < partitions and offset >= seen[partition]
            except (msgspec.MsgspecError, UnicodeError, KeyError, TypeError) as error:
                raise _not_ours(path, f"it has a line that is not a record: {error}") from error
            if not is_next:
                raise _not_ours(
                    path, f"partition {partition}, offset {offset} does not follow the one before"
                )
            seen[partition] = offset + 1
            lines, whole = lines + 1, whole + len(line)
        file.truncate(whole)
    return lines, seen


def _not_ours(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} cannot be resumed", why=why, fix="name another file, or remove this one")


def _exists(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is there already",
        why="it would be overwritten",
        fix="name another file, remove this one, or append to it (--resume, lines only)",
    )


class _Writing:
    """Translates errors of a file that is written into PenstockErrors."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileExistsError):
            raise _exists(self._path) from error
        if isinstance(error, OSError):
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise (DiskFull if is_full else EnvironmentProblem)(
                f"cannot write {self._path}",
                why=str(error),
                fix="check the folder's permissions and the disk's free space",
            ) from error
