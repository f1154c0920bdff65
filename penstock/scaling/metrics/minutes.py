"""What a job did in each minute, from the reports of its tasks. Pure: no clock, no I/O.

Rates are differences of totals over the time between them, both as the task itself counted and measured.
A total that goes back is a new life, and begins anew. A report that says nothing new adds nothing. What does
not follow within a minute and a half on what was last heard says nothing about its minute. A job one of whose
tasks is silent has no sums: unknown is not zero. Restarts and failures are those of the minute.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, nan

import numpy as np
from numpy.typing import NDArray

from penstock.core.clock import Millis
from penstock.core.errors import CorruptData
from penstock.fleet.messages import OUT_OF_MEMORY, TaskReport
from penstock.scaling.metrics.frames import METRICS, MINUTE_MS, Points

GAP_MAX_MS = 90_000.0
# A rate must stand on at least so much of its minute.
COVERED_MIN_MS = 10_000.0
# Busy for so much of the time without having read anything: a batch is under way.
BATCH_BUSY_MIN = 0.9
_ORDER = {name: place for place, name in enumerate(METRICS)}

# (clock, which life, totals): each total is known with the clock it was read by.
_FAMILIES = (
    ("at_ms", "started_ms", ("read_total", "written_total", "busy_ms_total", "there_total")),
    ("cpu_at_ms", "cpu_started_ms", ("cpu_ms_total",)),
)
# Rates of a job: the total they come from, and how much of it is one.
_RATES = {
    "processed_rate": ("read_total", 1.0),
    "output_rate": ("written_total", 1.0),
    "ingest_rate": ("there_total", 1.0),
    "cpu": ("cpu_ms_total", 1000.0),
}
# What a task was last seen with, or at most, in a minute.
_LAST = ("lag_records", "lag_bytes", "lag_s", "key_count", "state_bytes", "watermark_lag_s")
_MOST = ("memory_mb", "disk_mb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Minute:
    """One minute of all jobs: `values[job, metric]`, metrics as METRICS has them, NaN where unknown."""

    minute: int
    jobs: tuple[str, ...]
    values: Points


@dataclass(slots=True)
class _Task:
    """What was last heard of a task, and what its open minute has so far."""

    totals: dict[str, float] = field(default_factory=dict)  # with their clocks and lives
    grown: dict[str, tuple[float, float]] = field(default_factory=dict)  # by total: how much, in how many ms
    gauges: dict[str, float] = field(default_factory=dict)
    counts: tuple[int, int, int] = (0, 0, 0)  # restarts, out of memory, failures: as told
    events: tuple[int, int, int] = (0, 0, 0)  # of them, in this minute
    is_heard: bool = False

    def take(self, report: TaskReport, *, is_new: bool, whole_batches: bool) -> None:
        """Add what a report says to the open minute."""
        told = (report.restarts, report.failures.get(OUT_OF_MEMORY, 0), sum(report.failures.values()))
        if not is_new:
            steps = [now - old if now >= old else now for now, old in zip(told, self.counts, strict=True)]
            self.events = (
                self.events[0] + steps[0],
                self.events[1] + steps[1],
                self.events[2] + steps[2],
            )
        self.counts = told
        if report.state != "running":
            return
        metrics = report.metrics
        if "read_total" in metrics and "lag_records" in metrics:
            # What there is to read, read or not: its growth is what arrived.
            metrics = {**metrics, "there_total": metrics["read_total"] + metrics["lag_records"]}
        waits = whole_batches and self._is_within_batch(metrics)
        for clock, life, names in _FAMILIES[1:] if waits else _FAMILIES:
            self._take_totals(metrics, clock, life, names)
        for name in _LAST:
            if 0 <= metrics.get(name, -1.0) < inf:
                self.gauges[name] = metrics[name]
        for name in _MOST:
            if 0 <= metrics.get(name, -1.0) < inf:
                self.gauges[name] = max(metrics[name], self.gauges.get(name, 0.0))
        self.is_heard = True

    def _is_within_batch(self, metrics: Mapping[str, float]) -> bool:
        """Busy all the time, and nothing was read: what it did counts when the batch is over."""
        grown = {
            name: metrics.get(name, nan) - self.totals.get(name, nan)
            for name in ("at_ms", "started_ms", "read_total", "busy_ms_total")
        }
        is_short = 0 < grown["at_ms"] <= GAP_MAX_MS and grown["started_ms"] == 0
        is_busy = grown["busy_ms_total"] >= BATCH_BUSY_MIN * grown["at_ms"]
        return is_short and is_busy and grown["read_total"] == 0

    def _take_totals(self, metrics: Mapping[str, float], clock: str, life: str, names: Sequence[str]) -> None:
        at_ms, last = metrics.get(clock, nan), self.totals
        passed_ms = at_ms - last.get(clock, nan)
        if passed_ms == 0 and metrics.get(life) == last.get(life):
            return  # heard already
        follows = 0 < passed_ms <= GAP_MAX_MS and metrics.get(life) == last.get(life)
        for name in names:
            now = metrics.get(name, nan)
            step = now - last.get(name, nan)
            if follows and step >= 0 and isfinite(step):
                grown, covered_ms = self.grown.get(name, (0.0, 0.0))
                self.grown[name] = (grown + step, covered_ms + passed_ms)
            if isfinite(now):
                last[name] = now
            else:
                last.pop(name, None)
        if isfinite(at_ms):
            last[clock], last[life] = at_ms, metrics.get(life, nan)
        else:
            last.pop(clock, None)

    def rate(self, total: str, covered_min_ms: float) -> float:
        """Per second, over the open minute."""
        grown, covered_ms = self.grown.get(total, (0.0, 0.0))
        return grown * 1000 / covered_ms if covered_ms >= covered_min_ms else nan

    def next_minute(self) -> None:
        self.grown, self.gauges, self.events, self.is_heard = {}, {}, (0, 0, 0), False


@dataclass(slots=True)
class _Job:
    generation: int
    task_count: int
    tasks: dict[str, _Task] = field(default_factory=dict)

    def row(self, covered_min_ms: float) -> list[float]:
        """Its minute, in the order of METRICS."""
        found: dict[str, float] = {"task_count": float(self.task_count)}
        tasks = list(self.tasks.values())
        for place, name in enumerate(("restarts", "oom", "exceptions")):
            found[name] = float(sum(task.events[place] for task in tasks))
        heard = [task for task in tasks if task.is_heard]
        if len(heard) >= self.task_count:
            for name, (total, one) in _RATES.items():
                found[name] = sum(task.rate(total, covered_min_ms) for task in heard) / one
            busy = [task.rate("busy_ms_total", covered_min_ms) / 1000 for task in heard]
            if all(isfinite(share) for share in busy):
                # A batch counts when it is seen, so that a minute may have a little of the one before it.
                busy = [min(1.0, share) for share in busy]
                found["busy"], found["busy_mean"] = max(busy), sum(busy) / len(busy)
            found.update(_gauges(heard))
        return [found.get(name, nan) for name in METRICS]


def _gauges(tasks: Sequence[_Task]) -> Iterable[tuple[str, float]]:
    """Sums and maxima, of what every task knows."""
    for name in (*_LAST, *_MOST):
        values = [task.gauges[name] for task in tasks if name in task.gauges]
        if len(values) < len(tasks):
            continue
        yield name, sum(values) if METRICS[name].over_tasks == "sum" else max(values)
        if name == "lag_records":
            mean = sum(values) / len(values)
            yield "lag_spread", float(np.std(values)) / mean if mean > 0 else 0.0
        if name == "memory_mb":
            yield "memory_task_mb", max(values)


class MinuteAggregator:
    """The open minute of every job. `task_counts`: by job, its generation and its number of tasks.

    A "minute" may be another step of time, of which then less must be covered. `whole_batches`: steps are
    shorter than a batch may be, and one that is under way is no sign of a slow task.
    """

    def __init__(
        self,
        step_ms: int = MINUTE_MS,
        covered_min_ms: float = COVERED_MIN_MS,
        *,
        whole_batches: bool = False,
    ) -> None:
        self._whole_batches = whole_batches
        self._jobs: dict[str, _Job] = {}
        self._minute, self._step_ms, self._covered_min_ms = -1, step_ms, covered_min_ms

    def observe(
        self,
        now_ms: Millis,
        task_counts: Mapping[str, tuple[int, int]],
        reports: Mapping[str, Sequence[TaskReport]],
    ) -> Minute | None:
        """Take in what tasks say now; gives the minute that ended since the last look, if one did."""
        minute = now_ms // self._step_ms
        ended = self.close() if 0 <= self._minute < minute else None
        if minute < self._minute:
            self._next()  # the clock was set back: what was seen belongs to no minute that will end
        self._minute = minute
        for gone in self._jobs.keys() - task_counts.keys():
            del self._jobs[gone]
        for name, (generation, task_count) in task_counts.items():
            job = self._jobs.get(name)
            if job is None or job.generation != generation:
                job = self._jobs[name] = _Job(generation, task_count)
            job.task_count = task_count
            for report in reports.get(name, ()):
                if report.generation == generation:
                    task = job.tasks.get(report.task_id)
                    is_new = task is None
                    if task is None:
                        task = job.tasks[report.task_id] = _Task()
                    task.take(report, is_new=is_new, whole_batches=self._whole_batches)
        return ended

    def close(self) -> Minute | None:
        """The open minute as it is; a new one begins. None: nothing was looked at."""
        if self._minute < 0 or not self._jobs:
            return None
        names = tuple(self._jobs)
        values = np.array([self._jobs[name].row(self._covered_min_ms) for name in names], np.float64)
        found = Minute(minute=self._minute, jobs=names, values=values)
        self._next()
        return found

    def _next(self) -> None:
        for job in self._jobs.values():
            for task in job.tasks.values():
                task.next_minute()


Codes = NDArray[np.uint16]
Bits = NDArray[np.uint32]

UNKNOWN, ZERO, _FIRST = 0, 1, 2
_EXPONENT_MIN = -30  # smaller numbers are zero: a record in thirty years
_MANTISSA = 23  # of a float of 32 bits
DAY = 1440  # minutes
# Off by at most 1/256 of itself: far below what a minute differs from the next. Counts are kept to 1/1024.
BITS_COARSE, BITS_FINE = 7, 9
COUNTS = frozenset({"task_count", "restarts", "oom", "exceptions"})
BITS: Bits = np.array([BITS_FINE if name in COUNTS else BITS_COARSE for name in METRICS], np.uint32)

_CONSTANT, _PACKED = 0, 1
_LEVEL = 1  # of zlib: the next ones take several times as long for 2 %


COLUMNS = {name: place for place, name in enumerate(METRICS)}


def bits_of(metrics: Sequence[str]) -> Bits:
    """How fine these are kept."""
    return BITS[[COLUMNS[name] for name in metrics]]


def encode(values: Points, bits: Bits) -> Codes:
    """Numbers as codes; `bits` along the last axis. What is no number, or below zero, is unknown."""
    with np.errstate(over="ignore", invalid="ignore"):
        floats = np.abs(np.ascontiguousarray(values, np.float32))  # there is a zero with a minus
        is_known = np.isfinite(values) & (values >= 0)
    raw = floats.view(np.uint32).astype(np.int64)
    drop = np.int64(_MANTISSA) - bits
    code = ((raw + (np.int64(1) << (drop - 1))) >> drop) - (np.int64(127 + _EXPONENT_MIN) << bits) + _FIRST
    last = np.minimum((np.int64(128 - _EXPONENT_MIN) << bits) + _FIRST - 1, 2**16 - 1)  # beyond is infinity
    code = np.where(code < _FIRST, ZERO, np.minimum(code, last))
    return np.where(is_known, code, UNKNOWN).astype(np.uint16)


def decode(codes: Codes, bits: Bits) -> Points:
    """Codes as numbers, unknown ones as NaN; `bits` along the axes that they have."""
    found: Points = _NUMBERS[(bits == BITS_FINE).astype(np.intp), codes]
    return found


def _numbers(bits: int) -> Points:
    """What every code means."""
    codes = np.arange(2**16, dtype=np.int64)
    raw = (np.maximum(codes - _FIRST, 0) + ((127 + _EXPONENT_MIN) << bits)) << (_MANTISSA - bits)
    found: Points = np.minimum(raw, 0x7F800000).astype(np.uint32).view(np.float32).astype(np.float64)
    found[ZERO], found[UNKNOWN] = 0.0, np.nan
    return found


_NUMBERS = np.stack([_numbers(BITS_COARSE), _numbers(BITS_FINE)])


def pack(codes: Codes) -> bytes:
    """Codes of one metric that follow each other: their differences, the low bytes first, compressed."""
    first = int(codes[0])
    if (codes == first).all():
        return struct.pack("<BH", _CONSTANT, first)
    steps = np.diff(codes, prepend=np.uint16(0)).view(np.int16)
    folded = ((steps << 1) ^ (steps >> 15)).view(np.uint16)
    planes = np.concatenate([folded & 0xFF, folded >> 8]).astype(np.uint8)
    return bytes([_PACKED]) + zlib.compress(planes.tobytes(), _LEVEL)


def unpack(packed: Sequence[bytes], count: int) -> Codes:
    """Several of `pack`, each of `count` codes: a row each."""
    planes = b"".join([_planes(item, count) for item in packed])
    folded = np.frombuffer(planes, np.uint8).reshape(len(packed), 2, count)
    whole = folded[:, 0].astype(np.uint16) | (folded[:, 1].astype(np.uint16) << 8)
    steps = (whole >> 1) ^ (np.uint16(0) - (whole & 1))
    return np.cumsum(steps, axis=1, dtype=np.uint16)


def _planes(packed: bytes, count: int) -> bytes:
    try:
        if packed[0] == _CONSTANT:
            (first,) = struct.unpack_from("<xh", packed)
            folded = ((first << 1) ^ (first >> 15)) & 0xFFFF
            rest = bytes(count - 1)
            return bytes([folded & 0xFF]) + rest + bytes([folded >> 8]) + rest
        planes = zlib.decompress(packed[1:])
    except (zlib.error, struct.error, IndexError) as error:
        raise _damaged(str(error)) from error
    if packed[0] != _PACKED or len(planes) != 2 * count:
        raise _damaged(f"form {packed[0]}, {len(planes)} bytes for {count} minutes")
    return planes


def pack_minute(slots: Sequence[int], columns: Sequence[int], codes: Codes) -> bytes:
    """One minute of some jobs: `codes[job, metric]`, and which jobs and metrics they are."""
    head = np.array([len(slots), len(columns), *slots, *columns], np.uint16)
    return zlib.compress(head.tobytes() + np.ascontiguousarray(codes.T).tobytes(), _LEVEL)


def unpack_minute(packed: bytes) -> tuple[NDArray[np.intp], NDArray[np.intp], Codes]:
    """(slots, columns, codes[job, metric])."""
    try:
        words = np.frombuffer(zlib.decompress(packed), np.uint16)
        jobs, metrics = int(words[0]), int(words[1])
        codes = words[2 + jobs + metrics :].reshape(metrics, jobs).T
    except (zlib.error, ValueError, IndexError) as error:
        raise _damaged(str(error)) from error
    slots, columns = words[2 : 2 + jobs], words[2 + jobs : 2 + jobs + metrics]
    return slots.astype(np.intp), columns.astype(np.intp), codes


def _damaged(why: str) -> CorruptData:
    return CorruptData(
        "metrics that were kept cannot be read",
        why=why,
        fix="restore the database from a copy, or delete the rows of metric_blocks and metric_minutes",
    )
