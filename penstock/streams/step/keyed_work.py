"""Runs user code on the records and due timers of one step, and collects its changes until the commit.

Pure: no clock, no store, no bus. The changes depend on log, marks and state, not on how the log is cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import index, itemgetter
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import PenstockError, ProductionRefused, StateMismatch, StateRefused, TimerRefused
from penstock.streams.bus.log import LOW_MAX, LOW_MIN
from penstock.streams.dsl.computation import (
    MESSAGE_CHARS_MAX,
    Computation,
    Context,
    Record,
    Timer,
    UserCall,
    cut_short,
    error_text,
    record_type,
    report_user_errors,
    short_key,
    user_line,
)
from penstock.streams.rows.row_store import TimerRow
from penstock.streams.step.outbox import Production, fits
from penstock.streams.step.watermark import Cut

# How many timers set at or before the low may fire in one step; more than this is an endless loop.
TIMERS_PER_STEP_MAX = 1_000_000

_Pending = tuple[Millis, Millis, bool, bool]  # (time, hold, is late, is of the wall)


class KeyedWork:
    """Runs the hooks for one step. Pass the snapshot, call `run` once, then read the changes."""

    def __init__(
        self,
        computation: Computation,
        *,
        job: str,
        low: Millis,
        now_ms: Millis = 0,
        states: Mapping[str, bytes] | None = None,
        timers: Iterable[TimerRow] = (),
        timers_max: int = TIMERS_PER_STEP_MAX,
        aside: SetAside | None = None,
        late: str | None = None,
    ) -> None:
        self._drops_late = (late or computation.late) == "drop"
        self._aside = aside  # None: an exception of user code stops the step
        self._computation, self._job, self._low, self._timers_max = computation, job, low, timers_max
        self.produced: dict[str, list[Production]] = {stream: [] for stream in computation.outputs}
        self.counters = {"records": 0, "late": 0, "dropped": 0, "behind_low": 0, "timers": 0}
        self._pickers = {stream: _picker(tuple(columns)) for stream, columns in computation.outputs.items()}
        self._stored: Mapping[str, bytes] = states or {}
        self._states: dict[str, Any] = {}  # of keys whose hooks ran
        self._pending: dict[tuple[str, str], _Pending] = {
            (timer.key, timer.tag): (timer.at_ms, timer.hold_ms, timer.late, timer.wall) for timer in timers
        }
        self._touched: set[tuple[str, str]] = set()
        found = sorted((at, key, tag, wall) for (key, tag), (at, _, _, wall) in self._pending.items())
        self._due = [(at, key, tag) for at, key, tag, wall in found if not wall]  # a heap
        self._wall = [(at, key, tag) for at, key, tag, wall in found if wall]  # a heap; all of these are due
        self._up_to = low  # later timers cannot fire in this step
        self._behind_count = 0
        self._ctx = Context(self)
        self._ctx.low_watermark, self._ctx.now = low, now_ms
        self._where: tuple[str, int | None] = ("", None)  # the current hook call, for error texts

    def run(self, records: Sequence[Record], offsets: Sequence[int], cuts: Sequence[Cut]) -> None:
        """Run due wall timers; then for each cut the records up to it and the timers due at its low."""
        self._up_to = cuts[-1].low if cuts else self._low
        with report_user_errors(self._current_call):
            done = 0
            self._fire_due()
            for cut in cuts:
                self._process(records[done : cut.position], offsets[done : cut.position])
                self._low = self._ctx.low_watermark = cut.low
                self._fire_due()
                done = cut.position
            self._process(records[done:], offsets[done:])
        self.counters["productions"] = sum(map(len, self.produced.values()))

    def _current_call(self) -> UserCall:
        what, offset = self._where
        at = "" if offset is None else f" at {offset}"
        name = f"key {short_key(self._ctx.key)}, {what}{at}"
        return UserCall(self._job, name, key=self._ctx.key, offset=offset)

    def state_changes(self) -> dict[str, bytes | None]:
        """The new state of each changed key; None if all values are equal to their defaults."""
        changes, encode = {}, self._computation.state_codec.encode
        for key, state in self._states.items():
            try:
                after = encode(state)
            except StateRefused as error:
                error.what = f"{error.what} (job {self._job!r}, key {key!r})"
                error.job, error.key = self._job, key
                raise
            if self._stored.get(key) != after:
                changes[key] = after
        return changes

    def timer_changes(self) -> tuple[tuple[TimerRow, ...], tuple[tuple[str, str], ...]]:
        """Timers that were set and have not fired; (key, tag) of those that fired or were deleted."""
        pending = [
            TimerRow(key=name[0], tag=name[1], at_ms=at, hold_ms=hold, late=late, wall=wall)
            for name in self._touched
            if name in self._pending
            for at, hold, late, wall in [self._pending[name]]
        ]
        return tuple(pending), tuple(name for name in self._touched if name not in self._pending)

    def set_timer(
        self, key: str, tag: str, at_ms: Millis, hold_ms: Millis | None, *, floor: Millis, is_late: bool
    ) -> None:
        """Implements `Context.set_timer`."""
        low, name = self._low, (key, tag)
        if hold_ms is None and self._pending.get(name) == (at_ms, at_ms - 1, False, False) and at_ms > low:
            return  # common case: the timer of a window is set again by each of its records
        at = at_ms if type(at_ms) is int else index(at_ms)
        if hold_ms is None:
            hold = at - 1
            if hold < low and not is_late:
                # A hold cannot be before the low; a production of a record on time must stay on time.
                hold = max(hold, min(low, floor))
        else:
            hold = index(hold_ms)
        self._check_timer(tag, at, hold, floor if hold_ms is not None else LOW_MIN)
        pending = (at, hold, is_late and hold < low, False)
        if self._pending.get(name) == pending:
            return
        self._save_timer(name)
        self._pending[name] = pending
        self._touched.add(name)
        if at <= self._up_to:
            heappush(self._due, (at, key, tag))
        if at <= low:
            self._count_due("the low watermark", "ctx.low_watermark, and none once that is the end of input")

    def set_wall_timer(self, key: str, tag: str, at_ms: Millis, *, floor: Millis) -> None:
        """Implements `Context.set_wall_timer`."""
        at, name = index(at_ms), (key, tag)
        self._check_timer(tag, at, at, LOW_MIN)
        # It has no hold; the record's time is the timestamp only if there is no low when it fires.
        pending = (at, floor if self._low <= LOW_MIN else 0, False, True)
        if self._pending.get(name) == pending:
            return
        self._save_timer(name)
        self._pending[name] = pending
        self._touched.add(name)
        if at <= self._ctx.now:
            heappush(self._wall, (at, key, tag))
            self._count_due("now", "ctx.now")

    def delete_timer(self, key: str, tag: str) -> None:
        """Implements `Context.delete_timer`."""
        self._save_timer((key, tag))
        self._pending.pop((key, tag), None)
        self._touched.add((key, tag))  # its stored row may not be part of the snapshot

    def produce(
        self,
        values: Mapping[str, Any],
        stream: str,
        ts: Millis,
        key: str,
        *,
        floor: Millis,
        is_late: bool,
    ) -> None:
        """Implements `Context.produce`."""
        stamp = ts if type(ts) is int else index(ts)
        if stamp < floor:
            raise ProductionRefused(
                f"a production for stream {stream!r} has timestamp {stamp}, before {floor}",
                why="it is before its record or its timer's hold, so downstream may already treat it as late",
                fix="use a later timestamp, or call set_timer with a hold_ms of at most this timestamp",
            )
        picker = self._pickers.get(stream)
        if picker is None or not isinstance(key, str):
            raise self._misfit(
                stream,
                f"the declared streams are {list(self._pickers)}, the key must be a string and was {key!r}",
            )
        row = picker(values)
        if row is None:
            expected = list(self._computation.outputs[stream])
            raise self._misfit(stream, f"its columns are {expected}, but it was given {list(values)}")
        if self._aside is not None:
            self._check_types(stream, row)
        self.produced[stream].append((stamp, key, is_late and stamp < self._low, row))

    def undo(self, key: str, produced: Mapping[str, int]) -> None:
        """Undo the productions, timers and state changes of one hook call. Requires: `aside`."""
        assert self._aside is not None, "undo needs the saved states"
        for stream, count in produced.items():
            del self.produced[stream][count:]
        for name, pending, was_touched in reversed(self._aside.timers):
            self._pending.pop(name, None)
            if pending is not None:
                self._pending[name] = (
                    pending  # it is still in its heap, because no timer fires while a hook runs
                )
            if not was_touched:
                self._touched.discard(name)
        saved = self._aside.saved.get(key, self._stored.get(key))
        codec = self._computation.state_codec
        self._states[key] = codec.blank() if saved is None else codec.decode(saved)

    def _save_timer(self, name: tuple[str, str]) -> None:
        if self._aside is not None:
            self._aside.timers.append((name, self._pending.get(name), name in self._touched))

    def _check_types(self, stream: str, row: tuple[object, ...]) -> None:
        """Check types per record: when all records are packed, the faulty record is no longer known."""
        columns = self._computation.outputs[stream].items()
        for value, (name, kind) in zip(row, columns, strict=True):
            if not fits(value, kind):
                raise self._misfit(stream, f"column {name!r} is declared {kind!r}, the value was {value!r}")

    def _process(self, records: Sequence[Record], offsets: Sequence[int]) -> None:
        ctx, hook, states = self._ctx, self._computation.process_record, self._states
        due, wall, aside = self._due, self._wall, self._aside
        drop, low, late, behind = self._drops_late, self._low, 0, 0
        for record, offset in zip(records, offsets, strict=True):
            if record.late:
                late += 1
                if drop:
                    continue
            elif record.ts < low:
                behind += 1  # a producer upstream broke its promise: counted for an alarm, never dropped
            key = record.key
            state = states.get(key)
            if state is None:
                state = self._load(key)
            ctx.enter(key, state, record.ts, record.late)
            self._where = ("record", offset)
            if aside is None:
                hook(record, ctx)
            else:
                with _Skipping(self, aside, record, offset):
                    hook(record, ctx)
                    aside.saved[key] = self._computation.state_codec.encode(state)
            if wall or (due and due[0][0] <= low):
                self._fire_due()
        self.counters["records"] += len(records)
        self.counters["late"] += late
        self.counters["dropped"] += late if drop else 0
        self.counters["behind_low"] += behind

    def _fire_due(self) -> None:
        due, wall, low = self._due, self._wall, self._low
        while True:
            if due and due[0][0] <= low:
                self._fire(*heappop(due), is_wall=False)
            elif wall:
                self._fire(*heappop(wall), is_wall=True)
            else:
                return

    def _fire(self, at: Millis, key: str, tag: str, *, is_wall: bool) -> None:
        pending = self._pending.get((key, tag))
        if pending is None or pending[0] != at or pending[3] != is_wall:
            return  # deleted, or set to another time since
        del self._pending[key, tag]
        self._touched.add((key, tag))
        state = self._states.get(key)
        if state is None:
            state = self._load(key)
        _, hold, late, _ = pending
        if is_wall and self._low > LOW_MIN:
            hold = self._low  # it had no hold: its productions must not be before the low that was reported
        self._ctx.enter(key, state, hold, late)
        self._where = (f"timer {tag!r}", None)
        self._computation.process_timer(Timer(key, tag, at, hold, late, is_wall), self._ctx)
        self.counters["timers"] += 1
        if self._aside is not None:
            self._aside.saved[key] = self._computation.state_codec.encode(state)

    def _count_due(self, what: str, after: str) -> None:
        self._behind_count += 1
        if self._behind_count > self._timers_max:
            raise TimerRefused(
                f"timers set at or before {what} fired {self._timers_max} times in one step",
                why="each of them fires at once and sets another timer that is due at once",
                fix=f"set the next timer after {after}",
            )

    def _load(self, key: str) -> Any:
        stored, codec = self._stored.get(key), self._computation.state_codec
        try:
            state = codec.blank() if stored is None else codec.decode(stored)
        except StateMismatch as error:
            error.what = f"{error.what} (job {self._job!r}, key {key!r})"
            raise
        self._states[key] = state
        return state

    def _check_timer(self, tag: str, at: Millis, hold: Millis, hold_min: Millis) -> None:
        if hold < hold_min:
            raise TimerRefused(
                f"timer {tag!r} would hold from {hold}, before {hold_min}",
                why="a production must not be before its record or timer, so its hold must not be either",
                fix="use a hold_ms that is not before the record's ts",
            )
        if not isinstance(tag, str) or not LOW_MIN < hold <= LOW_MAX or not LOW_MIN < at <= LOW_MAX:
            raise TimerRefused(
                f"timer {tag!r} at {at} cannot be set",
                why="a tag must be a string, and a time must be milliseconds since 1970",
                fix="check how the tag and the time are computed",
            )

    def _misfit(self, stream: str, why: str) -> ProductionRefused:
        return ProductionRefused(
            f"a production for stream {stream!r} does not match the computation's declaration",
            why=why,
            fix="produce exactly the declared columns, with None for null, or change `outputs`",
        )


class SetAside:
    """Dead letters of records for which user code raised, and the saved data to undo a hook call."""

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self.letters: list[Production] = []
        self.saved: dict[str, bytes | None] = {}  # key -> its state after the last good record
        # Changed by the current hook call.
        self.timers: list[tuple[tuple[str, str], _Pending | None, bool]] = []

    def put(self, record: Record, offset: int, why: str) -> None:
        """Add a dead letter: the reason, the record as JSON, partition and offset."""
        value = json.dumps(record.as_dict(), default=str).encode()
        reason = f"{why} (key {short_key(record.key)}, stream {record.stream!r})"
        self.letters.append((record.ts, record.key, record.late, (reason, value, self._partition, offset)))


class _Skipping:
    """Runs one hook call; if it raises, it is undone and the record becomes a dead letter."""

    def __init__(self, work: KeyedWork, aside: SetAside, record: Record, offset: int) -> None:
        self._work, self._aside, self._record, self._offset = work, aside, record, offset
        self._produced = {stream: len(made) for stream, made in work.produced.items()}
        aside.timers.clear()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._work.undo(self._record.key, self._produced)
        line = user_line(error)
        why = error_text(error)
        if isinstance(error, PenstockError):
            why = cut_short(f"{type(error).__name__}: {error.what}: {error.why}", MESSAGE_CHARS_MAX)
        self._aside.put(self._record, self._offset, f"{why}, at {line}" if line else why)
        return True


def try_computation(
    computation: Computation,
    records: Iterable[tuple[str, Millis] | tuple[str, Millis, Mapping[str, Any]]],
    *,
    low: Millis = LOW_MAX,
) -> list[tuple[str, Millis, str, dict[str, Any]]]:
    """Run a computation on (key, ts[, columns]) and then the low; returns (stream, ts, key, columns)."""
    made = []
    for key, ts, *rest in records:
        columns: Mapping[str, Any] = rest[0] if rest else {}
        made.append(record_type(tuple(columns))(key, ts, False, tuple(columns.values())))
    work = KeyedWork(computation, job="try", low=LOW_MIN)
    work.run(made, range(len(made)), [Cut(position=len(made), low=low)])
    return [
        (stream, ts, key, dict(zip(computation.outputs[stream], row, strict=True)))
        for stream, produced in work.produced.items()
        for ts, key, _, row in produced
    ]


def _picker(columns: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[object, ...] | None]:
    """A function from named values to a row in column order; it returns None for other columns."""
    pick = itemgetter(*columns) if len(columns) > 1 else None

    def picked(values: Mapping[str, Any]) -> tuple[object, ...] | None:
        if len(values) != len(columns):
            return None
        try:
            return pick(values) if pick is not None else tuple(values[name] for name in columns)
        except KeyError:
            return None

    return picked


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """The input of a step's logic.

    `table`: the uncommitted rows, in order, with `_input`, `_offset`, `_ts`, `_key` (never null) and `_late`.
    `states`: the states in `needed_states`, and those of keys with due timers. `read`: reads more states of
    the same snapshot. `version`: the interval's version before this step, unique per commit. `keys`: the
    number of keys after the last step; None: unknown.
    """

    job: str
    version: int
    low: Millis
    table: pa.Table
    cuts: Sequence[Cut]
    states: Mapping[str, bytes]
    timers: Sequence[TimerRow]
    read: Callable[[Iterable[str]], Mapping[str, bytes]]
    now_ms: Millis
    keys: int | None = None

    @property
    def low_after(self) -> Millis:
        """The input low once the step is done."""
        return self.cuts[-1].low if self.cuts else self.low


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The changes of a step's logic, to be committed."""

    states: Mapping[str, bytes | None] = field(default_factory=dict)  # None: delete
    timers_set: tuple[TimerRow, ...] = ()
    timers_deleted: tuple[tuple[str, str], ...] = ()
    # stream -> list of productions, or a table with `_ts`, `_key`, `_late` and the stream's columns.
    produced: Mapping[str, Sequence[Production] | pa.Table] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    # Only if a row is not the state of one key: names of new rows, and the number of keys.
    made: Collection[str] = ()
    keys: int | None = None


