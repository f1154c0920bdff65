"""Jobs that are behind, looked at in seconds: a minute is long for one that just fell back. Pure.

A step is two heartbeats long. Rates are differences of totals, as in minutes; steps without news are left
out, and a batch counts when it is over. After a failure seconds say nothing for a minute: that is the
caller's to see, of all jobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.core.clock import Millis
from penstock.resources.frames import METRICS, Frame, NoFrame, Points
from penstock.resources.minutes import MinuteBook
from penstock.resources.scaler.window import METRICS_OPTIONAL, METRICS_REQUIRED
from penstock.tasks.messages import TaskReport

STEPS = 6
_ORDER = list(METRICS)
_RATES = [_ORDER.index(name) for name in METRICS_REQUIRED]
_NAMES = (*METRICS_REQUIRED, *METRICS_OPTIONAL)
_COLUMNS = [_ORDER.index(name) for name in _NAMES]


@dataclass(slots=True)
class _Steps:
    generation: int
    last: int = -1
    rows: deque[Points] = field(default_factory=lambda: deque(maxlen=STEPS))


class SecondsBook:
    """The last steps of the jobs that are watched. Requires: looks come one after another."""

    def __init__(self, heartbeat_ms: Millis) -> None:
        self.step_ms = 2 * heartbeat_ms
        self._book = MinuteBook(self.step_ms, covered_min_ms=heartbeat_ms / 2, whole_batches=True)
        self._steps: dict[str, _Steps] = {}

    def observe(
        self,
        now_ms: Millis,
        watched: Mapping[str, tuple[int, int]],
        reports: Mapping[str, Sequence[TaskReport]],
    ) -> None:
        """One look at the jobs that are watched: by job, its generation and number of tasks."""
        ended = self._book.observe(now_ms, watched, reports)
        if ended is not None:
            for name, row in zip(ended.jobs, ended.values, strict=True):
                self._put(name, ended.minute, row)
        # Only now: the step that ended was still of what was watched before.
        for gone in self._steps.keys() - watched.keys():
            del self._steps[gone]
        for name, (generation, _) in watched.items():
            found = self._steps.get(name)
            if found is None or found.generation != generation:
                self._steps[name] = _Steps(generation)

    def _put(self, job: str, step: int, row: Points) -> None:
        steps = self._steps.get(job)
        if steps is None:
            return
        if steps.last >= 0 and not 0 < step - steps.last <= STEPS:
            steps.rows.clear()  # what was seen before a gap and after it is not one stretch
        if not np.isnan(row[_RATES]).any():
            steps.last = step
            steps.rows.append(row)

    def frame(self, job: str) -> Frame | NoFrame:
        """The last seconds of a job, or why they say nothing."""
        steps = self._steps.get(job)
        if steps is None or not steps.rows:
            return NoFrame(job=job, reason="not seen for long enough")
        columns = np.array(steps.rows).T[_COLUMNS]
        return Frame(
            job=job,
            first_minute=steps.last - len(steps.rows) + 1,
            values=dict(zip(_NAMES, columns, strict=True)),
            step_ms=self.step_ms,
        )
