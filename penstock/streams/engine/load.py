"""What a running task was seen doing: rates, busy fraction, lag. Read from the bus and the rows, not from
Spark's guesses.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery

from penstock.streams.places import open_log, open_rows
from penstock.streams.task import TaskDescriptor

WINDOW_S = 10.0
SAMPLE_EVERY_S = 1.0


class LoadMeter:
    """Samples a task about once a second and answers with rates over the last ten."""

    def __init__(self, task: TaskDescriptor, *, trigger_ms: int) -> None:
        self._task, self._trigger_ms = task, trigger_ms
        self._samples: deque[tuple[float, int, int]] = deque()  # (when, records read, records there)
        self._last: dict[str, float] = {}

    def read(self, query: StreamingQuery | None, now_s: float) -> dict[str, float]:
        """The newest metrics."""
        if self._samples and now_s - self._samples[-1][0] < SAMPLE_EVERY_S:
            return self._last
        task = self._task
        bus = open_log(task.bus)
        ends = [bus.end_offsets(source.category) for source in task.inputs]
        rows = [open_rows(task.rows).peek(interval.ref) for interval in task.intervals]
        read = there = 0
        for interval, row in zip(task.intervals, rows, strict=True):
            for number, source in task.inputs_of(interval.ref.partition):
                read += row.offsets[source.birth]
                there += ends[number][interval.ref.partition]
        progress: Any = query.lastProgress if query is not None else None
        if progress is None:
            self._samples.clear()  # the time before the first batch is a start, not a rate
        self._samples.append((now_s, read, there))
        while now_s - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()
        first_at, first_read, first_there = self._samples[0]
        span_s = max(now_s - first_at, 1e-9)
        grown = len(self._samples) > 1
        processed_rate = (read - first_read) / span_s if grown else 0.0
        lag_records = float(there - read)
        batch_ms = float(progress["durationMs"].get("triggerExecution", 0)) if progress else 0.0
        self._last = {
            "input_rate": (there - first_there) / span_s if grown else 0.0,
            "processed_rate": processed_rate,
            # A trigger of 0 ms: one batch after the other, so it is busy whenever it runs.
            "busy": min(1.0, batch_ms / max(self._trigger_ms, 1)),
            "batch_ms": batch_ms,
            "lag_records": lag_records,
            # time_lagged of the paper: what waits, over the rate at which it is worked off.
            "lag_s": lag_records / processed_rate if processed_rate > 0 else (span_s if lag_records else 0.0),
            "records": float(sum(row.counters.get("records", 0) for row in rows)),
            "late": float(sum(row.counters.get("late", 0) for row in rows)),
            "bad": float(sum(row.counters.get("bad", 0) for row in rows)),
            "input_low": float(min(row.input_low for row in rows)),
            "output_low": float(min(row.output_low for row in rows)),
        }
        return self._last
