"""Aggregates task reports to one row of metrics per job and minute, and packs rows for storage. Pure.

A rate is the difference of two totals over the time between them, both measured by the task. A total that
decreases means that the task restarted: counting starts again. A repeated report adds nothing. Totals more
than 90 s apart are not used. If a task of a job does not report, its sums are unknown (NaN), not zero.
Restarts and failures are counted per minute.
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
# A rate is known only if it covers at least this part of its minute.
COVERED_MIN_MS = 10_000.0
# A task that was busy for this share of the time and read nothing is within a batch.
BATCH_BUSY_MIN = 0.9
_ORDER = {name: place for place, name in enumerate(METRICS)}

# (clock, start time, totals): the totals that are read together with this clock.
_FAMILIES = (
    ("at_ms", "started_ms", ("read_total", "written_total", "busy_ms_total", "there_total")),
    ("cpu_at_ms", "cpu_started_ms", ("cpu_ms_total",)),
)
# Rate of a job -> (its total, divisor).
_RATES = {
    "processed_rate": ("read_total", 1.0),
    "output_rate": ("written_total", 1.0),
    "ingest_rate": ("there_total", 1.0),
    "cpu": ("cpu_ms_total", 1000.0),
}
# Gauges of a task: the last value of a minute, or the largest.
_LAST = ("lag_records", "lag_bytes", "lag_s", "key_count", "state_bytes", "watermark_lag_s")
_MOST = ("memory_mb", "disk_mb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Minute:
    """One minute of all jobs: `values[job, metric]` in the order of METRICS, NaN if unknown."""

    minute: int
    jobs: tuple[str, ...]
    values: Points


@dataclass(slots=True)
class _Task:
    """The last report of a task, and its values in the open minute."""

    totals: dict[str, float] = field(default_factory=dict)  # with their clocks and start times
    grown: dict[str, tuple[float, float]] = field(default_factory=dict)  # by total: growth, covered ms
    gauges: dict[str, float] = field(default_factory=dict)
    counts: tuple[int, int, int] = (0, 0, 0)  # restarts, out of memory, failures: totals as reported
    events: tuple[int, int, int] = (0, 0, 0)  # the same within this minute
    has_reported: bool = False

    def take(self, report: TaskReport, *, is_new: bool, whole_batches: bool) -> None:
        """Add a report to the open minute."""
        counts = (report.restarts, report.failures.get(OUT_OF_MEMORY, 0), sum(report.failures.values()))
        if not is_new:
            steps = [now - old if now >= old else now for now, old in zip(counts, self.counts, strict=True)]
            self.events = (
                self.events[0] + steps[0],
                self.events[1] + steps[1],
                self.events[2] + steps[2],
            )
        self.counts = counts
        if report.state != "running":
            return
        metrics = report.metrics
        if "read_total" in metrics and "lag_records" in metrics:
            # All records there are, read or not: the growth of this total is what arrived.
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
        self.has_reported = True

    def _is_within_batch(self, metrics: Mapping[str, float]) -> bool:
        """Always busy, and nothing was read: the work is counted when the batch ends."""
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
            return  # a repeated report
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
        """Growth per second in the open minute."""
        grown, covered_ms = self.grown.get(total, (0.0, 0.0))
        return grown * 1000 / covered_ms if covered_ms >= covered_min_ms else nan

    def next_minute(self) -> None:
        self.grown, self.gauges, self.events, self.has_reported = {}, {}, (0, 0, 0), False


@dataclass(slots=True)
class _Job:
    generation: int
    task_count: int
    tasks: dict[str, _Task] = field(default_factory=dict)

    def row(self, covered_min_ms: float) -> list[float]:
        """The job's minute, in the order of METRICS."""
        found: dict[str, float] = {"task_count": float(self.task_count)}
        tasks = list(self.tasks.values())
        for place, name in enumerate(("restarts", "oom", "exceptions")):
            found[name] = float(sum(task.events[place] for task in tasks))
        reported = [task for task in tasks if task.has_reported]
        if len(reported) >= self.task_count:
            for name, (total, one) in _RATES.items():
                found[name] = sum(task.rate(total, covered_min_ms) for task in reported) / one
            busy = [task.rate("busy_ms_total", covered_min_ms) / 1000 for task in reported]
            if all(isfinite(share) for share in busy):
                # A batch is counted when it is reported, so a minute may include work of the one before.
                busy = [min(1.0, share) for share in busy]
                found["busy"], found["busy_mean"] = max(busy), sum(busy) / len(busy)
            found.update(_gauges(reported))
        return [found.get(name, nan) for name in METRICS]


