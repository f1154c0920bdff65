"""Records what every job does, a minute at a time, and keeps the store of it in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import structlog

from penstock.core.clock import Millis
from penstock.core.errors import PenstockError
from penstock.resources.frames import MINUTE_MS
from penstock.resources.metric_store import MetricStore
from penstock.resources.minutes import Minute, MinuteBook
from penstock.tasks.messages import TaskReport

log = structlog.get_logger(__name__)

WAITING_MAX = 60  # minutes that wait for a store that is away


class MetricRecorder:
    """Looks at the reports of all tasks; writes when a minute is over. One instance records at a time."""

    def __init__(self, store: MetricStore) -> None:
        self._store, self._book = store, MinuteBook()
        self._waiting: deque[Minute] = deque(maxlen=WAITING_MAX)
        self._is_recording = False

    def tick(
        self,
        now_ms: Millis,
        task_counts: Mapping[str, tuple[int, int]],
        reports: Mapping[str, Sequence[TaskReport]],
    ) -> None:
        """One look. What cannot be written now is written with the next one."""
        if not self._is_recording:
            self._store.refresh()  # another instance may have recorded until now
            self._is_recording = True
        self._append(self._book.observe(now_ms, task_counts, reports))
        self._write()
        # One piece at a time: other writes must not wait for this.
        minute = now_ms // MINUTE_MS
        if not self._store.seal(minute):
            self._store.sweep(minute)

    def stand_by(self) -> None:
        """Another instance records: follow what it writes."""
        if self._is_recording:
            self._book, self._is_recording = MinuteBook(), False
            self._waiting.clear()
        self._store.refresh()

    def stop(self) -> None:
        """Write the open minute as far as it is known: a restart within it may know the rest."""
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
