"""What an interval promised to its outputs and has not sent: looked at, and sent, by whoever ends its job."""

from __future__ import annotations

from penstock.streams.bus.log import LOW_MIN, Log
from penstock.streams.outbox import publish_outbox
from penstock.streams.rows.row_store import IntervalRef, RowStore, Snapshot


def promised(ref: IntervalRef, *, rows: RowStore) -> set[str]:
    """Categories that the outbox, or the intent of a stateless step, still has something for."""
    found = _at_rest(ref, rows)
    categories = {row.category for row in found.outbox}
    if found.row.intent is not None:
        categories |= {output["category"] for output in found.row.intent.plan.get("outputs", ())}
    return categories


def deliver(ref: IntervalRef, *, rows: RowStore, log: Log) -> None:
    """Send the outbox of an interval that nobody works on any more. Requires: its tasks ended or are fenced.

    An intent is left: its range was never committed, so none of its records counts as done.
    """
    found = _at_rest(ref, rows)
    if not found.outbox:
        return
    token = found.row.token
    rows.delivered(ref, token=token, ids=publish_outbox(found.outbox, log=log, birth=ref.birth, token=token))


def _at_rest(ref: IntervalRef, rows: RowStore) -> Snapshot:
    """The interval as it stands; Fenced if an owner takes it at this very moment, then look again."""
    return rows.snapshot(ref, token=rows.peek(ref).token, keys=(), timers_up_to=LOW_MIN)
