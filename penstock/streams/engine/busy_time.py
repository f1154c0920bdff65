"""How long a task's batches took, added up: each batch once, and the running one as far as it is. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class BusyTime:
    """A total that only grows. A batch that runs counts from the look that first saw it running."""

    def __init__(self) -> None:
        self._seen = -1  # the last batch that was counted
        self._ended_ms = 0.0
        self._running_since_ms: float | None = None
        self.total_ms = 0.0

    def new_query(self) -> None:
        """Batches are numbered anew."""
        self._seen, self._running_since_ms = -1, None

    @property
    def last_seen(self) -> int:
        """The newest batch that is counted; -1: none."""
        return self._seen

    def look(self, ended: Iterable[tuple[int, float]], *, is_running: bool, at_ms: float) -> float:
        """The total, with (batch, ms) of those that have ended since; known ones are not counted twice."""
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
