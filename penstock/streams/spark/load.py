"""What a running task was seen doing: rates, busy fraction, lag, totals since its start. Read from the bus
and the rows, not from Spark's guesses. What is not known is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from penstock.core.clock import Millis
from penstock.core.errors import PenstockError
from penstock.core.loop import Loop
from penstock.core.system_clock import SystemClock
from penstock.jobs.provision import STATEFUL
from penstock.streams.bus.log import Lag, sum_lags
from penstock.streams.inspect.state_view import is_in_blocks
from penstock.streams.places import open_log, open_rows
from penstock.streams.rows.row_store import IntervalRow
from penstock.streams.spark.source import TurnFiles
from penstock.streams.step.step import TaskDescriptor

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

log = structlog.get_logger(__name__)

WINDOW_S = 10.0
TURNS_WINDOW_MS: Millis = 30_000
MEASURE_EVERY_MS: Millis = 1_000
# Partitions are measured every so many measurements, because each costs a request to the bus.
PARTITIONS_EVERY, PARTITIONS_MAX = 10, 64
_LOW_MAX = 2**62  # a low watermark beyond this is none


class LoadMeter:
    """Measures a task's load about once a second; rates are over the last ten seconds."""

    def __init__(
        self,
        task: TaskDescriptor,
        *,
        trigger_ms: int,
        turns: Callable[[], TurnFiles | None] = lambda: None,
    ) -> None:
        """`turns`: the files in which the task reports its turns, once its query has started."""
        self._turns, self._held = turns, deque[tuple[Millis, Millis, Millis, int]]()
        self.task_id, self._task, self._trigger_ms = task.spec.task_id, task, trigger_ms
        self._samples: deque[tuple[float, int, int]] = deque()  # (when, records read, records there)
        self._count, self._by_partition, self._rates = 0, dict[str, float](), PartitionRates()
        self._busy, self._query = BusyTime(), object()  # the query whose batches are counted
        self._began: tuple[float, int, int] | None = None  # time, read and written at the first measurement

    def measure(self, query: StreamingQuery | None, *, at_s: float, now_ms: Millis) -> dict[str, float]:
        """The metrics now: `at_s` from a monotonic clock, `now_ms` from the wall clock.

        Reads from the bus and the row store, so it may block as long as they do.
        """
        rows = [open_rows(self._task.rows).peek(interval.ref) for interval in self._task.intervals]
        positions = self._positions(rows)
        read, lag = sum(sum(at.values()) for at in positions.values()), self._lag(positions, now_ms)
        progress: Any = query.lastProgress if query is not None else None
        if progress is None:
            self._samples.clear()  # no rates before the first batch
        self._samples.append((at_s, read, read + lag.records))
        while at_s - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()
        first_at, first_read, first_there = self._samples[0]
        span_s = max(at_s - first_at, 1e-9)
        grown = len(self._samples) > 1
        batch_ms = float(progress["durationMs"].get("triggerExecution", 0)) if progress else 0.0
        return {
            "input_rate": max(0.0, (read + lag.records - first_there) / span_s) if grown else 0.0,
            "processed_rate": (read - first_read) / span_s if grown else 0.0,
            # With a trigger of 0 ms batches follow each other: it is busy whenever it runs.
            "busy": min(1.0, batch_ms / max(self._trigger_ms, 1)),
            "batch_ms": batch_ms,
            "lag_records": float(lag.records),
            "lag_bytes": float(lag.bytes),
            "lag_s": lag.ms / 1000,  # age of the oldest waiting record
            "records": float(sum(row.counters.get("records", 0) for row in rows)),
            "late": float(sum(row.counters.get("late", 0) for row in rows)),
            "dropped": float(sum(row.counters.get("dropped", 0) for row in rows)),
            # Dead letters: records that cannot be parsed or computed, or for which user code raised.
            "bad": float(sum(row.counters.get("bad", 0) + row.counters.get("poison", 0) for row in rows)),
            **self._behind_low(rows),
            "input_low": float(min(row.input_low for row in rows)),
            "output_low": float(min(row.output_low for row in rows)),
            **self._totals(query, progress, rows, read, at_s * 1000),
            **self._behind(rows, now_ms),
            **self._kept(rows),
            **self._of_partitions(positions, lag, at_s, now_ms),
            **self._of_turns(round(at_s * 1000)),
        }

    def _totals(
        self, query: StreamingQuery | None, progress: Any, rows: list[IntervalRow], read: int, at_ms: float
    ) -> dict[str, float]:
        """Totals since the task started, with its start time; none before its first batch."""
        written = sum(row.counters.get("productions", 0) for row in rows)
        if query is None or progress is None:
            return {}
        if self._began is None:
            self._began = (at_ms, read, written)
        if query is not self._query:
            self._query = query
            self._busy.new_query()
        busy_ms = self._busy.update(
            _ended(query, progress, since=self._busy.last_seen),
            is_running=bool(query.status["isTriggerActive"]),
            at_ms=at_ms,
        )
        began_ms, read_first, written_first = self._began
        return {
            "at_ms": round(at_ms),
            "started_ms": round(began_ms),
            "read_total": float(read - read_first),
            "written_total": float(written - written_first),
            "busy_ms_total": busy_ms,
        }

    def _of_turns(self, at_ms: Millis) -> dict[str, float]:
        """Time it waits for a slot, slots it held lately, and the share of user code."""
        files = self._turns()
        turns = [] if files is None else [files.of(i.ref.partition) for i in self._task.intervals]
        planned_ms = 0 if files is None else files.planned_ms()
        if not planned_ms:
            return {}
        is_waiting = all(one.began_ms < planned_ms for one in turns)
        waits_ms = at_ms - planned_ms if is_waiting else min(one.waited_ms for one in turns)
        user_ms, read = sum(one.user_ms for one in turns), sum(one.rows for one in turns)
        self._held.append((at_ms, sum(one.held_ms(at_ms) for one in turns), user_ms, read))
        while at_ms - self._held[0][0] > TURNS_WINDOW_MS:
            self._held.popleft()
        first_ms, held_first, user_first, read_first = self._held[0]
        found = {"slot_wait_s": max(0, waits_ms) / 1000}
        if at_ms > first_ms:
            found["slots_held"] = (self._held[-1][1] - held_first) / (at_ms - first_ms)
            found["slots_user"] = (user_ms - user_first) / (at_ms - first_ms)
        if read > read_first:
            found["user_ms_per_record"] = (user_ms - user_first) / (read - read_first)
        return found

    def _behind(self, rows: list[IntervalRow], now_ms: Millis) -> dict[str, float]:
        lows = [row.input_low for row in rows]
        if any(abs(low) >= _LOW_MAX for low in lows):
            return {}
        return {"watermark_lag_s": max(0.0, (now_ms - min(lows)) / 1000)}

    def _behind_low(self, rows: list[IntervalRow]) -> dict[str, float]:
        """Records behind the low without the late flag, since each interval was created; by partition,
        because a rescale moves partitions with their counters.
        """
        counts = {
            interval.ref.partition: float(row.counters.get("behind_low", 0))
            for interval, row in zip(self._task.intervals, rows, strict=True)
        }
        found = {f"behind_low.{partition}": count for partition, count in counts.items() if count}
        return {"behind_low": sum(counts.values()), **found}

    def _kept(self, rows: list[IntervalRow]) -> dict[str, float]:
        """Number of keys and bytes of their state, as far as they are counted."""
        kept = [row.kept for row in rows if row.kept is not None]
        if self._task.kind != STATEFUL or len(kept) < len(rows):
            return {}
        found = {"state_bytes": float(sum(one.bytes for one in kept))}
        in_blocks = is_in_blocks(self._task.plan.get("computation") or {})
        counts = [one.keys if in_blocks and one.rows else one.rows for one in kept]
        known = [count for count in counts if count is not None]
        return {**found, "key_count": float(sum(known))} if len(known) == len(counts) else found

    def _of_partitions(
        self, positions: dict[str, dict[int, int]], lag: Lag, at_s: float, now_ms: Millis
    ) -> dict[str, float]:
        """`input_rate.3` of each partition; `lag_records.3` and the like of those with a lag.

        Measured every `PARTITIONS_EVERY` measurements; lags are cleared at once when nothing waits.
        """
        self._count += 1
        partitions = sorted({partition for at in positions.values() for partition in at})
        if len(partitions) > PARTITIONS_MAX:
            return {}
        if self._count % PARTITIONS_EVERY == 1:
            waits = dict.fromkeys(partitions, 0)
            self._by_partition = {}
            for partition in partitions if lag.records else ():
                own = {name: {partition: at[partition]} for name, at in positions.items() if partition in at}
                found = self._lag(own, now_ms)
                waits[partition] = found.records
                if found.records:
                    self._by_partition |= {
                        f"lag_records.{partition}": float(found.records),
                        f"lag_bytes.{partition}": float(found.bytes),
                        f"lag_s.{partition}": found.ms / 1000,
                    }
            read = {
                partition: sum(at.get(partition, 0) for at in positions.values()) for partition in partitions
            }
            self._rates.add(at_s, {partition: read[partition] + waits[partition] for partition in partitions})
        elif not lag.records:
            self._by_partition = {}
        return {**self._by_partition, **self._rates.metrics()}

    def _positions(self, rows: list[IntervalRow]) -> dict[str, dict[int, int]]:
        """The offset of each interval, by category and partition."""
        positions: dict[str, dict[int, int]] = {source.category: {} for source in self._task.inputs}
        for interval, row in zip(self._task.intervals, rows, strict=True):
            for _, source in self._task.inputs_of(interval.ref.partition):
                positions[source.category][interval.ref.partition] = row.offsets[source.birth]
        return positions

    def _lag(self, positions: dict[str, dict[int, int]], now_ms: Millis) -> Lag:
        """The lag behind the ends of the bus."""
        bus = open_log(self._task.bus)
        return sum_lags(bus.lag(category, at, now_ms=now_ms) for category, at in positions.items() if at)


