"""How record batches lie in a segment: Arrow IPC messages in a row, each with its place and checksum.

A segment is a file (a valid Arrow IPC stream) or, when small, a value inside the index.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from penstock.core.disk import sync_folder
from penstock.core.errors import CorruptData, DiskFull, StoreUnavailable

SUFFIX = ".arrow"
_STREAM_END = pa.py_buffer(b"\xff\xff\xff\xff\x00\x00\x00\x00")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one batch's message lies in its segment, and the CRC-32 of its bytes."""

    position: int
    length: int
    crc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A segment before it is written: its bytes, and the place of each partition's batch."""

    buffers: tuple[pa.Buffer, ...]
    places: Mapping[int, Place]
    bytes: int


def encode(schema: pa.Schema, batches: Mapping[int, pa.RecordBatch]) -> Encoded:
    """One message per partition, between a schema and an end marker, so that any Arrow tool reads it."""
    head = schema.serialize()
    buffers, places, position = [head], {}, head.size
    for partition, batch in batches.items():
        message = batch.serialize()
        places[partition] = Place(position=position, length=message.size, crc=zlib.crc32(message))
        buffers.append(message)
        position += message.size
    return Encoded(buffers=(*buffers, _STREAM_END), places=places, bytes=position + _STREAM_END.size)


def segment_path(folder: Path, segment: int) -> Path:
    """Segment ids are never given twice, so a name is enough to tell garbage from data."""
    return folder / f"{segment:012d}{SUFFIX}"


def write_segment(path: Path, encoded: Encoded, fault: Callable[[str], None]) -> None:
    """Durable when it returns: the bytes and the name. After a failure there is no file."""
    with translated(path):
        try:
            fault("write:before")
            with path.open("xb") as file:
                for buffer in encoded.buffers:
                    file.write(buffer)
                file.flush()
                fault("write:after")
                os.fsync(file.fileno())
            sync_folder(path.parent)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        fault("sync:after")


def read_batch(schema: pa.Schema, place: Place, *, path: Path, inline: bytes | None) -> pa.RecordBatch:
    """The whole batch at a place, checked against its checksum; files are mapped, not copied."""
    where = str(path) if inline is None else f"{path.parent.name}/index.db segment {path.stem}"
    message = (
        _map(path, place) if inline is None else pa.py_buffer(inline).slice(place.position, place.length)
    )
    if message.size != place.length or zlib.crc32(message) != place.crc:
        raise _damaged(
            where, f"the {place.length} bytes at {place.position} do not have checksum {place.crc:08x}"
        )
    try:
        return pa.ipc.read_record_batch(pa.ipc.read_message(message), schema)
    except pa.ArrowInvalid as error:
        raise _damaged(where, f"its bytes are as they were written, but no record batch: {error}") from error


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Name what a failure of the file system means to us."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"the disk is full: {path.name} could not be written",
                why=str(error),
                fix="free some space; nothing was half-written and the same publish may be repeated",
            ) from error
        raise StoreUnavailable(
            f"{path} could not be read or written",
            why=str(error),
            fix="look at the disk and the folder's permissions, then try again",
        ) from error


def _map(path: Path, place: Place) -> pa.Buffer:
    with translated(path):
        try:
            bytes_there = path.stat().st_size
        except FileNotFoundError as error:
            raise _damaged(str(path), "the file is gone") from error
        if bytes_there < place.position + place.length:
            raise _damaged(str(path), f"the file was cut off at {bytes_there} bytes")
        with pa.memory_map(str(path), "r") as mapped:
            mapped.seek(place.position)
            return mapped.read_buffer(place.length)


def _damaged(where: str, why: str) -> CorruptData:
    return CorruptData(
        f"segment {where} is damaged",
        why=why,
        fix="restore it from a backup and restart the task; nothing was skipped or guessed",
    )
