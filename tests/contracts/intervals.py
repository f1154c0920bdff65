"""An interval, and what is written to it, for the contracts of row stores."""

from __future__ import annotations

from dataclasses import replace

from penstock.streams.rows.row_store import (
    Changes,
    IntervalRef,
    IntervalRow,
    OutboxRow,
    RowStore,
    TimerRow,
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
