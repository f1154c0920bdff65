"""The minutes that are not sealed yet, of all jobs, in memory: what most policies look at. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.resources.frames import METRICS
from penstock.resources.points import Codes

CHUNK = 128  # jobs whose minutes are kept together
RING = 320  # minutes; more than ever are open at a time, see `metric_store`


class RecentMinutes:
    """The newest minutes of every job, a ring per job and metric."""

    def __init__(self) -> None:
        self._chunks: dict[int, Codes] = {}
        self._lock = threading.Lock()
        self._first: int | None = None  # from where on it knows all that was recorded
        self._newest = -1

    @property
    def newest(self) -> int:
        """The last minute it knows of; -1: none."""
        return self._newest

    @property
    def first(self) -> int | None:
        """The first minute it can answer for; None: it knows nothing."""
        return self._first

    def begin(self, minute: int) -> None:
        """Forget everything; from this minute on all will be told."""
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
            kept = self._chunks.get(chunk)
            if kept is None:
                # Zeroes, of which the machine gives real memory only where something is written.
                kept = self._chunks[chunk] = np.zeros((CHUNK, len(METRICS), RING), np.uint16)
            kept[slots[:, None], columns[None, :], minute % RING] = codes

    def advance(self, minute: int) -> None:
        """Make room for a minute: what was there a whole ring before is forgotten."""
        with self._lock:
            if self._first is None or minute < self._first or minute - self._newest >= RING:
                # The clock went far back or far ahead: what is here fits no range that anybody asks for.
                self._chunks.clear()
                self._first, self._newest = minute, minute
                return
            for passed in range(self._newest + 1, minute + 1):
                for kept in self._chunks.values():
                    kept[:, :, passed % RING] = 0
            if minute > self._newest:
                self._newest = minute
                self._first = max(self._first, minute - RING + 1)

    def cut(self, minute: int) -> None:
        """Forget what lies behind a minute: the clock was set back."""
        with self._lock:
            if self._first is None or minute >= self._newest:
                return
            for later in range(max(minute + 1, self._newest - RING + 1), self._newest + 1):
                for kept in self._chunks.values():
                    kept[:, :, later % RING] = 0
            self._newest = minute
            self._first = min(self._first, minute + 1)

    def forget(self, number: int) -> None:
        """A job is gone."""
        with self._lock:
            kept = self._chunks.get(number // CHUNK)
            if kept is not None:
                kept[number % CHUNK] = 0

    def has(self, number: int) -> bool:
        """Whether anything of a job is here."""
        kept = self._chunks.get(number // CHUNK)
        return kept is not None and bool(kept[number % CHUNK].any())

    def read(self, numbers: Sequence[int], columns: Sequence[int], first: int, minutes: int) -> Codes:
        """`codes[job, metric, minute]`; unknown where this does not know."""
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
                kept = self._chunks.get(chunk)
                if kept is not None:
                    slots = np.array([numbers[place] % CHUNK for place in members], np.intp)
                    found[members, :, target] = kept[slots[:, None], wanted[None, :]][:, :, times]
        return found
