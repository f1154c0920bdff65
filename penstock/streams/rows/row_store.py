"""The contract of the row store: per interval (job, partition) fenced ownership and one atomic write per
step.

A write covers all that the exactly-once step needs: state, timers, outbox, offsets, lows, intent; all checked
by one token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from zlib import crc32

from penstock.core.clock import Millis
from penstock.core.errors import CorruptData, Fenced, IntervalMissing, VersionMoved
from penstock.streams.bus.log import LOW_MIN

# Outbox sequences above this belong to the producer ids of an interval's lives, those below to its own id. So
# a row has the producer id under which it is sent, whatever the job's settings are by then.
LIFE_SEQ = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalRef:
    """Identifies an interval: job name (for display), job birth, partition, and the interval's own birth."""

    job: str
    job_birth: str
    partition: int
    birth: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerRow:
    """A pending timer. (key, tag) is unique; `hold_ms` limits the output low until the timer has fired.

    A `late` timer was set by a late record with a hold behind the low. It cannot hold the output low any
    more, and its productions are flagged late. A `wall` timer is due by the clock, not by the low watermark;
    it holds nothing, and its `hold_ms` is ignored.
    """

    key: str
    tag: str
    at_ms: Millis
    hold_ms: Millis
    late: bool = False
    wall: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxRow:
    """Productions for one output partition, checkpointed before they are sent."""

    id: int  # ascending over the interval's life, never used twice
    category: str
    category_birth: str
    partition: int
    first_seq: int
    count: int
    ts_min: Millis  # of the productions that are not late; LOW_MAX if all are
    payload: bytes  # Arrow IPC stream, schema of the category

    @property
    def in_life(self) -> bool:
        """Whether it is sent under the producer id of a life, without deduplication against earlier lives."""
        return self.first_seq > LIFE_SEQ


def counter_name(category_birth: str, partition: int, *, in_life: bool) -> str:
    """The name of an output partition's counter: it has two, since each producer id has its own sequences."""
    return f"{category_birth}:{partition}{'~' * in_life}"


def first_sequence(*, in_life: bool) -> int:
    """The first sequence of such a counter."""
    return LIFE_SEQ + 1 if in_life else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A stateless step's promise: exactly this range with exactly this plan and package."""

    ranges: Mapping[str, tuple[int, int]]  # input category birth -> [start, end)
    package: str
    plan: Mapping[str, Any]
    plan_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSize:
    """Size of an interval's state: number of rows, and bytes of their names and values.

    Rows of record ids, timers and the outbox do not count. `keys`: the number of keys as the last step
    reported it, if there is not one row per key; None: there is, or it is not reported yet.
    """

    rows: int
    bytes: int
    keys: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalRow:
    """The one row that is locked, checked and bumped by every write."""

    birth: str
    generation: int
    shard_epoch: int
    token: int
    version: int
    offsets: Mapping[str, int]  # input category birth -> next offset to read
    input_low: Millis
    output_low: Millis
    event_time_max: Mapping[str, Millis]  # running maximum per event_time input category birth
    next_seq: Mapping[str, int]  # by `counter_name`: the next outbox sequence
    intent: Intent | None = None
    counters: Mapping[str, int] = field(
        default_factory=dict
    )  # records, late, behind_low, timers, productions, bad, repeated
    kept: StoredSize | None = None  # None: not counted yet; the next acquire does


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One consistent read: the row, timers due up to a time, the whole outbox (by id), and the states of the
    asked keys *and of the keys of those timers*, so that user code never needs a second read.
    """

    row: IntervalRow
    states: Mapping[str, bytes]
    timers: tuple[TimerRow, ...]
    outbox: tuple[OutboxRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """One step's write. None: unchanged. Mappings are merged; offsets never decrease."""

    offsets: Mapping[str, int] | None = None
    input_low: Millis | None = None
    event_time_max: Mapping[str, Millis] | None = None
    states: Mapping[str, bytes | None] = field(default_factory=dict)  # None: delete
    timers_set: tuple[TimerRow, ...] = ()
    timers_deleted: tuple[tuple[str, str], ...] = ()  # (key, tag)
    outbox: tuple[OutboxRow, ...] = ()  # ids are assigned by the store; `id` is ignored
    intent: Intent | None = None
    clear_intent: bool = False
    counters: Mapping[str, int] = field(default_factory=dict)  # added
    # Sizes of the old values that the step has read at this version, None: there was none. The store reads
    # the sizes of other changed states itself.
    before: Mapping[str, int | None] = field(default_factory=dict)
    keys: int | None = None  # number of keys after this write, if there is not one row per key


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedState:
    """One key's state as stored; None if it is damaged, with the reason in `damage`."""

    key: str
    value: bytes | None
    damage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedTimer:
    """One timer as stored; None if it is damaged, with the reason in `damage`."""

    key: str
    tag: str
    timer: TimerRow | None
    damage: str = ""


