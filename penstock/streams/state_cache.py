"""States that a worker read or wrote, kept for its next batch (MillWheel 8.3).

What is kept of an interval is of one version under one token, and both are compared with the row that the
next step reads. Every write to an interval raises its version by one: an equal one means that nobody wrote.
A step takes what is kept out, and gives it back when all its writes were answered; a step that fails gives
nothing back. Not for two threads at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from penstock.streams.rows.row_store import IntervalRef, IntervalRow

# What a kept entry costs beside its text and bytes: two objects and a place in a map.
ENTRY_BYTES = 200
# A worker is shared by the tasks of a container; jobs beyond these start again with nothing.
JOBS_MAX = 8


class KnownStates:
    """What is known of an interval's states at one version; None: there is none under this name."""

    def __init__(self) -> None:
        self._at: tuple[int, int] | None = None
        self._states: OrderedDict[str, bytes | None] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._states)

    def fits(self, row: IntervalRow) -> bool:
        """True if this is what the interval has now; else everything is forgotten."""
        if self._at == (row.token, row.version):
            return True
        self.forget()
        return False

    def forget(self) -> None:
        """Know nothing."""
        self._at, self.size = None, 0
        self._states.clear()

    def split(self, names: Iterable[str]) -> tuple[dict[str, bytes], list[str]]:
        """Of these the states that are known, and the names that must be read."""
        found: dict[str, bytes] = {}
        missing = []
        for name in dict.fromkeys(names):
            if name in self._states:
                self._states.move_to_end(name)
                value = self._states[name]
                if value is not None:
                    found[name] = value
            else:
                missing.append(name)
        return found, missing

    def learn(self, row: IntervalRow, names: Iterable[str], states: Mapping[str, bytes]) -> None:
        """What a read of this row found. Requires: `fits` was asked with a row of the same version."""
        self._at = (row.token, row.version)
        for name in names:
            if name not in states:
                self._put(name, None)
        for name, value in states.items():
            self._put(name, value)

    def committed(self, old: IntervalRow, new: IntervalRow, changed: Mapping[str, bytes | None]) -> None:
        """A write of ours was answered. Anything but one step from what we knew: somebody else wrote too."""
        if not self.fits(old) or (new.token, new.version) != (old.token, old.version + 1):
            self.forget()
            return
        self._at = (new.token, new.version)
        for name, value in changed.items():
            if value == b"":  # says only that it is there, as rows of record ids do: not worth the room
                self._drop(name)
            else:
                self._put(name, value)

    def shrink(self, bytes_max: int) -> None:
        """Forget what was used longest ago, until this is enough."""
        while self.size > bytes_max and self._states:
            name, value = self._states.popitem(last=False)
            self.size -= _size_of(name, value)

    def _put(self, name: str, value: bytes | None) -> None:
        self._drop(name)
        self._states[name] = value
        self.size += _size_of(name, value)

    def _drop(self, name: str) -> None:
        if name in self._states:
            self.size -= _size_of(name, self._states.pop(name))


class StateCache:
    """What one process knows of the states of one job's intervals, within a bound."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._known: OrderedDict[IntervalRef, KnownStates] = OrderedDict()

    @property
    def size(self) -> int:
        """Bytes that are kept, about."""
        return sum(known.size for known in self._known.values())

    def take(self, ref: IntervalRef) -> KnownStates:
        """What is known of an interval; nobody else has it until it is given back."""
        return self._known.pop(ref, None) or KnownStates()

    def give(self, ref: IntervalRef, known: KnownStates) -> None:
        """Keep it; the intervals and names that were used longest ago make room."""
        known.shrink(self.bytes_max)
        if not len(known):
            return
        self._known[ref] = known
        excess = self.size - self.bytes_max
        for other in list(self._known):
            if excess <= 0:
                return
            before = self._known[other].size
            self._known[other].shrink(before - excess)
            excess -= before - self._known[other].size
            if not len(self._known[other]):
                del self._known[other]


class StateCaches:
    """A cache for each job that a process works for."""

    def __init__(self) -> None:
        self._caches: OrderedDict[tuple[str, str], StateCache] = OrderedDict()

    def of(self, rows: str, job_birth: str, bytes_max: int) -> StateCache | None:
        """The cache of a job whose rows are at this place; None if it wants none."""
        found = self._caches.pop((rows, job_birth), None)
        if bytes_max <= 0:
            return None
        if found is None or found.bytes_max != bytes_max:
            found = StateCache(bytes_max)
        self._caches[rows, job_birth] = found
        while len(self._caches) > JOBS_MAX:
            self._caches.popitem(last=False)
        return found


def _size_of(name: str, value: bytes | None) -> int:
    return ENTRY_BYTES + len(name) + len(value or b"")
