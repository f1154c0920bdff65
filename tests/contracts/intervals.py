"""An interval, and what is written to it, for the contracts of row stores."""

from __future__ import annotations

from dataclasses import replace

from penstock.streams.rows.row_store import (
    Changes,
    IntervalRef,
    IntervalRow,
    OutboxRow,
    RowStore,
    StoredSize,
    TimerRow,
    is_of_ids,
    key_after,
)

REF = IntervalRef(job="z.count", job_birth="j1", partition=3, birth="i1")


def an_outbox_row(*, first: int = 1, count: int = 2, ts_min: int = 500, partition: int = 0) -> OutboxRow:
    return OutboxRow(
        id=0,
        category="out",
        category_birth="o1",
        partition=partition,
        first_seq=first,
        count=count,
        ts_min=ts_min,
        payload=b"\x00payload\xff",
    )


def a_timer(key: str = "k", tag: str = "t", at_ms: int = 1000, **others: object) -> TimerRow:
    return replace(TimerRow(key=key, tag=tag, at_ms=at_ms, hold_ms=at_ms - 1), **others)


def commit(rows: RowStore, row: IntervalRow, **changes: object) -> IntervalRow:
    return rows.commit(REF, token=row.token, version=row.version, changes=Changes(**changes))


def full_count(rows: RowStore, ref: IntervalRef = REF) -> tuple[int, int]:
    """State rows of keys and their bytes, one by one: what the totals in the row must say."""
    count = size = 0
    with rows.view(ref) as moment:
        start = ""
        while page := moment.states(start=start, limit=1000):
            start = key_after(page[-1].key)
            own = [found for found in page if not is_of_ids(found.key)]
            count += len(own)
            size += sum(len(found.key.encode()) + len(found.value or b"") for found in own)
    return count, size


def said(kept: StoredSize | None) -> tuple[int, int] | None:
    """What a row says of them."""
    return None if kept is None else (kept.rows, kept.bytes)
