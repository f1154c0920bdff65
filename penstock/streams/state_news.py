"""What a step changed, told to other workers of the machine: the states they keep stay true (MillWheel 8.3).

Spark gives the batches of an interval to its Python workers in turn. Each keeps the states it knows, of one
version; what others wrote since is a few changes in a file of the interval, from one version to another. A
worker that finds no unbroken way from its version to the last one knows nothing and reads the rows, as if
there were no file: losing it, or a part of it, costs time and never truth.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.streams.rows.row_store import IntervalRef

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
    """How far somebody has read, in the file that begins so: one that is begun anew begins otherwise."""

    head: bytes = b""
    position: int = 0


_DECODER = msgspec.msgpack.Decoder(Change)


class StateNews:
    """Files in a folder that the workers of one machine share; of no use to anybody else, or later."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder, self._bytes_max = folder, bytes_max

    def tell(self, ref: IntervalRef, change: Change) -> None:
        """Tell what a step of ours wrote. More than anybody would keep is not told."""
        if _size_of(change.states) > self._bytes_max:
            return
        data = msgspec.msgpack.encode(change)
        data = _HEAD.pack(len(data), zlib.crc32(data)) + data
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._append(self._path(ref), data)
        except OSError:
            pass  # a full disk, say: whoever misses this reads the rows

    def _append(self, path: Path, data: bytes) -> None:
        if _size_at(path) + len(data) > max(FILE_SHARE * self._bytes_max, FILE_BYTES_MIN):
            new = path.with_suffix(f".{os.getpid()}")
            new.write_bytes(data)
            new.replace(path)
            return
        # One write to the end: of two workers that tell at once neither damages the other's.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def end(self, ref: IntervalRef) -> Place:
        """Where the news are that come next, for whoever knows nothing yet."""
        try:
            with self._path(ref).open("rb") as file:
                return Place(file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size)
        except OSError:
            return Place()

    def since(self, ref: IntervalRef, place: Place) -> tuple[list[Change], Place]:
        """What was told after this place, in order, and how far that is."""
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


def _size_at(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _size_of(states: Mapping[str, bytes | None]) -> int:
    return sum(len(name) + len(value or b"") for name, value in states.items())