def _ended(query: StreamingQuery, progress: Any, *, since: int) -> list[tuple[int, float]]:
    """(batch, ms) of the batches after `since` that Spark still reports."""
    newest = int(progress["batchId"])
    if newest <= since:
        return []
    found = [(newest, float(progress["durationMs"].get("triggerExecution", 0)))]
    if newest == since + 1:
        return found
    java: Any = query._jsq.recentProgress()
    for place in range(len(java) - 1, -1, -1):
        batch = int(java[place].batchId())
        if batch <= since:
            break
        found.append((batch, float(java[place].durationMs().get("triggerExecution") or 0)))
    return found


class LoadWatch:
    """Measures a task's load in a thread of its own: a bus that does not answer must not block the engine."""

    def __init__(self, meter: LoadMeter, query: Callable[[], StreamingQuery | None]) -> None:
        self._meter, self._query, self._clock = meter, query, SystemClock()
        self.last: dict[str, float] = {}
        self._loop = Loop(f"load {meter.task_id}", self._measure, every_ms=MEASURE_EVERY_MS)

    def start(self) -> LoadWatch:
        """Start measuring."""
        self._loop.start()
        return self

    def stop(self) -> None:
        """Stop measuring; does not wait for a measurement in progress."""
        self._loop.stop(timeout_ms=0)

    def _measure(self) -> None:
        at_s, now_ms = self._clock.boot_ms() / 1000, self._clock.now_ms()
        try:
            self.last = self._meter.measure(self._query(), at_s=at_s, now_ms=now_ms)
        except PenstockError as error:
            self.last = {}  # old values would look like current ones
            log.warning("the load could not be measured", task=self._meter.task_id, error=error.what)


