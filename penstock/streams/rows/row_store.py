"""What the row store promises for one interval (job, partition): fenced ownership, one atomic write per step.

Everything the exactly-once step needs: state, timers, outbox, offsets, lows, intent, behind one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.core.clock import Millis
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
class Kept:
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
    kept: Kept | None = None  # None: nobody has counted yet; the next acquire does


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


class Look(Protocol):
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

    def look(self, ref: IntervalRef) -> AbstractContextManager[Look]:
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