def _gauges(tasks: Sequence[_Task]) -> Iterable[tuple[str, float]]:
    """Sums and maxima of the gauges that all tasks report."""
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
    """The open minute of every job.

    `step_ms`: another length of a "minute". `whole_batches`: for steps that may be shorter than a batch; work
    is counted when the batch ends, so that a running batch does not look like a slow task.
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
        """Add the newest reports; returns the minute that has ended since the last call, if one has.

        `task_counts`: by job, its generation and its number of tasks.
        """
        minute = now_ms // self._step_ms
        ended = self.close() if 0 <= self._minute < minute else None
        if minute < self._minute:
            self._next()  # the clock was set back: drop the open minute
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
        """End the open minute and return it; None if it has no data."""
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
_EXPONENT_MIN = -30  # smaller numbers are stored as zero
_MANTISSA = 23  # bits of a 32-bit float
DAY = 1440  # minutes
# The relative error is at most 1/256, far below the change between minutes; counts have at most 1/1024.
BITS_COARSE, BITS_FINE = 7, 9
COUNTS = frozenset({"task_count", "restarts", "oom", "exceptions"})
BITS: Bits = np.array([BITS_FINE if name in COUNTS else BITS_COARSE for name in METRICS], np.uint32)

_CONSTANT, _PACKED = 0, 1
_LEVEL = 1  # of zlib: higher levels take several times as long for 2 %


COLUMNS = {name: place for place, name in enumerate(METRICS)}


def bits_of(metrics: Sequence[str]) -> Bits:
    """The mantissa bits that are stored of each of these metrics."""
    return BITS[[COLUMNS[name] for name in metrics]]


def encode(values: Points, bits: Bits) -> Codes:
    """Encode numbers; `bits` along the last axis. NaN, infinite and negative numbers become UNKNOWN."""
    with np.errstate(over="ignore", invalid="ignore"):
        floats = np.abs(np.ascontiguousarray(values, np.float32))  # -0.0 is 0
        is_known = np.isfinite(values) & (values >= 0)
    raw = floats.view(np.uint32).astype(np.int64)
    drop = np.int64(_MANTISSA) - bits
    code = ((raw + (np.int64(1) << (drop - 1))) >> drop) - (np.int64(127 + _EXPONENT_MIN) << bits) + _FIRST
    last = np.minimum((np.int64(128 - _EXPONENT_MIN) << bits) + _FIRST - 1, 2**16 - 1)  # beyond is infinity
    code = np.where(code < _FIRST, ZERO, np.minimum(code, last))
    return np.where(is_known, code, UNKNOWN).astype(np.uint16)


def decode(codes: Codes, bits: Bits) -> Points:
    """Decode to numbers, UNKNOWN to NaN; `bits` is broadcast to the codes."""
    found: Points = _NUMBERS[(bits == BITS_FINE).astype(np.intp), codes]
    return found


def _numbers(bits: int) -> Points:
    """The number of every code."""
    codes = np.arange(2**16, dtype=np.int64)
    raw = (np.maximum(codes - _FIRST, 0) + ((127 + _EXPONENT_MIN) << bits)) << (_MANTISSA - bits)
    found: Points = np.minimum(raw, 0x7F800000).astype(np.uint32).view(np.float32).astype(np.float64)
    found[ZERO], found[UNKNOWN] = 0.0, np.nan
    return found


_NUMBERS = np.stack([_numbers(BITS_COARSE), _numbers(BITS_FINE)])


def pack(codes: Codes) -> bytes:
    """Pack consecutive codes of one metric: differences, low bytes first, compressed."""
    first = int(codes[0])
    if (codes == first).all():
        return struct.pack("<BH", _CONSTANT, first)
    steps = np.diff(codes, prepend=np.uint16(0)).view(np.int16)
    folded = ((steps << 1) ^ (steps >> 15)).view(np.uint16)
    planes = np.concatenate([folded & 0xFF, folded >> 8]).astype(np.uint8)
    return bytes([_PACKED]) + zlib.compress(planes.tobytes(), _LEVEL)


def unpack(packed: Sequence[bytes], count: int) -> Codes:
    """Unpack several results of `pack` with `count` codes each, one row each."""
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
    """Pack one minute of some jobs: `codes[job, metric]` with the slots of jobs and columns of metrics."""
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
        "stored metrics cannot be read",
        why=why,
        fix="restore the database from a backup, or delete the rows of metric_blocks and metric_minutes",
    )