class BusyTime:
    """Total busy time of batches. A running batch counts from the first update that saw it running."""

    def __init__(self) -> None:
        self._seen = -1  # the last batch that was counted
        self._ended_ms = 0.0
        self._running_since_ms: float | None = None
        self.total_ms = 0.0

    def new_query(self) -> None:
        """A new query began: its batch numbers start again."""
        self._seen, self._running_since_ms = -1, None

    @property
    def last_seen(self) -> int:
        """The newest batch that is counted; -1: none."""
        return self._seen

    def update(self, ended: Iterable[tuple[int, float]], *, is_running: bool, at_ms: float) -> float:
        """Add ended batches (number, ms), each once; returns the total."""
        new = {batch: took_ms for batch, took_ms in ended if batch > self._seen and took_ms >= 0}
        if new:
            self._ended_ms += sum(new.values())
            self._seen = max(new)
            self._running_since_ms = None
        if not is_running:
            self._running_since_ms = None
        elif self._running_since_ms is None:
            self._running_since_ms = at_ms
        running_ms = 0.0 if self._running_since_ms is None else max(0.0, at_ms - self._running_since_ms)
        self.total_ms = max(self.total_ms, self._ended_ms + running_ms)
        return self.total_ms


RATES_WINDOW_S = 60.0
# The shortest time span of a rate.
RATES_SPAN_MIN_S = 5.0


@dataclass(slots=True)
class PartitionRates:
    """Input rates of partitions, from samples of their record totals, read or not."""

    _samples: deque[tuple[float, Mapping[int, int]]] = field(default_factory=deque)

    def add(self, at_s: float, there: Mapping[int, int]) -> None:
        """Add a sample. Requires: `at_s` is from a monotonic clock."""
        if self._samples and self._samples[-1][1].keys() != there.keys():
            self._samples.clear()
        self._samples.append((at_s, there))
        while at_s - self._samples[0][0] > RATES_WINDOW_S:
            self._samples.popleft()

    def metrics(self) -> dict[str, float]:
        """`input_rate.3` and so on, in records per second; none before the second sample."""
        if len(self._samples) < 2:
            return {}
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        span_s = last_s - first_s
        if span_s < RATES_SPAN_MIN_S:
            return {}
        return {
            f"input_rate.{partition}": round(max(0, there - first[partition]) / span_s, 3)
            for partition, there in last.items()
        }
