"""Aggregates per key and session: a window that ends when its key is silent for the length of the gap.

Pure. A record alone is a session from its time to that plus the gap; sessions that overlap are one. What a
key has open is one state row, with a timer at the first of their ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.streams.operators.aggregates import KEY, Aggregates, Partials
from penstock.streams.operators.session_rows import (
    KeyRow,
    decoded,
    encoded,
    ends_of,
    joined,
    lifted_sessions,
    mismatch,
    parted,
)
from penstock.streams.operators.windowed import (
    STREAM,
    Lateness,
    Stretch,
    WindowSpec,
    step_result,
    times_of,
    window_rows,
)
from penstock.streams.rows.row_store import TimerRow
from penstock.streams.step_logic import StepInput, StepResult

_TAG = "session"


class SessionAggregate:
    """The step logic of session windows, with one result each."""

    def __init__(self, spec: WindowSpec) -> None:
        self._spec, self._aggregates, self._gap = spec, Aggregates(spec.values), spec.spans.size_ms

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        return {STREAM: dict(self._spec.columns)}

    def wanted(self, table: pa.Table) -> Iterable[str]:
        found: list[str] = table.column(KEY).unique().to_pylist()
        return found

    def run(self, given: StepInput) -> StepResult:
        flags = Lateness.of(given)
        held = decoded(_rows_of(given.states, given.job), self._aggregates, given.job)
        made: list[pa.Table] = []
        dropped = 0
        for stretch in flags.stretches(given, apart=bool(flags.behind.any())):
            fresh, beyond = self._lifted(stretch)
            dropped += beyond
            parts = [part for part in (held, fresh) if part is not None]
            if not parts:
                continue
            (whole,) = joined(self._aggregates, [self._aggregates.merge(parts)])
            held, result = self._fire(whole, stretch.low_after)
            if result is not None:
                made.append(result)
        keys = {*self.wanted(given.table), *(timer.key for timer in given.timers)}
        found = encoded(held)
        states = {key: msgspec.msgpack.encode(found[key]) if key in found else None for key in keys}
        timers = tuple(
            TimerRow(key=key, tag=_TAG, at_ms=row.end_min, hold_ms=row.end_min - 1)
            for key, row in found.items()
        )
        done = step_result(
            {key: row for key, row in states.items() if given.states.get(key) != row},
            made,
            flags.counters(sum(table.num_rows for table in made), dropped),
        )
        return StepResult(
            states=done.states,
            timers_set=timers,
            timers_deleted=tuple((key, _TAG) for key, row in states.items() if row is None),
            produced=done.produced,
            counters=done.counters,
        )

    def _lifted(self, stretch: Stretch) -> tuple[Partials | None, int]:
        """Records as sessions of their own, and how many are in none, because they are late."""
        stamps = times_of(stretch.rows)
        flagged = np.asarray(stretch.rows.column("_late").to_numpy(), dtype=np.bool_)
        chosen = ~flagged & (~stretch.late | (stamps + self._gap > stretch.low))
        dropped = int(np.count_nonzero(~chosen))
        if not chosen.any():
            return None, dropped
        rows = stretch.rows.filter(pa.array(chosen))
        return self._aggregates.merge([lifted_sessions(self._aggregates, rows, self._gap)]), dropped

    def _fire(self, sessions: Partials, low_after: Millis) -> tuple[Partials | None, pa.Table | None]:
        ends = ends_of(sessions)
        due = ends <= low_after
        if not due.any():
            return sessions, None
        result, left = parted(sessions, due)
        rows = window_rows(self._spec, result, self._aggregates, ends=ends[due])
        return (left if left.main.num_rows else None), rows


def _rows_of(states: Mapping[str, bytes], job: str) -> dict[str, KeyRow]:
    try:
        return {key: msgspec.msgpack.decode(data, type=KeyRow) for key, data in states.items()}
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise mismatch(job, error) from error
