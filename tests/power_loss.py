"""A disk that forgets what was not synced: every write, sync and cut of SQLite's files is recorded as it happens,
and `disk_after` builds what a machine may find after its power failed at any moment of that record.

The recorder stands between SQLite and its own way to the disk (a VFS, registered through the same library that
Python's `sqlite3` uses), so the code under test is not touched. Files that Python writes itself count as synced
with what they hold when `os.fsync` is called.

A name that Python's code gives, to a new file or by renaming, is durable when the name's folder was synced after
it; until then the old name may be found, or none. Not modelled: names of folders, and names that SQLite gives,
which syncs the folder itself.
"""

from __future__ import annotations

import ctypes as c
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

SECTOR = 512  # what a disk writes whole
SHARED_MEMORY = "-shm"  # of SQLite: made anew from the log beside it


@dataclass(frozen=True, slots=True)
class Write:
    path: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Cut:
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Sync:
    path: str
    whole: bytes | None = None  # of a file that SQLite did not write: all of it


@dataclass(frozen=True, slots=True)
class Delete:
    path: str


@dataclass(frozen=True, slots=True)
class Rename:
    path: str
    new: str


@dataclass(frozen=True, slots=True)
class SyncFolder:
    path: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Somebody was told that it is done, whatever `what` is."""

    what: Any


Event = Write | Cut | Sync | Delete | Rename | SyncFolder | Acknowledged


@dataclass(frozen=True, slots=True)
class _Name:
    """A name that may be lost: by the sync of which folder it lasts, and what is found without it."""

    folder: str
    before: str | None


def disk_after(
    events: Sequence[Event], *, before: Path, folder: Path, into: Path, rng: random.Random
) -> None:
    """What lies in `folder` when the power fails after these events, written to `into`.

    `before` is a copy of the folder as it was, all of it durable, when the record began. Of what was not synced
    each write is there, or not, or some of its sectors are.
    """
    durable = {str(folder / path.relative_to(before)): path.read_bytes() for path in _files(before)}
    pending: dict[str, list[Write | Cut]] = {}
    names: dict[str, list[_Name]] = {}  # of each file that may be found under another name, oldest first
    for event in events:
        match event:
            case Write(path) | Cut(path):
                pending.setdefault(path, []).append(event)
            case Sync(path, None):
                durable[path] = _applied(durable.get(path, b""), pending.pop(path, []))
            case Sync(path, whole):
                if path not in durable:
                    names[path] = [_Name(os.path.dirname(path), None)]
                durable[path] = whole
            case Rename(path, new):
                for old in [one for one in durable if one == path or one.startswith(f"{path}/")]:
                    moved = new + old.removeprefix(path)
                    durable[moved] = durable.pop(old)
                    names[moved] = [*names.pop(old, []), _Name(os.path.dirname(new), old)]
            case SyncFolder(folder_):
                # What was done to a name before is on disk with it, or does not matter any more.
                for path, found in names.items():
                    last = max((n for n, name in enumerate(found) if name.folder == folder_), default=-1)
                    names[path] = found[last + 1 :]
            case Delete(path):
                durable.pop(path, None)
                pending.pop(path, None)
    for path in sorted({*durable, *pending}):
        if path.endswith(SHARED_MEMORY):
            continue
        known: str | None = path
        for name in reversed(names.get(path, [])):
            if rng.random() < 0.5:
                break
            known = name.before
        if known is None:
            continue
        left = [kept for event in pending.get(path, []) for kept in _what_is_left(event, rng)]
        target = into / Path(known).relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(_applied(durable.get(path, b""), left))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(SHARED_MEMORY)]


def _applied(content: bytes, events: Sequence[Write | Cut]) -> bytes:
    found = bytearray(content)
    for event in events:
        match event:
            case Write(_, offset, data):
                found.extend(bytes(max(0, offset - len(found))))
                found[offset : offset + len(data)] = data
            case Cut(_, size):
                del found[size:]
    return bytes(found)


def _what_is_left(event: Write | Cut, rng: random.Random) -> list[Write | Cut]:
    fate = rng.choice(("lost", "there", "torn"))
    if fate == "lost":
        return []
    if fate == "there" or isinstance(event, Cut):
        return [event]
    sectors = range(0, len(event.data), SECTOR)
    return [
        Write(event.path, event.offset + at, event.data[at : at + SECTOR])
        for at in sectors
        if rng.random() < 0.5
    ]


# --- the recorder: SQLite's structures as its header file has them

_CLOSE, _WRITE, _TRUNCATE, _SYNC = 0, 2, 3, 4  # places among the methods of a file
_VFS_TAIL = 13  # what stands behind xDelete
_OK = 0


class _Methods(c.Structure):
    _fields_ = (("version", c.c_int), ("calls", c.c_void_p * 18))


class _File(c.Structure):
    _fields_ = (("methods", c.POINTER(_Methods)),)


class _Vfs(c.Structure):
    _fields_ = (
        ("version", c.c_int),
        ("file_size", c.c_int),
        ("path_max", c.c_int),
        ("next", c.c_void_p),
        ("name", c.c_char_p),
        ("app_data", c.c_void_p),
        ("open", c.c_void_p),
        ("delete", c.c_void_p),
        ("tail", c.c_void_p * _VFS_TAIL),
    )


# A name is a pointer: SQLite keeps it, and reads beyond its end.
_OPEN_CALL = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_void_p, c.c_int, c.POINTER(c.c_int))
_DELETE_CALL = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_char_p, c.c_int)
_FILE_CALLS = {
    _CLOSE: c.CFUNCTYPE(c.c_int, c.c_void_p),
    _WRITE: c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_int, c.c_int64),
    _TRUNCATE: c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_int64),
    _SYNC: c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_int),
}


class Recorder:
    """Records what happens to files below a folder, while `recording` lasts."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._folder: str | None = None
        self._paths: dict[int, str] = {}
        self._library = c.CDLL(_library_of_sqlite())
        self._library.sqlite3_vfs_find.restype = c.POINTER(_Vfs)
        self._library.sqlite3_vfs_register.argtypes = (c.c_void_p, c.c_int)
        self._original = self._library.sqlite3_vfs_find(None)
        # Whatever SQLite may call lives as long as the process: connections outlive a test.
        self._kept: list[Any] = [_OPEN_CALL(self._open), _DELETE_CALL(self._delete)]
        self._methods: dict[int, Any] = {}
        self._vfs = _Vfs.from_buffer_copy(self._original.contents)
        self._vfs.next, self._vfs.name = None, b"recorded"
        self._vfs.open, self._vfs.delete = (c.cast(call, c.c_void_p).value for call in self._kept)

    def acknowledge(self, what: Any) -> None:
        self.events.append(Acknowledged(what))

    @contextmanager
    def recording(self, folder: Path) -> Iterator[list[Event]]:
        """Files that are opened meanwhile, below this folder."""
        self.events, self._folder, fsync = [], str(folder), os.fsync
        rename, replace = os.rename, os.replace

        def recorded(descriptor: int) -> None:
            fsync(descriptor)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if path.startswith(str(folder)):
                is_file = os.path.isfile(path)
                self.events.append(Sync(path, Path(path).read_bytes()) if is_file else SyncFolder(path))

        def renamed(call: Callable[..., None], old: Any, new: Any) -> None:
            call(old, new)
            if os.fspath(new).startswith(str(folder)):
                self.events.append(Rename(os.fspath(old), os.fspath(new)))

        self._library.sqlite3_vfs_register(c.addressof(self._vfs), 1)
        os.fsync = recorded
        os.rename, os.replace = partial(renamed, rename), partial(renamed, replace)
        try:
            yield self.events
        finally:
            os.fsync, os.rename, os.replace, self._folder = fsync, rename, replace, None
            self._library.sqlite3_vfs_register(self._original, 1)

    def _open(self, _vfs: Any, name: int | None, file: int, flags: int, out: Any) -> int:
        opened: int = c.cast(self._original.contents.open, _OPEN_CALL)(self._original, name, file, flags, out)
        path = "" if name is None else c.string_at(name).decode()
        if opened == _OK and self._folder and path.startswith(self._folder):
            self._paths[file] = path
            found = _File.from_address(file)
            found.methods = c.pointer(self._recorded(found.methods))
        return opened

    def _recorded(self, original: Any) -> _Methods:
        """These methods, with four of them recorded."""
        address = c.addressof(original.contents)
        if address not in self._methods:
            methods = _Methods.from_buffer_copy(original.contents)
            calls = {place: call(methods.calls[place]) for place, call in _FILE_CALLS.items()}
            new = {
                _CLOSE: lambda file: self._close(calls, file),
                _WRITE: lambda file, data, size, at: self._write(calls, file, data, size, at),
                _TRUNCATE: lambda file, size: self._truncate(calls, file, size),
                _SYNC: lambda file, flags: self._sync(calls, file, flags),
            }
            for place, call in new.items():
                self._kept.append(_FILE_CALLS[place](call))
                methods.calls[place] = c.cast(self._kept[-1], c.c_void_p).value
            self._methods[address] = methods
        found: _Methods = self._methods[address]
        return found

    def _close(self, calls: Any, file: int) -> int:
        self._paths.pop(file, None)
        closed: int = calls[_CLOSE](file)
        return closed

    def _write(self, calls: Any, file: int, data: int, size: int, at: int) -> int:
        self.events.append(Write(self._paths[file], at, c.string_at(data, size)))
        written: int = calls[_WRITE](file, data, size, at)
        return written

    def _truncate(self, calls: Any, file: int, size: int) -> int:
        self.events.append(Cut(self._paths[file], size))
        cut: int = calls[_TRUNCATE](file, size)
        return cut

    def _sync(self, calls: Any, file: int, flags: int) -> int:
        synced: int = calls[_SYNC](file, flags)
        if synced == _OK:
            self.events.append(Sync(self._paths[file]))
        return synced

    def _delete(self, _vfs: Any, name: bytes, directory: int) -> int:
        deleted: int = c.cast(self._original.contents.delete, _DELETE_CALL)(self._original, name, directory)
        if deleted == _OK and self._folder and name.decode().startswith(self._folder):
            self.events.append(Delete(name.decode()))
        return deleted


def _library_of_sqlite() -> str:
    """The one that Python's `sqlite3` has loaded into this process."""
    import sqlite3

    sqlite3.connect(":memory:").close()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libsqlite3" in line:
            return line.split(maxsplit=5)[-1]
    pytest.skip("this Python has SQLite built in: nobody can stand between it and the disk")
