"""The file injector of MillWheel's Figure 10: publishes the lines of growing files, once each, with a low
watermark from the oldest unsent line.

The sequence of a line is the byte position after it, with one producer per file: after a crash the next
process reads from the bus how much of each file was published. Files must only be appended to, and keep their
names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, EnvironmentProblem
from penstock.streams.bus.log import LOW_MAX, LOW_MIN, CategorySpec, Log
from penstock.streams.dsl.injector import SkewLimit
from penstock.streams.inspect.record_lines import LINE_BYTES_MAX, LineRules, parse_lines, split_by_partition

BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileProgress:
    """The progress of one file: `last` is the newest sent event time, `next` that of the first unsent line;
    None: there is none. `is_open`: it has unsent lines (`next` is None if none of them has an event time).
    """

    last: Millis | None = None
    next: Millis | None = None
    is_open: bool = False


def low_watermark_of(places: Sequence[FileProgress]) -> Millis | None:
    """The low watermark of files in order; None: unknown. Pure.

    A file with unsent lines holds it at the first of them. The newest file, if it is at its end, holds it at
    its last line. Older files at their end do not hold it.
    """
    if any(place.is_open and place.next is None for place in places):
        return None
    lows = [place.next for place in places if place.next is not None]
    newest = places[-1] if places else FileProgress()
    if newest.next is None and newest.last is not None:
        lows.append(newest.last)
    return min(lows, default=None)


@dataclass(slots=True)
class _File:
    position: int  # all bytes before it are on the bus
    last: Millis | None = None
    records: pa.Table | None = None  # the next records to send
    first: Millis | None = None  # the first event time among them
    end: int = 0  # the position after them

    def progress(self) -> FileProgress:
        return FileProgress(last=self.last, next=self.first, is_open=self.records is not None)


class FileInjector:
    """One process that injects files. `epoch` must grow at every start with the same name."""

    def __init__(
        self, log: Log, rules: LineRules, name: str, *, epoch: int, limit: SkewLimit | None = None
    ) -> None:
        self._log, self._rules, self._name, self._epoch, self._limit = log, rules, name, epoch, limit
        self._category = rules.spec.name
        self._files: dict[Path, _File] = {}
        log.register_producer(self._category, name)
        log.fence(self._category, name, epoch)

    def round(self, paths: Iterable[Path], *, now_ms: Millis, is_last: bool = False) -> int:
        """Send the new lines of these files, in order; returns their number. A crash at any point is safe.

        `is_last`: the files are complete, so the last line needs no line break.
        """
        order, sent = sorted(set(paths)), 0
        for path in order:
            if path not in self._files:
                self._files[path] = self._resume(path)
            self._read_ahead(path, now_ms, is_last)
        for path in order:
            file = self._files[path]
            while file.records is not None:
                self._report(order, now_ms)
                sent += self._send(path, file)
                self._read_ahead(path, now_ms, is_last)
        self._report(order, now_ms)
        return sent

    def close(self, *, now_ms: Millis) -> None:
        """End the input: all files were sent."""
        self._report_low(LOW_MAX, now_ms)

    def _resume(self, path: Path) -> _File:
        """Continue after the largest published position: a publish is atomic."""
        producer = self._producer(path)
        self._log.fence(self._category, producer, self._epoch)
        position = max(self._log.published_to(self._category, producer).values(), default=0)
        return _File(position)

    def _producer(self, path: Path) -> str:
        return f"{self._name}/{path.absolute()}"

    def _read_ahead(self, path: Path, now_ms: Millis, is_last: bool) -> None:
        file = self._files[path]
        if file.records is not None or not self._has_grown(path, file.position):
            return
        lines, file.end = _next_lines(path, file.position, is_last)
        if lines:
            file.records, file.first = self._records(lines, path, now_ms)

    def _has_grown(self, path: Path, position: int) -> bool:
        size = _size(path)
        if size < position:
            raise ConfigError(
                f"{path} is shorter than the part that was sent already",
                why=f"it has {size} bytes, but {position} are on the bus: it was truncated or replaced",
                fix="use a new name for a new file, or inject with another --name",
            )
        return size > position

    def _send(self, path: Path, file: _File) -> int:
        records = file.records
        assert records is not None
        if self._limit is not None and file.first is not None:
            self._limit.wait(file.first)
        self._log.publish(
            self._category,
            producer=self._producer(path),
            epoch=self._epoch,
            batches=split_by_partition(records, self._rules.spec),
            gapless=False,
        )
        if file.first is not None:
            file.last = max(file.first, file.last or file.first, pc.max(records.column("_ts")).as_py())
        file.position, file.records, file.first = file.end, None, None
        return int(records.num_rows)

    def _records(
        self, lines: list[tuple[int, bytes]], path: Path, now_ms: Millis
    ) -> tuple[pa.Table, Millis | None]:
        """Lines as records, and the first event time among them. Unreadable lines are published too if the
        format is JSON: they become dead letters.
        """
        spec = self._rules.spec
        parsed = parse_lines(lines, replace(self._rules, now_ms=now_ms))
        good = parsed.records
        first = good.column("_ts")[0].as_py() if good.num_rows else None
        if not parsed.bad:
            return good, first
        if spec.format != "json":
            raise ConfigError(
                f"a line of {path} is not a valid record of {self._category!r}",
                why=f"the line that ends at byte {parsed.bad[0].number}: {parsed.bad[0].reason}",
                fix="correct the line and start again: lines before it are not sent twice",
            )
        numbers = {bad.number for bad in parsed.bad}
        raw = [(number, line) for number, line in lines if number in numbers]
        stamp = LOW_MIN if first is None else first  # their readers do not use it
        both = pa.concat_tables([good, _raw(raw, spec, max(stamp, 0), good.schema)])
        return both.sort_by("_seq"), first

    def _report(self, order: Sequence[Path], now_ms: Millis) -> None:
        low = low_watermark_of([self._files[path].progress() for path in order])
        if low is not None and self._rules.spec.watermark == "injector":
            self._report_low(low - self._rules.spec.lateness_ms, now_ms)

    def _report_low(self, low: Millis, now_ms: Millis) -> None:
        self._log.report_low(self._category, producer=self._name, epoch=self._epoch, low=low, now_ms=now_ms)


def _next_lines(path: Path, position: int, is_last: bool) -> tuple[list[tuple[int, bytes]], int]:
    """The next complete lines with the positions after them, and the position after all that was read."""
    lines: list[tuple[int, bytes]] = []
    start = position
    with _opened(path) as file:
        file.seek(position)
        while position - start < BATCH_BYTES:
            line = file.readline(LINE_BYTES_MAX + 2)
            if not line or not (line.endswith(b"\n") or is_last or len(line) > LINE_BYTES_MAX):
                break  # the line is not complete yet
            position += len(line)
            if line.strip():
                lines.append((position, line.rstrip(b"\r\n")))
    return lines, position


def find_files(given: Iterable[Path]) -> list[Path]:
    """The given files, and the files in given folders, by name."""
    found: list[Path] = []
    for path in given:
        found += sorted(item for item in path.iterdir() if item.is_file()) if path.is_dir() else [path]
    return list(dict.fromkeys(found))


def _raw(lines: list[tuple[int, bytes]], spec: CategorySpec, stamp: Millis, schema: pa.Schema) -> pa.Table:
    count = len(lines)
    columns = {
        "_seq": pa.array([number for number, _ in lines], pa.int64()),
        "_ts": pa.array([stamp] * count, pa.int64()),
        "_key": pa.nulls(count, pa.string()),
        "_late": pa.array([False] * count, pa.bool_()),
        "_value": pa.array([line[:LINE_BYTES_MAX] for _, line in lines], pa.binary()),
        "_partition": pa.array([number % spec.partitions for number, _ in lines], pa.int64()),
    }
    arrays = [
        columns[field.name].cast(field.type) if field.name in columns else pa.nulls(count, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(f"cannot read {path}", why=str(error), fix="check the path and its permissions")
