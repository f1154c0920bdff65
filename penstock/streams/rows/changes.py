"""What each write does to an interval's row: who may write, and what the row is afterwards.

Pure: every implementation of the row store asks here, so that they cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.core.clock import Millis
from penstock.core.errors import Fenced, IntervalMissing, VersionMoved
from penstock.streams.rows.row_store import (
    PREFIX,
    Changes,
    IntervalRef,
    IntervalRow,
    Kept,
    counter_name,
    first_sequence,
    is_of_ids,
)

NOTHING = Kept(rows=0, bytes=0)


def new_row(ref: IntervalRef, offsets: Mapping[str, int], low: Millis) -> IntervalRow:
    """An interval nobody has owned yet."""
    return IntervalRow(
        birth=ref.birth,
        generation=0,
        shard_epoch=0,
        token=0,
        version=0,
        offsets=dict(offsets),
        input_low=low,
        output_low=low,
        event_time_max={},
        next_seq={},
        kept=NOTHING,
    )


def after_repeated_create(ref: IntervalRef, row: IntervalRow, offsets: Mapping[str, int]) -> IntervalRow:
    """The row with the inputs it did not know; the same object if it knew them all."""
    assert row.birth == ref.birth, "another birth lies in another place"
    unknown = {birth: offset for birth, offset in offsets.items() if birth not in row.offsets}
    if not unknown:
        return row
    return replace(row, offsets={**row.offsets, **unknown}, version=row.version + 1)


def after_acquire(ref: IntervalRef, row: IntervalRow, *, generation: int, shard_epoch: int) -> IntervalRow:
    """The row under its new owner; Fenced if a later one has it."""
    if (generation, shard_epoch) < (row.generation, row.shard_epoch):
        raise Fenced(
            f"interval {name_of(ref)} belongs to a later owner",
            why=f"asked with generation {generation} and shard epoch {shard_epoch}, "
            f"it stands at {row.generation} and {row.shard_epoch}",
            fix="nothing: the later owner goes on",
        )
    return replace(
        row, generation=generation, shard_epoch=shard_epoch, token=row.token + 1, version=row.version + 1
    )


def after_fence(row: IntervalRow, *, generation: int) -> IntervalRow:
    """The row without an owner of a smaller generation; the same object if that was so already."""
    if row.generation >= generation:
        return row
    return replace(row, generation=generation, shard_epoch=0, token=row.token + 1, version=row.version + 1)


def after_commit(
    row: IntervalRow, changes: Changes, *, oldest_work: Millis, unseen: Kept = NOTHING
) -> IntervalRow:
    """The row after a step. `oldest_work`: the oldest undelivered production or hold after this write.
    `unseen`: what stood under the names of `unseen_names` before it.
    """
    offsets = {**row.offsets, **(changes.offsets or {})}
    assert all(offsets[birth] >= offset for birth, offset in row.offsets.items()), "offsets never go back"
    input_low = row.input_low if changes.input_low is None else max(row.input_low, changes.input_low)
    counters = dict(row.counters)
    for name, count in changes.counters.items():
        counters[name] = counters.get(name, 0) + count
    intent = None if changes.clear_intent else row.intent
    return replace(
        row,
        version=row.version + 1,
        offsets=offsets,
        input_low=input_low,
        output_low=output_low_of(row, input_low, oldest_work),
        event_time_max={**row.event_time_max, **(changes.event_time_max or {})},
        next_seq=_next_seq(row, changes),
        intent=intent if changes.intent is None else changes.intent,
        counters=counters,
        kept=None if row.kept is None else _kept_after(row.kept, changes, unseen),
    )


def unseen_names(row: IntervalRow, changes: Changes) -> list[str]:
    """States that change and that the step did not read: their old sizes count, too."""
    if row.kept is None:
        return []
    before = changes.before
    return [name for name in changes.states if name not in before and not is_of_ids(name)]


def after_delivery(row: IntervalRow, *, oldest_work: Millis) -> IntervalRow:
    """The row once the bus has some of its outbox."""
    return replace(row, version=row.version + 1, output_low=output_low_of(row, row.input_low, oldest_work))


def output_low_of(row: IntervalRow, input_low: Millis, oldest_work: Millis) -> Millis:
    """Nothing on time will be produced before this."""
    return max(row.output_low, min(input_low, oldest_work))


def check_birth(ref: IntervalRef, birth: str | None) -> None:
    """A task opens, it never creates: absent or of another birth is an error, not an empty state."""
    if birth != ref.birth:
        raise IntervalMissing(
            f"interval {name_of(ref)} cannot be opened",
            why=f"it was never created, looked for was {ref.birth}"
            if birth is None
            else f"it was born as {birth}, looked for was {ref.birth}",
            fix="wait for the job's plan to create it; if rows were deleted by hand, restore them",
        )


def check_token(ref: IntervalRef, row: IntervalRow, token: int) -> None:
    """Only the owner of the last acquire may read to write, or write."""
    if row.token != token:
        raise Fenced(
            f"interval {name_of(ref)} has another owner now",
            why=f"this worker holds token {token}, the interval stands at {row.token}",
            fix="nothing: the other owner goes on",
        )


def check_version(ref: IntervalRef, row: IntervalRow, version: int) -> None:
    """What was decided on an older version is decided again."""
    if row.version != version:
        raise VersionMoved(
            f"interval {name_of(ref)} was written by a twin of this worker",
            why=f"this worker read version {version}, the interval stands at {row.version}",
            fix="nothing: the step reads again",
        )


def name_of(ref: IntervalRef) -> str:
    """How people call an interval."""
    return f"{ref.job}[{ref.partition}]"


def _kept_after(kept: Kept, changes: Changes, unseen: Kept) -> Kept:
    rows, size, before = kept.rows - unseen.rows, kept.bytes - unseen.bytes, changes.before
    for (name, value), old in zip(changes.states.items(), map(before.get, changes.states), strict=True):
        if name.startswith(PREFIX):  # of ids; not asked by a call, since every key of a batch comes by
            continue
        if value is not None and old is not None:
            size += len(value) - old
        elif value is not None:
            rows, size = rows + 1, size + len(name.encode()) + len(value)
        elif old is not None:
            rows, size = rows - 1, size - len(name.encode()) - old
    return Kept(rows=rows, bytes=size, keys=kept.keys if changes.keys is None else changes.keys)


def _next_seq(row: IntervalRow, changes: Changes) -> dict[str, int]:
    next_seq = dict(row.next_seq)
    for out in changes.outbox:
        name = counter_name(out.category_birth, out.partition, in_life=out.in_life)
        assert out.count > 0 and out.first_seq == next_seq.get(name, first_sequence(in_life=out.in_life)), (
            f"outbox sequences of {name} have a gap"
        )
        next_seq[name] = out.first_seq + out.count
    return next_seq