class IntervalView(Protocol):
    """A consistent read-only view of an interval at one committed version, without ownership."""

    @property
    def row(self) -> IntervalRow:
        """The interval's row at this version."""

    def states(self, *, start: str, limit: int) -> tuple[ScannedState, ...]:
        """As `RowStore.scan`."""

    def timers(self, *, start: tuple[str, str], limit: int) -> tuple[ScannedTimer, ...]:
        """As `RowStore.scan_timers`."""


class RowStore(Protocol):
    """The rows of intervals. Safe for many processes; connections are opened after fork.

    All but `create` and `exists` raise IntervalMissing if the interval is absent or of another birth.
    """

    def create(self, ref: IntervalRef, *, offsets: Mapping[str, int], low: Millis) -> None:
        """Create the interval. A repeat with the same birth only adds offsets of new inputs; another birth
        is another interval.
        """

    def exists(self, ref: IntervalRef) -> bool:
        """True if there is one of this birth."""

    def acquire(self, ref: IntervalRef, *, generation: int, shard_epoch: int) -> IntervalRow:
        """Take ownership: Fenced unless (generation, shard_epoch) >= the stored pair; else pair := mine,
        token += 1. The returned row has the new token. Its stored size is counted here, if the last write was
        by a version that did not count; afterwards every commit updates it.
        """

    def fence(self, ref: IntervalRef, *, generation: int) -> int:
        """Raise the pair to at least (generation, 0) and the token by one; returns the token.

        A repeat for the same generation does nothing and returns the token.
        """

    def snapshot(
        self,
        ref: IntervalRef,
        *,
        token: int,
        keys: Iterable[str],
        timers_up_to: Millis,
        wall_up_to: Millis = LOW_MIN,
    ) -> Snapshot:
        """Fenced if `token` is not the stored one. Low-watermark timers up to `timers_up_to`, ordered by
        (at_ms, key, tag), then wall timers up to `wall_up_to`, in the same order.
        """

    def commit(self, ref: IntervalRef, *, token: int, version: int, changes: Changes) -> IntervalRow:
        """One short transaction: lock the row, token equal else Fenced, version equal else VersionMoved,
        write all, version + 1. `next_seq` follows from the outbox rows. output_low is computed here:
        min(input low, oldest undelivered production, oldest hold), never below the old one; late productions,
        late timers and wall timers do not count.
        """

    def delivered(self, ref: IntervalRef, *, token: int, ids: Iterable[int]) -> IntervalRow:
        """Delete outbox rows that are published, raise output_low; checks only the token; version + 1.

        Ids that a twin has deleted already are skipped.
        """

    def peek(self, ref: IntervalRef) -> IntervalRow:
        """The current row, without ownership: for status, lag and tests."""

    def view(self, ref: IntervalRef) -> AbstractContextManager[IntervalView]:
        """Open a consistent view, to be read page by page while the owner goes on writing. Use it in one
        thread and close it soon: a server must keep all rows that are overwritten meanwhile.
        """

    def scan(self, ref: IntervalRef, *, start: str, limit: int) -> tuple[ScannedState, ...]:
        """States ordered by key, from `start` on, without ownership: for inspection.

        At most `limit`, fewer if they are large; an empty page is the end. The next page starts at
        `key_after` the last key. Each page is a view of its own. Damaged states are included.
        """

    def scan_timers(
        self, ref: IntervalRef, *, start: tuple[str, str], limit: int
    ) -> tuple[ScannedTimer, ...]:
        """Timers of both kinds ordered by (key, tag), as `scan` returns states."""


