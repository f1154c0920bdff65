"""Rows for people who look: damaged ones are named, not hidden, and a page has a bounded size.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from penstock.core.errors import CorruptData
from penstock.streams.rows import row_codec
from penstock.streams.rows.row_store import IntervalRef, ScannedState, ScannedTimer

PAGE_BYTES = 4 * 2**20


def key_after(key: str) -> str:
    """The smallest key above this one."""
    return key + "\x00"


def scanned_states(ref: IntervalRef, records: Iterable[tuple[str, bytes, int]]) -> Iterator[ScannedState]:
    """States of records (key, value, checksum), until a page is full; the first one always."""
    size = 0
    for key, value, crc in records:
        try:
            yield ScannedState(key=key, value=row_codec.state_of(ref, key, value, crc))
        except CorruptData as error:
            yield ScannedState(key=key, value=None, damage=f"{error.what}: {error.why}")
        size += len(value)
        if size >= PAGE_BYTES:
            return


def scanned_timers(ref: IntervalRef, records: Iterable[tuple[Any, ...]]) -> Iterator[ScannedTimer]:
    """Timers of records as `row_codec.record_of_timer` makes them."""
    for record in records:
        key, tag, at_ms, hold_ms, late, wall, crc = record
        try:
            timer = row_codec.timer_of(ref, (key, tag, at_ms, hold_ms, late, wall, crc))
            yield ScannedTimer(key=key, tag=tag, timer=timer)
        except CorruptData as error:
            yield ScannedTimer(key=key, tag=tag, timer=None, damage=f"{error.what}: {error.why}")
