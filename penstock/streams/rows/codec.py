"""Rows as database records and back, each with a checksum over what it means.

Pure: CorruptData if a checksum does not match.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from zlib import crc32

from penstock.core.clock import Millis
from penstock.core.errors import CorruptData
from penstock.streams.rows.row_store import (
    Intent,
    IntervalRef,
    IntervalRow,
    Kept,
    OutboxRow,
    ScannedState,
    ScannedTimer,
    TimerRow,
)

_KEPT = "kept"  # among the counters

RowRecord = tuple[str, int, int, int, int, str, Millis, Millis, str, str, str, str, int]
TimerRecord = tuple[str, str, Millis, Millis, int, int, int]


def record_of_row(row: IntervalRow) -> RowRecord:
    """The interval's row, mappings as JSON."""
    fields = (
        row.birth,
        row.generation,
        row.shard_epoch,
        row.token,
        row.version,
        _json(row.offsets),
        row.input_low,
        row.output_low,
        _json(row.event_time_max),
        _json(row.next_seq),
        _json(_json_of_intent(row.intent)),
        _json({**row.counters, **_kept_json(row)}),
    )
    return *fields, _crc(fields)


def row_of(ref: IntervalRef, record: RowRecord) -> IntervalRow:
    """The row behind a record of `record_of_row`."""
    _check(ref, "the interval's row", _crc(record[:-1]), record[-1])
    birth, generation, shard_epoch, token, version, offsets, input_low, output_low, *rest, _ = record
    event_time_max, next_seq, intent, counters = (json.loads(str(text)) for text in rest)
    counted = counters.pop(_KEPT, None)
    return IntervalRow(
        birth=birth,
        generation=generation,
        shard_epoch=shard_epoch,
        token=token,
        version=version,
        offsets=json.loads(offsets),
        input_low=input_low,
        output_low=output_low,
        event_time_max=event_time_max,
        next_seq=next_seq,
        intent=_intent_of_json(intent),
        counters=counters,
        kept=_kept_of_json(counted, version),
    )


def record_of_timer(timer: TimerRow) -> TimerRecord:
    """One timer."""
    fields = (timer.key, timer.tag, timer.at_ms, timer.hold_ms, int(timer.late), int(timer.wall))
    return *fields, _timer_crc(fields)


def timer_of(ref: IntervalRef, record: TimerRecord) -> TimerRow:
    """The timer behind a record of `record_of_timer`."""
    key, tag, at_ms, hold_ms, late, wall, crc = record
    _check(ref, f"the timer {tag!r} of key {key!r}", _timer_crc(record[:-1]), crc)
    return TimerRow(key=key, tag=tag, at_ms=at_ms, hold_ms=hold_ms, late=bool(late), wall=bool(wall))


def record_of_outbox(row: OutboxRow) -> tuple[Any, ...]:
    """One outbox row without its id, which the store gives."""
    fields = (row.category, row.category_birth, row.partition, row.first_seq, row.count, row.ts_min)
    return *fields, row.payload, crc32(row.payload, _crc(fields))


def outbox_of(ref: IntervalRef, record: tuple[Any, ...]) -> OutboxRow:
    """The outbox row behind an id and a record of `record_of_outbox`."""
    identity, *fields, payload, crc = record
    _check(ref, f"outbox row {identity}", crc32(payload, _crc(tuple(fields))), crc)
    category, category_birth, partition, first_seq, count, ts_min = fields
    return OutboxRow(
        id=identity,
        category=category,
        category_birth=category_birth,
        partition=partition,
        first_seq=first_seq,
        count=count,
        ts_min=ts_min,
        payload=payload,
    )


def state_crc(key: str, value: bytes) -> int:
    """The checksum of one key's state: a value under the wrong key is damage, too."""
    return crc32(value, crc32(key.encode()))


def state_of(ref: IntervalRef, key: str, value: bytes, crc: int) -> bytes:
    """The value, if its checksum matches."""
    _check(ref, f"the state of key {key!r}", state_crc(key, value), crc)
    return value


def _check(ref: IntervalRef, what: str, expected: int, found: int) -> None:
    if expected != found:
        raise CorruptData(
            f"{what} of {ref.job}[{ref.partition}] is damaged",
            why=f"its checksum is {expected}, the one stored with it is {found}",
            fix="restore the interval's rows from a backup; nothing was processed",
        )


def _crc(fields: tuple[Any, ...]) -> int:
    return crc32(repr(fields).encode())


def _timer_crc(fields: tuple[Any, ...]) -> int:
    # A timer that is not of the wall has the checksum it had before there were others: files of the first
    # format need no new ones.
    return _crc(fields if fields[-1] else fields[:-1])


def _json(value: Mapping[str, Any] | None) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _kept_json(row: IntervalRow) -> dict[str, list[int | None]]:
    kept = row.kept
    return {} if kept is None else {_KEPT: [row.version, kept.rows, kept.bytes, kept.keys]}


def _kept_of_json(value: list[Any] | None, version: int) -> Kept | None:
    # A version of Penstock that does not count hands on what it found: that is then of an older version of
    # the row.
    if value is None or value[0] != version:
        return None
    return Kept(rows=value[1], bytes=value[2], keys=value[3])


def _json_of_intent(intent: Intent | None) -> dict[str, Any] | None:
    if intent is None:
        return None
    ranges = {birth: list(bounds) for birth, bounds in intent.ranges.items()}
    return {"ranges": ranges, "package": intent.package, "plan": intent.plan, "plan_hash": intent.plan_hash}


def _intent_of_json(value: dict[str, Any] | None) -> Intent | None:
    if value is None:
        return None
    ranges = {birth: (int(start), int(end)) for birth, (start, end) in value["ranges"].items()}
    return Intent(ranges=ranges, package=value["package"], plan=value["plan"], plan_hash=value["plan_hash"])


PAGE_BYTES = 4 * 2**20


def key_after(key: str) -> str:
    """The smallest key above this one."""
    return key + "\x00"


def scanned_states(ref: IntervalRef, records: Iterable[tuple[str, bytes, int]]) -> Iterator[ScannedState]:
    """States of records (key, value, checksum), until a page is full; the first one always."""
    size = 0
    for key, value, crc in records:
        try:
            yield ScannedState(key=key, value=state_of(ref, key, value, crc))
        except CorruptData as error:
            yield ScannedState(key=key, value=None, damage=f"{error.what}: {error.why}")
        size += len(value)
        if size >= PAGE_BYTES:
            return


def scanned_timers(ref: IntervalRef, records: Iterable[tuple[Any, ...]]) -> Iterator[ScannedTimer]:
    """Timers of records as `record_of_timer` makes them."""
    for record in records:
        key, tag, at_ms, hold_ms, late, wall, crc = record
        try:
            timer = timer_of(ref, (key, tag, at_ms, hold_ms, late, wall, crc))
            yield ScannedTimer(key=key, tag=tag, timer=timer)
        except CorruptData as error:
            yield ScannedTimer(key=key, tag=tag, timer=None, damage=f"{error.what}: {error.why}")
