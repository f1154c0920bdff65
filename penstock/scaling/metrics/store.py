"""Stores two weeks of per-minute metrics of every job in the control plane's database (docs/decisions/0025).

A minute is written once for all jobs, one row per 128 jobs. Every four hours minutes are sealed: packed into
one row per job, metric and day, and their own rows are deleted in the same transaction.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa
import structlog
from numpy.typing import NDArray

from penstock.core.clock import Millis
from penstock.core.errors import CorruptData, PenstockError
from penstock.db.database import METADATA, NAME, Database, next_values, upsert
from penstock.fleet.messages import TaskReport
from penstock.scaling.metrics.frames import METRICS, MINUTE_MS
from penstock.scaling.metrics.minutes import (
    BITS,
    COLUMNS,
    DAY,
    UNKNOWN,
    Codes,
    Minute,
    MinuteAggregator,
    encode,
    pack,
    pack_minute,
    unpack,
    unpack_minute,
)

CHUNK = 128  # jobs whose minutes are stored in one row
RING = 320  # minutes; more than are ever unsealed, see `MetricStore`


class RecentMinutes:
    """Cache of the newest minutes of every job: a ring buffer per job and metric."""

    def __init__(self) -> None:
        self._chunks: dict[int, Codes] = {}
        self._lock = threading.Lock()
        self._first: int | None = None  # the cache is complete from this minute on
        self._newest = -1

    @property
    def newest(self) -> int:
        """The last minute in the cache; -1: none."""
        return self._newest

    @property
    def first(self) -> int | None:
        """The first minute in the cache; None: it is empty."""
        return self._first

    def begin(self, minute: int) -> None:
        """Clear the cache; all minutes from this one on will be put."""
        with self._lock:
            self._chunks.clear()
            self._first, self._newest = minute, minute - 1

    def put(
        self,
        minute: int,
        chunk: int,
        slots: NDArray[np.intp],
        columns: NDArray[np.intp],
        codes: Codes,
    ) -> None:
        """One minute of some jobs of one chunk. Requires: `advance` was called with it."""
        with self._lock:
            if self._first is None or not self._first <= minute <= self._newest:
                return
            ring = self._chunks.get(chunk)
            if ring is None:
                # The operating system allocates pages of zeroes only when they are written.
                ring = self._chunks[chunk] = np.zeros((CHUNK, len(METRICS), RING), np.uint16)
            ring[slots[:, None], columns[None, :], minute % RING] = codes

    def advance(self, minute: int) -> None:
        """Make room for a minute, which overwrites the oldest one."""
        with self._lock:
            if self._first is None or minute < self._first or minute - self._newest >= RING:
                # The clock was set far back or ahead: the cached minutes are of no use.
                self._chunks.clear()
                self._first, self._newest = minute, minute
                return
            for passed in range(self._newest + 1, minute + 1):
                for ring in self._chunks.values():
                    ring[:, :, passed % RING] = 0
            if minute > self._newest:
                self._newest = minute
                self._first = max(self._first, minute - RING + 1)

    def cut(self, minute: int) -> None:
        """Delete all minutes after this one: the clock was set back."""
        with self._lock:
            if self._first is None or minute >= self._newest:
                return
            for later in range(max(minute + 1, self._newest - RING + 1), self._newest + 1):
                for ring in self._chunks.values():
                    ring[:, :, later % RING] = 0
            self._newest = minute
            self._first = min(self._first, minute + 1)

    def forget(self, number: int) -> None:
        """Delete a removed job's minutes."""
        with self._lock:
            ring = self._chunks.get(number // CHUNK)
            if ring is not None:
                ring[number % CHUNK] = 0

    def has(self, number: int) -> bool:
        """Whether the cache has any value of a job."""
        ring = self._chunks.get(number // CHUNK)
        return ring is not None and bool(ring[number % CHUNK].any())

    def read(self, numbers: Sequence[int], columns: Sequence[int], first: int, minutes: int) -> Codes:
        """`codes[job, metric, minute]`; UNKNOWN for minutes outside the cache."""
        found = np.zeros((len(numbers), len(columns), minutes), np.uint16)
        by_chunk: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            by_chunk.setdefault(number // CHUNK, []).append(place)
        wanted = np.array(columns, np.intp)
        with self._lock:
            if self._first is None:
                return found
            start, stop = max(first, self._first), min(first + minutes, self._newest + 1)
            if stop <= start:
                return found
            times, target = np.arange(start, stop) % RING, slice(start - first, stop - first)
            for chunk, members in by_chunk.items():
                ring = self._chunks.get(chunk)
                if ring is not None:
                    slots = np.array([numbers[place] % CHUNK for place in members], np.intp)
                    found[members, :, target] = ring[slots[:, None], wanted[None, :]][:, :, times]
        return found


log = structlog.get_logger(__name__)

KEEP_DAYS = 14
SEAL_EVERY = 240  # minutes
OPEN_MIN = 60  # newest minutes that are never sealed: they are rewritten if the clock is set back a little
COUNTER = "metric_names"
JOB, METRIC = "job", "metric"

NAMES = sa.Table(
    "metric_names",
    METADATA,
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("name", NAME, primary_key=True),
    sa.Column("number", sa.Integer, nullable=False),
)
MINUTES = sa.Table(
    "metric_minutes",
    METADATA,
    sa.Column("minute", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("chunk", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("points", sa.LargeBinary, nullable=False),
)
BLOCKS = sa.Table(
    "metric_blocks",
    METADATA,
    sa.Column("job", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("metric", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("points", sa.LargeBinary, nullable=False),
)

_BLOCKS = sa.select(BLOCKS.c.day, BLOCKS.c.points).where(
    BLOCKS.c.job == sa.bindparam("of_job", type_=sa.Integer),
    BLOCKS.c.metric == sa.bindparam("of_metric", type_=sa.Integer),
    BLOCKS.c.day >= sa.bindparam("first_day", type_=sa.Integer),
    BLOCKS.c.day <= sa.bindparam("last_day", type_=sa.Integer),
)


@dataclass(frozen=True, slots=True)
class _Part:
    """One minute of the jobs of one chunk: `codes[job, metric]`."""

    minute: int
    chunk: int
    slots: NDArray[np.intp]
    used: NDArray[np.intp]  # indexes in METRICS
    codes: Codes

    def row(self, columns: Mapping[str, int]) -> dict[str, Any]:
        order = list(METRICS)
        numbers = [columns[order[place]] for place in self.used]
        packed = pack_minute(self.slots.tolist(), numbers, self.codes)
        return {"minute": self.minute, "chunk": self.chunk, "points": packed}


class MetricStore:
    """Per-minute metrics of jobs. Any number of instances may read; one records at a time. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database, self._lock = database, threading.RLock()
        self.recent = RecentMinutes()
        self._numbers: dict[str, int] = {}
        self._columns: dict[str, int] = {}  # numbers of metrics in the database
        self._synced_to = -1  # the newest minute read or written
        self._swept: tuple[int, int] = (-1, 0)  # the day of the current sweep, and its next chunk
        self.refresh()

    # -- writing ----------------------------------------------------------------------------------------

    def put(self, *minutes: Minute) -> None:
        """Record minutes of all jobs in one transaction. Known values of a minute replace older ones."""
        with self._lock:
            with self._database.transaction() as connection:
                names = list(dict.fromkeys(job for minute in minutes for job in minute.jobs))
                known = _named(connection, JOB, names, self._numbers)
                columns = _named(connection, METRIC, tuple(METRICS), self._columns)
                parts = [part for minute in minutes for part in self._parts(minute, known)]
                first = min(minute.minute for minute in minutes)
                # Replace these minutes, and later ones written with a clock that was ahead.
                connection.execute(sa.delete(MINUTES).where(MINUTES.c.minute >= first))
                upsert(connection, MINUTES, [part.row(columns) for part in parts], replace=("points",))
            self._numbers, self._columns = known, columns
            self.recent.cut(first - 1)
            for minute in minutes:
                self.recent.advance(minute.minute)
            for part in parts:
                self.recent.put(part.minute, part.chunk, part.slots, part.used, part.codes)
            self._synced_to = minutes[-1].minute

    def _parts(self, minute: Minute, known: Mapping[str, int]) -> Iterator[_Part]:
        """Split a minute into chunks of jobs. Unknown values stay as recorded before."""
        codes = encode(minute.values, BITS)
        numbers = np.array([known[job] for job in minute.jobs], np.intp)
        if minute.minute <= self.recent.newest:
            before = self.recent.read(numbers.tolist(), range(len(METRICS)), minute.minute, 1)[:, :, 0]
            codes = np.where(codes == UNKNOWN, before, codes)
        used = np.flatnonzero((codes != UNKNOWN).any(axis=0))
        for chunk, members in _by_chunk(numbers):
            slots = numbers[members] % CHUNK
            yield _Part(minute.minute, chunk, slots, used, codes[members[:, None], used[None, :]])

    def seal(self, now_minute: int) -> bool:
        """Pack the old minutes of one chunk of jobs. False: nothing to seal."""
        before = (now_minute - OPEN_MIN) // SEAL_EVERY * SEAL_EVERY
        with self._database.reading() as connection:
            oldest = connection.execute(
                sa.select(MINUTES.c.chunk)
                .where(MINUTES.c.minute < before)
                .order_by(MINUTES.c.minute)
                .limit(1)
            ).first()
            if oldest is None:
                return False
            is_it = (MINUTES.c.chunk == oldest[0]) & (MINUTES.c.minute < before)
            rows = [(int(minute), bytes(points)) for minute, points in connection.execute(
                sa.select(MINUTES.c.minute, MINUTES.c.points).where(is_it).order_by(MINUTES.c.minute)
            )]  # fmt: skip
        sealed = [
            row
            for day in sorted({minute // DAY for minute, _ in rows})
            for row in self._day_blocks(day, int(oldest[0]), [row for row in rows if row[0] // DAY == day])
        ]
        with self._database.transaction() as connection:
            upsert(connection, BLOCKS, sealed, replace=("points",))
            connection.execute(sa.delete(MINUTES).where(is_it))
        return True

    def _day_blocks(
        self, day: int, chunk: int, rows: Sequence[tuple[int, bytes]]
    ) -> Iterator[dict[str, object]]:
        """The blocks of one day and chunk, updated with these minutes."""
        gathered: dict[tuple[int, int], Codes] = {}
        parts = [
            (minute % DAY, *found)
            for minute, points in rows
            if (found := _unpacked(minute, points)) is not None
        ]
        metrics = sorted({int(column) for _, _, columns, _ in parts for column in columns})
        whole = np.zeros((CHUNK, len(metrics), DAY), np.uint16)
        is_recorded = np.zeros((CHUNK, DAY), np.bool_)
        for place, slots, columns, codes in parts:
            whole[slots[:, None], np.searchsorted(metrics, columns)[None, :], place] = codes
            is_recorded[slots, place] = True
        for slot in np.flatnonzero(is_recorded.any(axis=1)):
            for index, metric in enumerate(metrics):
                if whole[slot, index].any():
                    gathered[chunk * CHUNK + int(slot), metric] = whole[slot, index]
        old = self._readable_blocks(list(gathered), day)
        for (job, metric), codes in gathered.items():
            if (job, metric) in old:
                codes = np.where(is_recorded[job % CHUNK], codes, old[job, metric])
            yield {"job": job, "metric": metric, "day": day, "points": pack(codes)}

    def _readable_blocks(self, keys: Sequence[tuple[int, int]], day: int) -> dict[tuple[int, int], Codes]:
        """One day of some jobs and metrics; damaged blocks are dropped, so that the others can be sealed."""
        try:
            return {key: codes[0] for key, (_, codes) in self._read_blocks(keys, day, day).items()}
        except CorruptData as error:
            if len(keys) == 1:
                log.warning("a day of a metric is lost", number=keys[0][0], day=day, error=error.why)
                return {}
        return {key: codes for one in keys for key, codes in self._readable_blocks([one], day).items()}

    def sweep(self, now_minute: int) -> bool:
        """Delete minutes older than two weeks of one chunk of jobs. False: nothing left to do today."""
        today = now_minute // DAY
        if self._swept[0] != today:
            self._swept = (today, 0)
        chunk = self._swept[1]
        with self._lock:
            if chunk * CHUNK > max(self._numbers.values(), default=-1):
                return False
            self._swept = (today, chunk + 1)
            first, end = chunk * CHUNK, (chunk + 1) * CHUNK
            is_mine = (BLOCKS.c.job >= first) & (BLOCKS.c.job < end)
            with self._database.transaction() as connection:
                connection.execute(sa.delete(BLOCKS).where(is_mine & (BLOCKS.c.day < today - KEEP_DAYS)))
                left = {
                    int(row[0])
                    for row in connection.execute(sa.select(BLOCKS.c.job).where(is_mine).distinct())
                }
                gone = [
                    (name, number)
                    for name, number in self._numbers.items()
                    if first <= number < end and number not in left and not self.recent.has(number)
                ]
                for name, _ in gone:
                    connection.execute(sa.delete(NAMES).where(NAMES.c.kind == JOB, NAMES.c.name == name))
            for name, _ in gone:
                del self._numbers[name]
        return True

    # -- reading ----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read minutes that other instances recorded, or this one before its restart."""
        with self._lock:
            with self._database.reading() as connection:
                newest = connection.execute(sa.select(sa.func.max(MINUTES.c.minute))).scalar()
                if newest is None or newest == self._synced_to:
                    return
                is_new = MINUTES.c.minute > self._synced_to
                oldest = connection.execute(sa.select(sa.func.min(MINUTES.c.minute)).where(is_new)).scalar()
                names = connection.execute(sa.select(NAMES.c.kind, NAMES.c.name, NAMES.c.number)).all()
                # After a gap or a clock set back read all minutes: those in between may be sealed by now.
                since = self._synced_to if oldest == self._synced_to + 1 else -1
                rows = connection.execute(
                    sa.select(MINUTES.c.minute, MINUTES.c.chunk, MINUTES.c.points)
                    .where(MINUTES.c.minute > since)
                    .order_by(MINUTES.c.minute)
                ).all()
            self._numbers = {str(name): int(number) for kind, name, number in names if kind == JOB}
            self._columns = {str(name): int(number) for kind, name, number in names if kind == METRIC}
            if since < 0:
                self.recent.begin(int(rows[0][0]))
            self._take_in(rows)
            self._synced_to = int(rows[-1][0])

    def _take_in(self, rows: Sequence[Any]) -> None:
        own = {self._columns[name]: place for place, name in enumerate(METRICS) if name in self._columns}
        for minute, chunk, points in rows:
            self.recent.advance(int(minute))
            found = _unpacked(int(minute), bytes(points))
            if found is None:
                continue
            slots, columns, codes = found
            known = [place for place, column in enumerate(columns.tolist()) if column in own]
            here = np.array([own[int(columns[place])] for place in known], np.intp)
            self.recent.put(int(minute), int(chunk), slots, here, codes[:, known])

    def knows(self, job: str) -> bool:
        """Whether the store has metrics of a job."""
        return job in self._numbers

    def codes(self, jobs: Sequence[str], metrics: Sequence[str], first: int, minutes: int) -> Codes:
        """`codes[job, metric, minute]`; missing ones are UNKNOWN."""
        numbers = [self._numbers.get(job, -1) for job in jobs]
        begin = self.recent.first
        found = self.recent.read(numbers, [COLUMNS[name] for name in metrics], first, minutes)
        sealed = minutes if begin is None else min(begin - first, minutes)
        if sealed > 0:
            found[:, :, :sealed] = self._sealed(numbers, metrics, first, sealed)
        return found

    def _sealed(self, numbers: Sequence[int], metrics: Sequence[str], first: int, minutes: int) -> Codes:
        first_day, last_day = first // DAY, (first + minutes - 1) // DAY
        days = last_day - first_day + 1
        found = np.zeros((len(numbers), len(metrics), days, DAY), np.uint16)
        columns = [self._columns.get(name) for name in metrics]
        where = {
            (number, column): (i, j)
            for i, number in enumerate(numbers)
            for j, column in enumerate(columns)
            if number >= 0 and column is not None
        }
        for key, (held, codes) in self._read_blocks(list(where), first_day, last_day).items():
            found[(*where[key], held - first_day)] = codes
        start = first - first_day * DAY
        return found.reshape(len(numbers), len(metrics), days * DAY)[:, :, start : start + minutes]

    def _read_blocks(
        self, keys: Sequence[tuple[int, int]], first_day: int, last_day: int
    ) -> dict[tuple[int, int], tuple[NDArray[np.intp], Codes]]:
        """By job and metric: the stored days, and their codes, a row per day."""
        if not keys:
            return {}
        span = {"first_day": first_day, "last_day": last_day}
        found = {}
        with self._database.reading() as connection:
            for job, metric in keys:
                rows = connection.execute(_BLOCKS, {"of_job": job, "of_metric": metric, **span}).all()
                if rows:
                    days = np.array([row[0] for row in rows], np.intp)
                    found[job, metric] = days, unpack([bytes(row[1]) for row in rows], DAY)
        return found


def _unpacked(minute: int, points: bytes) -> tuple[NDArray[np.intp], NDArray[np.intp], Codes] | None:
    """Unpack a minute of a chunk; None if it is damaged, so that the others can be read."""
    try:
        return unpack_minute(points)
    except CorruptData as error:
        log.warning("a minute of metrics is lost", minute=minute, error=error.why)
        return None


def _by_chunk(numbers: NDArray[np.intp]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """The indexes of the numbers in each chunk."""
    chunks = numbers // CHUNK
    for chunk in np.unique(chunks):
        yield int(chunk), np.flatnonzero(chunks == chunk)


def _named(
    connection: sa.Connection, kind: str, names: Sequence[str], known: Mapping[str, int]
) -> dict[str, int]:
    """The numbers of all names of a kind; new names get numbers that were never used before."""
    if all(name in known for name in names):
        return dict(known)
    found = connection.execute(sa.select(NAMES.c.name, NAMES.c.number).where(NAMES.c.kind == kind))
    numbers = {str(name): int(number) for name, number in found}
    new = [name for name in dict.fromkeys(names) if name not in numbers]
    if new:
        given = [number - 1 for number in next_values(connection, f"{COUNTER}_{kind}", len(new))]
        rows = [{"kind": kind, "name": name, "number": n} for name, n in zip(new, given, strict=True)]
        connection.execute(sa.insert(NAMES), rows)
        numbers.update(zip(new, given, strict=True))
    return numbers


WAITING_MAX = 60  # minutes buffered while the store is unavailable


class MetricRecorder:
    """Aggregates the reports of all tasks and writes each ended minute. One instance records at a time."""

    def __init__(self, store: MetricStore) -> None:
        self._store, self._book = store, MinuteAggregator()
        self._waiting: deque[Minute] = deque(maxlen=WAITING_MAX)
        self._is_recording = False

    def tick(
        self,
        now_ms: Millis,
        task_counts: Mapping[str, tuple[int, int]],
        reports: Mapping[str, Sequence[TaskReport]],
    ) -> None:
        """Add reports and write ended minutes. After a failed write the next tick tries again."""
        if not self._is_recording:
            self._store.refresh()  # another instance may have recorded until now
            self._is_recording = True
        self._append(self._book.observe(now_ms, task_counts, reports))
        self._write()
        # One chunk per tick, so that other writes do not wait for long.
        minute = now_ms // MINUTE_MS
        if not self._store.seal(minute):
            self._store.sweep(minute)

    def stand_by(self) -> None:
        """Another instance records: read what it writes."""
        if self._is_recording:
            self._book, self._is_recording = MinuteAggregator(), False
            self._waiting.clear()
        self._store.refresh()

    def stop(self) -> None:
        """Write the open minute so far; after a quick restart the rest is added."""
        self._append(self._book.close() if self._is_recording else None)
        try:
            self._write()
        except PenstockError as error:
            log.warning("the last minute of metrics is not recorded", error=error.what)

    def _append(self, ended: Minute | None) -> None:
        while ended is not None and self._waiting and self._waiting[-1].minute >= ended.minute:
            self._waiting.pop()  # the clock was set back
        if ended is not None:
            self._waiting.append(ended)

    def _write(self) -> None:
        if self._waiting:
            self._store.put(*self._waiting)
            self._waiting.clear()