class StepLogic(Protocol):
    """The logic of a job's steps. It has no memory between calls, except states and timers."""

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        """Stream -> column -> Spark SQL type."""

    def needed_states(self, table: pa.Table) -> Iterable[str]:
        """Names of the states that it needs, beside those of keys with due timers."""

    def run(self, given: StepInput) -> StepResult:
        """Process for each cut the records up to it, then what is due at its low."""


class KeyedLogic:
    """Runs the hooks of a Computation per record and per timer."""

    def __init__(
        self,
        computation: Computation,
        *,
        timers_max: int = TIMERS_PER_STEP_MAX,
        inputs: Sequence[tuple[str, Sequence[str]]] = (),
        dead: tuple[str, int] | None = None,
        late: str | None = None,
    ) -> None:
        """`inputs`: name and columns of each input, by the number in `_input`; empty: a single input.

        `dead`: the dead-letter stream, and the partition of the records; None: an exception stops the step.
        `late`: the job's setting for late records; None: that of the computation.
        """
        self._late = late
        self._dead = dead
        self._computation, self._timers_max, self._inputs = computation, timers_max, tuple(inputs)

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        return self._computation.outputs

    def needed_states(self, table: pa.Table) -> Iterable[str]:
        found: list[str] = table.column("_key").unique().to_pylist()
        return found

    def run(self, given: StepInput) -> StepResult:
        aside = None if self._dead is None else SetAside(self._dead[1])
        work = KeyedWork(
            self._computation,
            job=given.job,
            low=given.low,
            now_ms=given.now_ms,
            states=given.states,
            timers=given.timers,
            timers_max=self._timers_max,
            aside=aside,
            late=self._late,
        )
        table = given.table
        own = tuple(name for name in table.column_names if not name.startswith("_"))
        records = _records(table, own) if not self._inputs else self._by_input(table)
        offsets = np.asarray(table.column("_offset").to_numpy(), dtype=np.int64).tolist()
        work.run(records, offsets, given.cuts)
        letters = (self._dead[0], aside.letters) if self._dead and aside and aside.letters else None
        timers_set, timers_deleted = work.timer_changes()
        return StepResult(
            states=work.state_changes(),
            timers_set=timers_set,
            timers_deleted=timers_deleted,
            produced=work.produced if not letters else {**work.produced, letters[0]: letters[1]},
            counters={**work.counters, "poison": len(letters[1])} if letters else work.counters,
        )

    def _by_input(self, table: pa.Table) -> list[Record]:
        """The records in order, each with the columns and the name of its input."""
        numbers = np.asarray(table.column("_input").to_numpy(), dtype=np.int64)
        found: list[Any] = [None] * table.num_rows
        for number, (name, columns) in enumerate(self._inputs):
            places = np.flatnonzero(numbers == number)
            if len(places):
                mine = _records(table.take(pa.array(places)), tuple(columns), name)
                for place, record in zip(places.tolist(), mine, strict=True):
                    found[place] = record
        return found


def _records(table: pa.Table, names: tuple[str, ...], stream: str = "in") -> list[Record]:
    columns = [table.column(name).to_pylist() for name in names]
    values = zip(*columns, strict=True) if columns else [()] * table.num_rows
    keys, stamps, lates = (table.column(name).to_pylist() for name in ("_key", "_ts", "_late"))
    return list(map(record_type(names, stream), keys, stamps, lates, values))
