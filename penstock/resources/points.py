"""How numbers of minutes are kept: 16 bits each, unknown apart from zero, packed by the day. Pure: no I/O.

A code holds the exponent and the first bits of the mantissa, so that a number is kept to the same share of
itself whatever its unit; whole numbers as large as a count of tasks are kept exactly.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import CorruptData
from penstock.resources.frames import METRICS, Points

Codes = NDArray[np.uint16]
Bits = NDArray[np.uint32]

UNKNOWN, ZERO, _FIRST = 0, 1, 2
_EXPONENT_MIN = -30  # smaller numbers are zero: a record in thirty years
_MANTISSA = 23  # of a float of 32 bits
DAY = 1440  # minutes
# Off by at most 1/256 of itself: far below what a minute differs from the next. Counts are kept to 1/1024.
BITS_COARSE, BITS_FINE = 7, 9
COUNTS = frozenset({"task_count", "restarts", "oom", "exceptions"})
BITS: Bits = np.array([BITS_FINE if name in COUNTS else BITS_COARSE for name in METRICS], np.uint32)

_CONSTANT, _PACKED = 0, 1
_LEVEL = 1  # of zlib: the next ones take several times as long for 2 %


COLUMNS = {name: place for place, name in enumerate(METRICS)}


def bits_of(metrics: Sequence[str]) -> Bits:
    """How fine these are kept."""
    return BITS[[COLUMNS[name] for name in metrics]]


def encode(values: Points, bits: Bits) -> Codes:
    """Numbers as codes; `bits` along the last axis. What is no number, or below zero, is unknown."""
    with np.errstate(over="ignore", invalid="ignore"):
        floats = np.abs(np.ascontiguousarray(values, np.float32))  # there is a zero with a minus
        is_known = np.isfinite(values) & (values >= 0)
    raw = floats.view(np.uint32).astype(np.int64)
    drop = np.int64(_MANTISSA) - bits
    code = ((raw + (np.int64(1) << (drop - 1))) >> drop) - (np.int64(127 + _EXPONENT_MIN) << bits) + _FIRST
    last = np.minimum((np.int64(128 - _EXPONENT_MIN) << bits) + _FIRST - 1, 2**16 - 1)  # beyond is infinity
    code = np.where(code < _FIRST, ZERO, np.minimum(code, last))
    return np.where(is_known, code, UNKNOWN).astype(np.uint16)


def decode(codes: Codes, bits: Bits) -> Points:
    """Codes as numbers, unknown ones as NaN; `bits` along the axes that they have."""
    found: Points = _NUMBERS[(bits == BITS_FINE).astype(np.intp), codes]
    return found


def _numbers(bits: int) -> Points:
    """What every code means."""
    codes = np.arange(2**16, dtype=np.int64)
    raw = (np.maximum(codes - _FIRST, 0) + ((127 + _EXPONENT_MIN) << bits)) << (_MANTISSA - bits)
    found: Points = np.minimum(raw, 0x7F800000).astype(np.uint32).view(np.float32).astype(np.float64)
    found[ZERO], found[UNKNOWN] = 0.0, np.nan
    return found


_NUMBERS = np.stack([_numbers(BITS_COARSE), _numbers(BITS_FINE)])


def pack(codes: Codes) -> bytes:
    """Codes of one metric that follow each other: their differences, the low bytes first, compressed."""
    first = int(codes[0])
    if (codes == first).all():
        return struct.pack("<BH", _CONSTANT, first)
    steps = np.diff(codes, prepend=np.uint16(0)).view(np.int16)
    folded = ((steps << 1) ^ (steps >> 15)).view(np.uint16)
    planes = np.concatenate([folded & 0xFF, folded >> 8]).astype(np.uint8)
    return bytes([_PACKED]) + zlib.compress(planes.tobytes(), _LEVEL)


def unpack(packed: Sequence[bytes], count: int) -> Codes:
    """Several of `pack`, each of `count` codes: a row each."""
    planes = b"".join([_planes(item, count) for item in packed])
    folded = np.frombuffer(planes, np.uint8).reshape(len(packed), 2, count)
    whole = folded[:, 0].astype(np.uint16) | (folded[:, 1].astype(np.uint16) << 8)
    steps = (whole >> 1) ^ (np.uint16(0) - (whole & 1))
    return np.cumsum(steps, axis=1, dtype=np.uint16)


def _planes(packed: bytes, count: int) -> bytes:
    try:
        if packed[0] == _CONSTANT:
            (first,) = struct.unpack_from("<xh", packed)
            folded = ((first << 1) ^ (first >> 15)) & 0xFFFF
            rest = bytes(count - 1)
            return bytes([folded & 0xFF]) + rest + bytes([folded >> 8]) + rest
        planes = zlib.decompress(packed[1:])
    except (zlib.error, struct.error, IndexError) as error:
        raise _damaged(str(error)) from error
    if packed[0] != _PACKED or len(planes) != 2 * count:
        raise _damaged(f"form {packed[0]}, {len(planes)} bytes for {count} minutes")
    return planes


def pack_minute(slots: Sequence[int], columns: Sequence[int], codes: Codes) -> bytes:
    """One minute of some jobs: `codes[job, metric]`, and which jobs and metrics they are."""
    head = np.array([len(slots), len(columns), *slots, *columns], np.uint16)
    return zlib.compress(head.tobytes() + np.ascontiguousarray(codes.T).tobytes(), _LEVEL)


def unpack_minute(packed: bytes) -> tuple[NDArray[np.intp], NDArray[np.intp], Codes]:
    """(slots, columns, codes[job, metric])."""
    try:
        words = np.frombuffer(zlib.decompress(packed), np.uint16)
        jobs, metrics = int(words[0]), int(words[1])
        codes = words[2 + jobs + metrics :].reshape(metrics, jobs).T
    except (zlib.error, ValueError, IndexError) as error:
        raise _damaged(str(error)) from error
    slots, columns = words[2 : 2 + jobs], words[2 + jobs : 2 + jobs + metrics]
    return slots.astype(np.intp), columns.astype(np.intp), codes


def _damaged(why: str) -> CorruptData:
    return CorruptData(
        "metrics that were kept cannot be read",
        why=why,
        fix="restore the database from a copy, or delete the rows of metric_blocks and metric_minutes",
    )
