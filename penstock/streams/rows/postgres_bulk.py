"""Many rows in few statements: what a step reads and writes on PostgreSQL, as arrays of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psycopg

from penstock.core.clock import Millis
from penstock.streams.bus.log import LOW_MAX
from penstock.streams.record_names import PREFIX, PREFIX_END
from penstock.streams.rows import postgres_tables as sql
from penstock.streams.rows import row_codec
from penstock.streams.rows.row_changes import NOTHING
from penstock.streams.rows.row_store import Changes, IntervalRef, Kept

# So that each statement stays far below the time that one may take.
ROWS_PER_STATEMENT = 10_000
BYTES_PER_STATEMENT = 8 * 2**20
# What fits into a socket at once: psycopg waits for an answer before it has sent the whole of a larger one.
PIPELINE_BYTES = 16 * 2**10
ROWS_PER_COUNT = 100_000


def keys_of(keys: Sequence[str]) -> Iterator[list[bytes]]:
    """Keys as the table has them, in bounded lists."""
    for (chunk,) in lists_of([(key.encode(),) for key in keys]):
        yield chunk


def fits_pipeline(keys: Sequence[str]) -> bool:
    """True if these may be sent together with other statements. Pure."""
    return sum(4 * len(key) + 8 for key in keys) <= PIPELINE_BYTES


def lists_of(records: Sequence[tuple[Any, ...]]) -> Iterator[list[list[Any]]]:
    """The columns of some records, in chunks of bounded size. Pure."""
    first, size = 0, 0
    for number, record in enumerate(records):
        weight = sum(len(part) for part in record if isinstance(part, bytes))
        if number > first and (size + weight > BYTES_PER_STATEMENT or number - first >= ROWS_PER_STATEMENT):
            yield _columns(records[first:number])
            first, size = number, 0
        size += weight
    if first < len(records):
        yield _columns(records[first:])


def read_states(ref: IntervalRef, cursors: Iterable[psycopg.Cursor[tuple[Any, ...]]]) -> dict[str, bytes]:
    """The states that some statements found, each once."""
    states: dict[str, bytes] = {}
    for cursor in cursors:
        for raw, value, crc in cursor:
            key = text_of(raw)
            states[key] = row_codec.state_of(ref, key, value, crc)
    return states


def write_changes(connection: psycopg.Connection[Any], interval: int, changes: Changes) -> Millis:
    """Write all but the interval's row; returns the oldest work there is afterwards.

    Not in a pipeline: a worker that is paused between two of these statements is idle in its transaction, and
    the server ends that. In one it would wait for the rest for ever, with the row locked.
    """
    for statement, values in _statements(interval, changes):
        connection.execute(statement, values)
    return oldest_work(connection, interval)


def oldest_work(connection: psycopg.Connection[Any], interval: int) -> Millis:
    """The oldest undelivered production or hold."""
    found = connection.execute(sql.OLDEST_WORK, (interval, interval)).fetchone()
    assert found is not None
    return min(LOW_MAX if oldest is None else oldest for oldest in found)


def sizes_of(connection: psycopg.Connection[Any], interval: int, keys: Sequence[str]) -> Kept:
    """How much these keep now."""
    found = NOTHING
    for chunk in keys_of(keys):
        found = _plus(found, connection.execute(sql.SIZE_STATES, (interval, chunk)).fetchone())
    return found


def count_all(connection: psycopg.Connection[Any], interval: int) -> Kept:
    """How much all of them keep: reads every state, in statements of bounded time."""
    found, start = NOTHING, b""
    while True:
        last = connection.execute(sql.PAGE_END, (interval, start, ROWS_PER_COUNT)).fetchone()
        end = None if last is None else last[0]
        values = (interval, start, end, end, PREFIX.encode(), PREFIX_END.encode())
        found = _plus(found, connection.execute(sql.COUNT_PAGE, values).fetchone())
        if end is None:
            return found
        start = end


def text_of(raw: bytes) -> str:
    """A key or tag; bytes that are no text become one that no checksum fits."""
    return raw.decode(errors="replace")


def _statements(interval: int, changes: Changes) -> Iterator[tuple[str, tuple[Any, ...]]]:
    kept = [
        (key.encode(), state, row_codec.state_crc(key, state))
        for key, state in sorted(changes.states.items())
        if state is not None
    ]
    for columns in lists_of(kept):
        yield sql.WRITE_STATES, (interval, *columns)
    for gone in keys_of(sorted(key for key, state in changes.states.items() if state is None)):
        yield sql.DELETE_STATES, (interval, gone)
    for columns in lists_of([(key.encode(), tag.encode()) for key, tag in changes.timers_deleted]):
        yield sql.DELETE_TIMERS, (*columns, interval)
    last = {(timer.key, timer.tag): timer for timer in changes.timers_set}  # no row twice in one statement
    records = (row_codec.record_of_timer(timer) for _, timer in sorted(last.items()))
    for columns in lists_of([(key.encode(), tag.encode(), *rest) for key, tag, *rest in records]):
        yield sql.WRITE_TIMERS, (interval, *columns)
    for out in changes.outbox:  # one for each partition of an output, and their order is their ids'
        yield sql.WRITE_OUTBOX, (interval, *row_codec.record_of_outbox(out))


def _plus(kept: Kept, counted: tuple[int, int] | None) -> Kept:
    assert counted is not None, "an aggregate has one row"
    return Kept(rows=kept.rows + counted[0], bytes=kept.bytes + counted[1])


def _columns(records: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    return [list(column) for column in zip(*records, strict=True)]