PREFIX = "\x00ids\x00"
PREFIX_END = "\x00ids\x01"  # the first name after them


def is_of_ids(name: str) -> bool:
    """True for rows of record ids."""
    return name.startswith(PREFIX)


_KEPT = "kept"  # among the counters

RowRecord = tuple[str, int, int, int, int, str, Millis, Millis, str, str, str, str, int]
TimerRecord = tuple[str, str, Millis, Millis, int, int, int]


def record_of_row(row: IntervalRow) -> RowRecord:
    """An interval's row as a record for the store, mappings as JSON."""
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
    """The row of a record of `record_of_row`."""
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
    """The timer of a record of `record_of_timer`."""
    key, tag, at_ms, hold_ms, late, wall, crc = record
    _check(ref, f"the timer {tag!r} of key {key!r}", _timer_crc(record[:-1]), crc)
    return TimerRow(key=key, tag=tag, at_ms=at_ms, hold_ms=hold_ms, late=bool(late), wall=bool(wall))


def record_of_outbox(row: OutboxRow) -> tuple[Any, ...]:
    """An outbox row as a record, without its id, which the store assigns."""
    fields = (row.category, row.category_birth, row.partition, row.first_seq, row.count, row.ts_min)
    return *fields, row.payload, crc32(row.payload, _crc(fields))


def outbox_of(ref: IntervalRef, record: tuple[Any, ...]) -> OutboxRow:
    """The outbox row of an id and a record of `record_of_outbox`."""
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
    """The checksum of one key's state, over key and value."""
    return crc32(value, crc32(key.encode()))


def state_of(ref: IntervalRef, key: str, value: bytes, crc: int) -> bytes:
    """The value, if its checksum matches."""
    _check(ref, f"the state of key {key!r}", state_crc(key, value), crc)
    return value


def _check(ref: IntervalRef, what: str, expected: int, found: int) -> None:
    if expected != found:
        raise CorruptData(
            f"{what} of {ref.job}[{ref.partition}] is damaged",
            why=f"its checksum is {expected}, but the stored checksum is {found}",
            fix="restore the interval's rows from a backup; nothing was processed",
        )


def _crc(fields: tuple[Any, ...]) -> int:
    return crc32(repr(fields).encode())


def _timer_crc(fields: tuple[Any, ...]) -> int:
    # Without the flag `wall` for other timers, as in files of the first format.
    return _crc(fields if fields[-1] else fields[:-1])


def _json(value: Mapping[str, Any] | None) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _kept_json(row: IntervalRow) -> dict[str, list[int | None]]:
    kept = row.kept
    return {} if kept is None else {_KEPT: [row.version, kept.rows, kept.bytes, kept.keys]}


def _kept_of_json(value: list[Any] | None, version: int) -> StoredSize | None:
    # A version of Penstock that does not count copies the value, which then belongs to an older row version.
    if value is None or value[0] != version:
        return None
    return StoredSize(rows=value[1], bytes=value[2], keys=value[3])


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
    """States of records (key, value, checksum), until a page is full; at least one."""
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


NOTHING = StoredSize(rows=0, bytes=0)


def new_row(ref: IntervalRef, offsets: Mapping[str, int], low: Millis) -> IntervalRow:
    """The row of a new interval, without an owner."""
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
    """The row with new inputs added; the same object if there are none."""
    assert row.birth == ref.birth, "another birth has another place"
    unknown = {birth: offset for birth, offset in offsets.items() if birth not in row.offsets}
    if not unknown:
        return row
    return replace(row, offsets={**row.offsets, **unknown}, version=row.version + 1)


def after_acquire(ref: IntervalRef, row: IntervalRow, *, generation: int, shard_epoch: int) -> IntervalRow:
    """The row with its new owner; Fenced if a later one owns it."""
    if (generation, shard_epoch) < (row.generation, row.shard_epoch):
        raise Fenced(
            f"interval {name_of(ref)} belongs to a later owner",
            why=f"this owner has generation {generation} and shard epoch {shard_epoch}, "
            f"the interval has {row.generation} and {row.shard_epoch}",
            fix="nothing: the later owner continues",
        )
    return replace(
        row, generation=generation, shard_epoch=shard_epoch, token=row.token + 1, version=row.version + 1
    )


