"""States that a worker read or wrote, kept for its next batch (MillWheel 8.3).

What is kept of an interval is of one version under one token, and both are compared with the row that the
next step reads. Every write to an interval raises its version by one: an equal one means that nobody wrote.
A step takes what is kept out, and gives it back when all its writes were answered; a step that fails gives
nothing back. What other workers of the machine wrote meanwhile is heard when it is taken, and what was
written is told when it is given back (`state_news`). Not for two threads at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from penstock.streams.rows.row_store import IntervalRef, IntervalRow
from penstock.streams.state_news import Change, Place, StateNews

# What a kept entry costs beside its text and bytes: two objects and a place in a map.
ENTRY_BYTES = 200
# A worker is shared by the tasks of a container; jobs beyond these start again with nothing.
JOBS_MAX = 8


class KnownStates:
    """What is known of an interval's states at one version; None: there is none under this name."""

    def __init__(self, heard: Place | None = None) -> None:
        self._at: tuple[int, int] | None = None
        self._states: OrderedDict[str, bytes | None] = OrderedDict()
        self.size = 0
        self.heard = heard or Place()  # how far news of others were
        self._written: Change | None = None  # by the step that has it now
        self._read = 0  # names that this step asked the rows for

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

    def hear(self, changes: Iterable[Change], heard: Place) -> None:
        """What others wrote since: followed as far as it goes on from what is known."""
        self.heard = heard
        for change in changes:
            if self._at == (change.token, change.old):
                self._at = (change.token, change.new)
                self._change(change.states)

    def told(self) -> Change | None:
        """What was written since this was asked last, for others to hear."""
        written, read, self._written, self._read = self._written, self._read, None, 0
        return None if written is None else msgspec.structs.replace(written, read=read)

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
            self._read += 1
            if name not in states:
                self._put(name, None)
        for name, value in states.items():
            self._put(name, value)

    def committed(self, old: IntervalRow, new: IntervalRow, changed: Mapping[str, bytes | None]) -> None:
        """A write of ours was answered. Anything but one step from what we knew: somebody else wrote too."""
        if (new.token, new.version) != (old.token, old.version + 1):
            self.forget()
            return
        self._note(new, changed)
        if self.fits(old):
            self._at = (new.token, new.version)
            self._change(changed)

    def _note(self, new: IntervalRow, changed: Mapping[str, bytes | None]) -> None:
        """Writes of one step that follow each other are one change."""
        last, old = self._written, new.version - 1
        if last is None or (last.token, last.new) != (new.token, old):
            last = Change(token=new.token, old=old, new=old, states={})
        self._written = msgspec.structs.replace(last, new=new.version, states={**last.states, **changed})

    def _change(self, states: Mapping[str, bytes | None]) -> None:
        for name, value in states.items():
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

    def __init__(self, bytes_max: int, news: StateNews | None = None) -> None:
        self.bytes_max, self._news = bytes_max, news
        self._known: OrderedDict[IntervalRef, KnownStates] = OrderedDict()

    @property
    def size(self) -> int:
        """Bytes that are kept, about."""
        return sum(known.size for known in self._known.values())

    def take(self, ref: IntervalRef) -> KnownStates:
        """What is known of an interval; nobody else has it until it is given back."""
        known = self._known.pop(ref, None)
        if known is None:
            return KnownStates(Place() if self._news is None else self._news.end(ref))
        if self._news is not None:
            known.hear(*self._news.since(ref, known.heard))
        return known

    def give(self, ref: IntervalRef, known: KnownStates) -> None:
        """Keep it; the intervals and names that were used longest ago make room."""
        told = known.told()
        if self._news is not None and told is not None:
            self._news.tell(ref, told)
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

    def of(
        self, rows: str, job_birth: str, bytes_max: int, shared: Callable[[], Path | None] = lambda: None
    ) -> StateCache | None:
        """The cache of a job whose rows are at this place; None if it wants none.

        `shared` is asked once for a folder that all workers of this machine have for the job.
        """
        found = self._caches.pop((rows, job_birth), None)
        if bytes_max <= 0:
            return None
        if found is None or found.bytes_max != bytes_max:
            folder = shared()
            found = StateCache(bytes_max, None if folder is None else StateNews(folder, bytes_max))
        self._caches[rows, job_birth] = found
        while len(self._caches) > JOBS_MAX:
            self._caches.popitem(last=False)
        return found


def _size_of(name: str, value: bytes | None) -> int:
    return ENTRY_BYTES + len(name) + len(value or b"")
