"""What the row store promises for one interval (job, partition): fenced ownership, one atomic write per step.

Everything the exactly-once step needs: state, timers, outbox, offsets, lows, intent, behind one token.
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

# Outbox sequences above this are counted for the names of an interval's lives, those below for its own name.
# So a row says under which name it goes out, whatever the job's settings are by then.
LIFE_SEQ = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalRef:
    """Which interval: the job's name for people, its birth id, the partition, the interval's own birth id."""

    job: str
    job_birth: str
    partition: int
    birth: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerRow:
    """A pending timer. (key, tag) is unique; `hold` keeps the output low down until it is gone.

    A `late` timer was set by a late record with a hold behind the low: nothing can be held back for it any
    more, so it does not count in the output low, and what it produces carries the flag. A `wall` timer is due
    by the clock, not by the low watermark: it holds nothing, whatever its `hold_ms` says.
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
        """Whether it is sent under the name of a life, and not compared with what earlier ones sent."""
        return self.first_seq > LIFE_SEQ


def counter_name(category_birth: str, partition: int, *, in_life: bool) -> str:
    """Each output partition has two counters: a name of the bus has its own sequences, without gaps."""
    return f"{category_birth}:{partition}{'~' * in_life}"


def first_sequence(*, in_life: bool) -> int:
    """Where such a counter begins."""
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
    """How much an interval keeps for its keys: state rows, and the bytes of their names and values.

    Rows about ids of records are not among them, nor are timers and the outbox. `keys`: as the work of the
    last step said, if its rows are not one for each key; None: they are, or it has not said yet.
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
    kept: StoredSize | None = None  # None: nobody has counted yet; the next acquire does


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
    """One step's write. None means: as it was. Mappings are merged; offsets never go back."""

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
    # How large the values were that the step found at this version, None: there was none. Of other states
    # that change, the store looks itself.
    before: Mapping[str, int | None] = field(default_factory=dict)
    keys: int | None = None  # how many there are afterwards, if rows are not one for each key


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedState:
    """One key's state as it is stored; None if it is damaged, and `damage` says what is wrong."""

    key: str
    value: bytes | None
    damage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedTimer:
    """One timer as it is stored; None if it is damaged, and `damage` says what is wrong."""

    key: str
    tag: str
    timer: TimerRow | None
    damage: str = ""


class RowSnapshot(Protocol):
    """One moment of an interval, without ownership: whatever is read of it is of one committed version."""

    @property
    def row(self) -> IntervalRow:
        """The interval's row at this moment."""

    def states(self, *, start: str, limit: int) -> tuple[ScannedState, ...]:
        """As `RowStore.scan`."""

    def timers(self, *, start: tuple[str, str], limit: int) -> tuple[ScannedTimer, ...]:
        """As `RowStore.scan_timers`."""


class RowStore(Protocol):
    """The rows of intervals. Safe for many processes; connections are opened after fork.

    All but `create` and `exists` raise IntervalMissing if the interval is absent or of another birth.
    """

    def create(self, ref: IntervalRef, *, offsets: Mapping[str, int], low: Millis) -> None:
        """Create the interval. Repeated with the same birth it only adds the offsets of inputs that
        it does not know yet; another birth is another interval.
        """

    def exists(self, ref: IntervalRef) -> bool:
        """True if there is one of this birth."""

    def acquire(self, ref: IntervalRef, *, generation: int, shard_epoch: int) -> IntervalRow:
        """Take ownership: Fenced unless (generation, shard_epoch) >= the stored pair; else pair := mine,
        token += 1. The returned row carries the new token. What it keeps is counted here, if the last write
        was of a version that did not count; from then on every commit adds what it changes.
        """

    def fence(self, ref: IntervalRef, *, generation: int) -> int:
        """Raise the pair to at least (generation, 0) and the token by one; returns the token.

        Repeated for a generation that already stands, it does nothing and returns the token.
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
        """Delete outbox rows that the bus has, raise output_low; checks the token alone; version + 1.

        Ids that are gone already (a twin was faster) are passed over.
        """

    def peek(self, ref: IntervalRef) -> IntervalRow:
        """The row as it stands, without ownership: for status, lag and tests."""

    def look(self, ref: IntervalRef) -> AbstractContextManager[RowSnapshot]:
        """One moment, to be read page by page while the owner goes on writing. Use it shortly and in one
        thread: a server that keeps the moment keeps what was overwritten since.
        """

    def scan(self, ref: IntervalRef, *, start: str, limit: int) -> tuple[ScannedState, ...]:
        """States in the order of their keys, from `start` on, without ownership: for people who look.

        At most `limit`, and fewer if they are large; none: there are no more. The next page starts at
        `key_after` the last one. Each page is one moment, two pages are two. Damaged ones are among them.
        """

    def scan_timers(
        self, ref: IntervalRef, *, start: tuple[str, str], limit: int
    ) -> tuple[ScannedTimer, ...]:
        """Timers of both kinds in the order of (key, tag), as `scan` gives states."""


PREFIX = "\x00ids\x00"
PREFIX_END = "\x00ids\x01"  # the first name behind them


def is_of_ids(name: str) -> bool:
    """True for rows of ids."""
    return name.startswith(PREFIX)


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


def _kept_of_json(value: list[Any] | None, version: int) -> StoredSize | None:
    # A version of Penstock that does not count hands on what it found: that is then of an older version of
    # the row.
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


NOTHING = StoredSize(rows=0, bytes=0)


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
    row: IntervalRow, changes: Changes, *, oldest_work: Millis, unseen: StoredSize = NOTHING
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


def _kept_after(kept: StoredSize, changes: Changes, unseen: StoredSize) -> StoredSize:
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