def after_fence(row: IntervalRow, *, generation: int) -> IntervalRow:
    """The row with owners of smaller generations fenced; the same object if they are already."""
    if row.generation >= generation:
        return row
    return replace(row, generation=generation, shard_epoch=0, token=row.token + 1, version=row.version + 1)


def after_commit(
    row: IntervalRow, changes: Changes, *, oldest_work: Millis, unseen: StoredSize = NOTHING
) -> IntervalRow:
    """The row after a step. `oldest_work`: the oldest undelivered production or hold after this write.
    `unseen`: the size of the old states of `unseen_names`.
    """
    offsets = {**row.offsets, **(changes.offsets or {})}
    assert all(offsets[birth] >= offset for birth, offset in row.offsets.items()), "offsets never decrease"
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
    """Changed states that the step did not read; the store must read their old sizes."""
    if row.kept is None:
        return []
    before = changes.before
    return [name for name in changes.states if name not in before and not is_of_ids(name)]


def after_delivery(row: IntervalRow, *, oldest_work: Millis) -> IntervalRow:
    """The row after some of its outbox was published."""
    return replace(row, version=row.version + 1, output_low=output_low_of(row, row.input_low, oldest_work))


def output_low_of(row: IntervalRow, input_low: Millis, oldest_work: Millis) -> Millis:
    """The new output low: no production that is not late will be older."""
    return max(row.output_low, min(input_low, oldest_work))


def check_birth(ref: IntervalRef, birth: str | None) -> None:
    """IntervalMissing if the interval is absent or of another birth: a task never creates one."""
    if birth != ref.birth:
        raise IntervalMissing(
            f"interval {name_of(ref)} cannot be opened",
            why=f"there is no interval with birth id {ref.birth}"
            if birth is None
            else f"its birth id is {birth}, not {ref.birth}",
            fix="wait for the job's plan to create it; if rows were deleted by hand, restore them",
        )


def check_token(ref: IntervalRef, row: IntervalRow, token: int) -> None:
    """Fenced if the token is not that of the last acquire."""
    if row.token != token:
        raise Fenced(
            f"interval {name_of(ref)} has another owner now",
            why=f"this worker has token {token}, the interval has token {row.token}",
            fix="nothing: the other owner continues",
        )


def check_version(ref: IntervalRef, row: IntervalRow, version: int) -> None:
    """VersionMoved if the row has another version than the one that was read."""
    if row.version != version:
        raise VersionMoved(
            f"interval {name_of(ref)} was written by a twin of this worker",
            why=f"this worker read version {version}, the interval has version {row.version}",
            fix="nothing: the step is repeated on the new version",
        )


def name_of(ref: IntervalRef) -> str:
    """The name of an interval in messages."""
    return f"{ref.job}[{ref.partition}]"


def _kept_after(kept: StoredSize, changes: Changes, unseen: StoredSize) -> StoredSize:
    rows, size, before = kept.rows - unseen.rows, kept.bytes - unseen.bytes, changes.before
    for (name, value), old in zip(changes.states.items(), map(before.get, changes.states), strict=True):
        if name.startswith(PREFIX):  # as `is_of_ids`, without a call per key
            continue
        if value is not None and old is not None:
            size += len(value) - old
        elif value is not None:
            rows, size = rows + 1, size + len(name.encode()) + len(value)
        elif old is not None:
            rows, size = rows - 1, size - len(name.encode()) - old
    return StoredSize(rows=rows, bytes=size, keys=kept.keys if changes.keys is None else changes.keys)


def _next_seq(row: IntervalRow, changes: Changes) -> dict[str, int]:
    next_seq = dict(row.next_seq)
    for out in changes.outbox:
        name = counter_name(out.category_birth, out.partition, in_life=out.in_life)
        assert out.count > 0 and out.first_seq == next_seq.get(name, first_sequence(in_life=out.in_life)), (
            f"outbox sequences of {name} have a gap"
        )
        next_seq[name] = out.first_seq + out.count
    return next_seq
