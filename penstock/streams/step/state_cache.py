"""States that a worker read or wrote, kept for its next batch (MillWheel 8.3).

What is kept of an interval is of one version under one token, and both are compared with the row that the
next step reads. Every write to an interval raises its version by one: an equal version means that nobody
wrote. A step takes what is kept out, and gives it back when all its writes were answered; a step that fails
gives nothing back. Not for two threads at once.

Spark gives the batches of an interval to its Python workers in turn, so each worker appends what it wrote to
a file of the interval that the workers of the machine share (`SharedChanges`), from one version to the next.
A worker reads it when it takes its states out. If changes are missing between its version and the last one,
it drops its states and reads the rows: losing the file, or a part of it, costs time and never truth.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.streams.rows.row_store import IntervalRef, IntervalRow

# --- changes that other workers made ---------------------------------------------------------------------

_HEAD = struct.Struct(">II")  # length and CRC-32 of what follows
FILE_SHARE = 4  # a file is begun anew when it has this many times what a worker may keep
FILE_BYTES_MIN = 2**20
HEAD_BYTES = 16  # length and checksum of the first record, its token and versions


class Change(msgspec.Struct, frozen=True, array_like=True):
    """The writes of one step, from the version before the first to that after the last, under one token."""

    token: int
    old: int
    new: int
    states: dict[str, bytes | None]  # None: there is none any more
    read: int = 0  # states that the step had to read from the rows


@dataclass(frozen=True, slots=True)
class Place:
    """How far a worker has read a file of changes. `head`: its first bytes; a new file has others."""

    head: bytes = b""
    position: int = 0


_DECODER = msgspec.msgpack.Decoder(Change)


class SharedChanges:
    """Files of changes in a folder that the workers of one machine share while they run."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder, self._bytes_max = folder, bytes_max

    def append(self, ref: IntervalRef, change: Change) -> None:
        """Add what a step of this worker wrote. More than a worker would keep is left out."""
        if _bytes_of(change.states) > self._bytes_max:
            return
        data = msgspec.msgpack.encode(change)
        data = _HEAD.pack(len(data), zlib.crc32(data)) + data
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._append(self._path(ref), data)
        except OSError:
            pass  # a full disk, say: whoever misses this reads the rows

    def _append(self, path: Path, data: bytes) -> None:
        if _file_size(path) + len(data) > max(FILE_SHARE * self._bytes_max, FILE_BYTES_MIN):
            new = path.with_suffix(f".{os.getpid()}")
            new.write_bytes(data)
            new.replace(path)
            return
        # One write to the end: two workers that append at once do not damage each other's.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def end(self, ref: IntervalRef) -> Place:
        """The end of the file: a worker that knows no states reads from here."""
        try:
            with self._path(ref).open("rb") as file:
                return Place(file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size)
        except OSError:
            return Place()

    def since(self, ref: IntervalRef, place: Place) -> tuple[list[Change], Place]:
        """The changes after this place, in order, and the place behind the last one."""
        try:
            descriptor = os.open(self._path(ref), os.O_RDONLY)
        except OSError:
            return [], place
        try:
            head, size = os.pread(descriptor, HEAD_BYTES, 0), os.fstat(descriptor).st_size
            start = place.position if place.head == head and place.position <= size else 0
            data = os.pread(descriptor, size - start, start)
        finally:
            os.close(descriptor)
        changes, end = _parse(data)
        return changes, Place(head, start + end)

    def _path(self, ref: IntervalRef) -> Path:
        return self._folder / f"{hashlib.sha256(ref.birth.encode()).hexdigest()[:32]}.news"


def _parse(data: bytes) -> tuple[list[Change], int]:
    """Whole records, and where they end; after one that is damaged nothing of the rest is believed."""
    changes, at = [], 0
    while at + _HEAD.size <= len(data):
        length, crc = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(body) < length:
            break  # not all of it is there yet
        if zlib.crc32(body) != crc:
            return [], len(data)
        changes.append(_DECODER.decode(body))
        at += _HEAD.size + length
    return changes, at


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _bytes_of(states: Mapping[str, bytes | None]) -> int:
    return sum(len(name) + len(value or b"") for name, value in states.items())


# --- the cache -------------------------------------------------------------------------------------------

# What a kept entry costs beside its text and bytes: two objects and a place in a map.
ENTRY_BYTES = 200
# A worker is shared by the tasks of a container; jobs beyond these start again with nothing.
JOBS_MAX = 8


class KnownStates:
    """What is known of an interval's states at one version; None: there is none under this name."""

    def __init__(self, read_to: Place | None = None) -> None:
        self._at: tuple[int, int] | None = None
        self._states: OrderedDict[str, bytes | None] = OrderedDict()
        self.size = 0
        self.read_to = read_to or Place()  # how far the changes of other workers were read
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
        """Drop all states."""
        self._at, self.size = None, 0
        self._states.clear()

    def apply(self, changes: Iterable[Change], read_to: Place) -> None:
        """Apply what other workers wrote since, as far as it follows the version that is known."""
        self.read_to = read_to
        for change in changes:
            if self._at == (change.token, change.old):
                self._at = (change.token, change.new)
                self._change(change.states)

    def take_written(self) -> Change | None:
        """What was written since this was called last, for other workers."""
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
        """A write of this worker was answered. If the version rose by more than 1, others wrote too."""
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

    def __init__(self, bytes_max: int, changes: SharedChanges | None = None) -> None:
        self.bytes_max, self._changes = bytes_max, changes
        self._known: OrderedDict[IntervalRef, KnownStates] = OrderedDict()

    @property
    def size(self) -> int:
        """Bytes that are kept, about."""
        return sum(known.size for known in self._known.values())

    def take(self, ref: IntervalRef) -> KnownStates:
        """What is known of an interval; nobody else has it until it is given back."""
        known = self._known.pop(ref, None)
        if known is None:
            return KnownStates(Place() if self._changes is None else self._changes.end(ref))
        if self._changes is not None:
            known.apply(*self._changes.since(ref, known.read_to))
        return known

    def give(self, ref: IntervalRef, known: KnownStates) -> None:
        """Keep it; the intervals and names that were used longest ago make room."""
        written = known.take_written()
        if self._changes is not None and written is not None:
            self._changes.append(ref, written)
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
            found = StateCache(bytes_max, None if folder is None else SharedChanges(folder, bytes_max))
        self._caches[rows, job_birth] = found
        while len(self._caches) > JOBS_MAX:
            self._caches.popitem(last=False)
        return found


def _size_of(name: str, value: bytes | None) -> int:
    return ENTRY_BYTES + len(name) + len(value or b"")
