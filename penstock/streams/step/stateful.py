"""The stateful step: one interval, one micro-batch, exactly once (MillWheel 6.1, 6.2).

Snapshot, user code outside any transaction, one short fenced write, then the outbox in order. It may be cut
off between any two lines, repeated, and run by two workers at once: what is committed and sent is the same.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.clock import Millis
from penstock.core.errors import ComputationFailed, ConfigError, VersionMoved
from penstock.streams.bus.log import LOW_MIN, Log
from penstock.streams.dsl.computation import Computation
from penstock.streams.rows.row_store import Changes, IntervalRef, IntervalRow, RowStore, Snapshot
from penstock.streams.step.keyed_work import TIMERS_PER_STEP_MAX, KeyedLogic, StepInput, StepLogic, StepResult
from penstock.streams.step.outbox import (
    Sending,
    Sequences,
    check_outputs,
    pack_productions,
    pack_table,
    publish_outbox,
    publish_weakly,
)
from penstock.streams.step.step import (
    InputRange,
    OutputSpec,
    StepReport,
    check_start,
    open_interval,
    report_low,
)
from penstock.streams.step.watermark import Cut, Ints, cut_at_marks, order_at_marks

# --- changes that other workers made ---------------------------------------------------------------------

_HEAD = struct.Struct(">II")  # length and CRC-32 of what follows
FILE_SHARE = 4  # a file is begun anew when it has this many times what a worker may keep
FILE_BYTES_MIN = 2**20
HEAD_BYTES = 16  # length and checksum of the first record, its token and versions


class CachedChange(msgspec.Struct, frozen=True, array_like=True):
    """The writes of one step, from the version before the first to that after the last, under one token."""

    token: int
    old: int
    new: int
    states: dict[str, bytes | None]  # None: there is none any more
    read: int = 0  # states that the step had to read from the rows


@dataclass(frozen=True, slots=True)
class FilePosition:
    """How far a worker has read a file of changes. `head`: its first bytes; a new file has others."""

    head: bytes = b""
    position: int = 0


_DECODER = msgspec.msgpack.Decoder(CachedChange)


class SharedChanges:
    """Files of changes in a folder that the workers of one machine share while they run."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder, self._bytes_max = folder, bytes_max

    def append(self, ref: IntervalRef, change: CachedChange) -> None:
        """Add what a step of this worker wrote. More than a worker would keep is left out."""
        if _bytes_of(change.states) > self._bytes_max:
            return
        data = msgspec.msgpack.encode(change)
        data = _HEAD.pack(len(data), zlib.crc32(data)) + data
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._append(self._path(ref), data)
        except OSError:
            pass  # a full disk, say: whoever misses this reads the rows

    def _append(self, path: Path, data: bytes) -> None:
        if _file_size(path) + len(data) > max(FILE_SHARE * self._bytes_max, FILE_BYTES_MIN):
            new = path.with_suffix(f".{os.getpid()}")
            new.write_bytes(data)
            new.replace(path)
            return
        # One write to the end: two workers that append at once do not damage each other's.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def end(self, ref: IntervalRef) -> FilePosition:
        """The end of the file: a worker that knows no states reads from here."""
        try:
            with self._path(ref).open("rb") as file:
                return FilePosition(file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size)
        except OSError:
            return FilePosition()

    def since(self, ref: IntervalRef, place: FilePosition) -> tuple[list[CachedChange], FilePosition]:
        """The changes after this place, in order, and the place behind the last one."""
        try:
            descriptor = os.open(self._path(ref), os.O_RDONLY)
        except OSError:
            return [], place
        try:
            head, size = os.pread(descriptor, HEAD_BYTES, 0), os.fstat(descriptor).st_size
            start = place.position if place.head == head and place.position <= size else 0
            data = os.pread(descriptor, size - start, start)
        finally:
            os.close(descriptor)
        changes, end = _parse(data)
        return changes, FilePosition(head, start + end)

    def _path(self, ref: IntervalRef) -> Path:
        return self._folder / f"{hashlib.sha256(ref.birth.encode()).hexdigest()[:32]}.news"


def _parse(data: bytes) -> tuple[list[CachedChange], int]:
    """Whole records, and where they end; after one that is damaged nothing of the rest is believed."""
    changes, at = [], 0
    while at + _HEAD.size <= len(data):
        length, crc = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(body) < length:
            break  # not all of it is there yet
        if zlib.crc32(body) != crc:
            return [], len(data)
        changes.append(_DECODER.decode(body))
        at += _HEAD.size + length
    return changes, at


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _bytes_of(states: Mapping[str, bytes | None]) -> int:
    return sum(len(name) + len(value or b"") for name, value in states.items())


# --- the cache -------------------------------------------------------------------------------------------

# What a kept entry costs beside its text and bytes: two objects and a place in a map.
ENTRY_BYTES = 200
# A worker is shared by the tasks of a container; jobs beyond these start again with nothing.
JOBS_MAX = 8


class CachedStates:
    """What is known of an interval's states at one version; None: there is none under this name."""

    def __init__(self, read_to: FilePosition | None = None) -> None:
        self._at: tuple[int, int] | None = None
        self._states: OrderedDict[str, bytes | None] = OrderedDict()
        self.size = 0
        self.read_to = read_to or FilePosition()  # how far the changes of other workers were read
        self._written: CachedChange | None = None  # by the step that has it now
        self._read = 0  # names that this step asked the rows for

    def __len__(self) -> int:
        return len(self._states)

    def fits(self, row: IntervalRow) -> bool:
        """True if this is what the interval has now; else everything is forgotten."""
        if self._at == (row.token, row.version):
            return True
        self.forget()
        return False

    def forget(self) -> None:
        """Drop all states."""
        self._at, self.size = None, 0
        self._states.clear()

    def apply(self, changes: Iterable[CachedChange], read_to: FilePosition) -> None:
        """Apply what other workers wrote since, as far as it follows the version that is known."""
        self.read_to = read_to
        for change in changes:
            if self._at == (change.token, change.old):
                self._at = (change.token, change.new)
                self._change(change.states)

    def take_written(self) -> CachedChange | None:
        """What was written since this was called last, for other workers."""
        written, read, self._written, self._read = self._written, self._read, None, 0
        return None if written is None else msgspec.structs.replace(written, read=read)

    def split(self, names: Iterable[str]) -> tuple[dict[str, bytes], list[str]]:
        """Of these the states that are known, and the names that must be read."""
        found: dict[str, bytes] = {}
        missing = []
        for name in dict.fromkeys(names):
            if name in self._states:
                self._states.move_to_end(name)
                value = self._states[name]
                if value is not None:
                    found[name] = value
            else:
                missing.append(name)
        return found, missing

    def learn(self, row: IntervalRow, names: Iterable[str], states: Mapping[str, bytes]) -> None:
        """What a read of this row found. Requires: `fits` was asked with a row of the same version."""
        self._at = (row.token, row.version)
        for name in names:
            self._read += 1
            if name not in states:
                self._put(name, None)
        for name, value in states.items():
            self._put(name, value)

    def committed(self, old: IntervalRow, new: IntervalRow, changed: Mapping[str, bytes | None]) -> None:
        """A write of this worker was answered. If the version rose by more than 1, others wrote too."""
        if (new.token, new.version) != (old.token, old.version + 1):
            self.forget()
            return
        self._note(new, changed)
        if self.fits(old):
            self._at = (new.token, new.version)
            self._change(changed)

    def _note(self, new: IntervalRow, changed: Mapping[str, bytes | None]) -> None:
        """Writes of one step that follow each other are one change."""
        last, old = self._written, new.version - 1
        if last is None or (last.token, last.new) != (new.token, old):
            last = CachedChange(token=new.token, old=old, new=old, states={})
        self._written = msgspec.structs.replace(last, new=new.version, states={**last.states, **changed})

    def _change(self, states: Mapping[str, bytes | None]) -> None:
        for name, value in states.items():
            if value == b"":  # says only that it is there, as rows of record ids do: not worth the room
                self._drop(name)
            else:
                self._put(name, value)

    def shrink(self, bytes_max: int) -> None:
        """Forget what was used longest ago, until this is enough."""
        while self.size > bytes_max and self._states:
            name, value = self._states.popitem(last=False)
            self.size -= _size_of(name, value)

    def _put(self, name: str, value: bytes | None) -> None:
        self._drop(name)
        self._states[name] = value
        self.size += _size_of(name, value)

    def _drop(self, name: str) -> None:
        if name in self._states:
            self.size -= _size_of(name, self._states.pop(name))


class StateCache:
    """What one process knows of the states of one job's intervals, within a bound."""

    def __init__(self, bytes_max: int, changes: SharedChanges | None = None) -> None:
        self.bytes_max, self._changes = bytes_max, changes
        self._known: OrderedDict[IntervalRef, CachedStates] = OrderedDict()

    @property
    def size(self) -> int:
        """Bytes that are kept, about."""
        return sum(known.size for known in self._known.values())

    def take(self, ref: IntervalRef) -> CachedStates:
        """What is known of an interval; nobody else has it until it is given back."""
        known = self._known.pop(ref, None)
        if known is None:
            return CachedStates(FilePosition() if self._changes is None else self._changes.end(ref))
        if self._changes is not None:
            known.apply(*self._changes.since(ref, known.read_to))
        return known

    def give(self, ref: IntervalRef, known: CachedStates) -> None:
        """Keep it; the intervals and names that were used longest ago make room."""
        written = known.take_written()
        if self._changes is not None and written is not None:
            self._changes.append(ref, written)
        known.shrink(self.bytes_max)
        if not len(known):
            return
        self._known[ref] = known
        excess = self.size - self.bytes_max
        for other in list(self._known):
            if excess <= 0:
                return
            before = self._known[other].size
            self._known[other].shrink(before - excess)
            excess -= before - self._known[other].size
            if not len(self._known[other]):
                del self._known[other]


class StateCaches:
    """A cache for each job that a process works for."""

    def __init__(self) -> None:
        self._caches: OrderedDict[tuple[str, str], StateCache] = OrderedDict()

    def of(
        self, rows: str, job_birth: str, bytes_max: int, shared: Callable[[], Path | None] = lambda: None
    ) -> StateCache | None:
        """The cache of a job whose rows are at this place; None if it wants none.

        `shared` is asked once for a folder that all workers of this machine have for the job.
        """
        found = self._caches.pop((rows, job_birth), None)
        if bytes_max <= 0:
            return None
        if found is None or found.bytes_max != bytes_max:
            folder = shared()
            found = StateCache(bytes_max, None if folder is None else SharedChanges(folder, bytes_max))
        self._caches[rows, job_birth] = found
        while len(self._caches) > JOBS_MAX:
            self._caches.popitem(last=False)
        return found


def _size_of(name: str, value: bytes | None) -> int:
    return ENTRY_BYTES + len(name) + len(value or b"")


__all__ = ["InputRange", "OutputSpec", "StatefulStep", "StepReport", "open_interval"]

# Twins of one worker rarely meet even once.
COMMIT_ATTEMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The records of a step that were not committed before."""

    inputs: Ints
    offsets: Ints
    table: pa.Table

    @staticmethod
    def of(table: pa.Table) -> _Rows:
        return _Rows(inputs=_ints(table, "_input"), offsets=_ints(table, "_offset"), table=table)

    def from_offsets(self, committed: Sequence[int]) -> _Rows:
        """Only those at or above the committed offset of their input."""
        fresh = self.offsets >= np.array(committed, dtype=np.int64)[self.inputs]
        return self if fresh.all() else _Rows.of(self.table.filter(pa.array(fresh)))

    def readable(self) -> tuple[_Rows, int]:
        """Those that could be parsed, and the number of the others."""
        if "_bad" not in self.table.column_names:
            return self, 0
        good = self.table.filter(self.table.column("_bad").is_null())
        return _Rows.of(good), self.table.num_rows - good.num_rows


class StatefulStep:
    """Runs the steps of one interval under one token."""

    def __init__(
        self,
        *,
        ref: IntervalRef,
        token: int,
        rows: RowStore,
        log: Log,
        outputs: Sequence[OutputSpec],
        computation: Computation | StepLogic,
        timers_per_step_max: int = TIMERS_PER_STEP_MAX,
        sending: Sending | None = None,
        cache: StateCache | None = None,
    ) -> None:
        self._sending = sending or Sending()
        self._ref, self._token, self._rows, self._log = ref, token, rows, log
        self._cache, self._known = cache, CachedStates()
        self._outputs = {output.stream: output for output in outputs}
        self._logic: StepLogic = (
            KeyedLogic(computation, timers_max=timers_per_step_max)
            if isinstance(computation, Computation)
            else computation
        )
        for stream, columns in self._logic.outputs.items():
            output = self._outputs.get(stream)
            if output is None or dict(output.columns) != dict(columns):
                raise ConfigError(
                    f"job {ref.job!r} has no output for stream {stream!r} of its computation",
                    why=f"the computation declares {dict(columns)}, the job's outputs are {list(outputs)}",
                    fix="submit the pipeline again, so that its plan fits the computation",
                )

    def run(
        self, ranges: Sequence[InputRange], batches: Iterable[pa.RecordBatch], *, now_ms: Millis
    ) -> StepReport:
        """Do one step. Without records it still sends leftovers, fires timers and raises lows.

        Rows of `batches` are in order and have `_input` (index into `ranges`), `_offset`, `_ts`, `_key`,
        `_late`. Other columns that start with an underscore are not the user's. Rows with `_bad` are counted
        and passed over.
        """
        # Taken out, and given back at the end: a step that fails, wherever, leaves nothing behind.
        self._known = CachedStates() if self._cache is None else self._cache.take(self._ref)
        row, has_wall = self._send_outbox(now_ms)
        rows = _Rows.of(_table_of(batches))
        assert all(number < len(ranges) for number in np.unique(rows.inputs)), "an input that was not planned"
        counters: dict[str, int] | None = None
        for attempt in range(COMMIT_ATTEMPTS):
            try:
                counters, row, has_outbox = self._attempt(ranges, rows, row, now_ms, has_wall)
            except VersionMoved:
                if attempt == COMMIT_ATTEMPTS - 1:
                    raise
                snapshot = self._rows.snapshot(
                    self._ref, token=self._token, keys=(), timers_up_to=LOW_MIN, wall_up_to=now_ms
                )
                row, has_wall = snapshot.row, bool(snapshot.timers)
                continue
            if has_outbox:
                row, _ = self._send_outbox(now_ms)
            break
        if self._cache is not None:
            self._cache.give(self._ref, self._known)
        report_low(
            row, producer=self._ref.birth, log=self._log, outputs=list(self._outputs.values()), now_ms=now_ms
        )
        return StepReport.of(row, counters)

    def _attempt(
        self, ranges: Sequence[InputRange], rows: _Rows, row: IntervalRow, now_ms: Millis, has_wall: bool
    ) -> tuple[dict[str, int] | None, IntervalRow, bool]:
        """Decide on what `row` says and commit; no counters if a twin did it, VersionMoved if one was
        faster.
        """
        check_start(self._ref, row, ranges)
        fresh, bad = rows.from_offsets([row.offsets[asked.birth] for asked in ranges]).readable()
        fresh, cuts = self._cuts(ranges, fresh, row)
        ends = {asked.birth: asked.end for asked in ranges if asked.end > row.offsets[asked.birth]}
        if not ends and not cuts and not has_wall:
            return None, row, False
        low = cuts[-1].low if cuts else row.input_low
        table = _with_keys(fresh.table)
        wanted = list(self._logic.wanted(table))
        snapshot = self._snapshot(row, wanted, low, wall_up_to=now_ms)
        # How large each state was that this step has read: what it changes then needs no second look.
        before: dict[str, int | None] = {}
        _note(before, [*wanted, *(timer.key for timer in snapshot.timers)], snapshot.states)

        def read(names: Iterable[str]) -> Mapping[str, bytes]:
            more = list(names)
            found = self._read_more(row, more)
            _note(before, more, found)
            return found

        given = StepInput(
            job=self._ref.job,
            version=row.version,
            low=row.input_low,
            table=table,
            cuts=cuts,
            states=snapshot.states,
            timers=snapshot.timers,
            read=read,
            now_ms=now_ms,
            keys=None if row.kept is None else row.kept.keys,
        )
        try:
            result = self._logic.run(given)
        except ComputationFailed as error:
            error.what += self._record_of(error, ranges, table)
            raise
        counters = {**result.counters, "bad": bad}
        _note(before, result.made, {})
        changes = replace(self._changes(result, row, ends, low, counters), before=before)
        if self._sending.weak:
            check_outputs(self._log, changes.outbox)
            left = publish_weakly(
                changes.outbox,
                log=self._log,
                birth=self._ref.birth,
                token=self._token,
                version=row.version,
                sending=self._sending,
            )
            changes = replace(changes, outbox=tuple(left))
        new = self._rows.commit(self._ref, token=self._token, version=row.version, changes=changes)
        self._known.committed(row, new, changes.states)
        return counters, new, bool(changes.outbox)

    def _record_of(self, error: ComputationFailed, ranges: Sequence[InputRange], table: pa.Table) -> str:
        """Where the record lies at which user code failed, as far as that is known."""
        partition = f", partition {self._ref.partition}"
        if error.offset is None:
            return partition
        inputs = table.column("_input").filter(pc.equal(table.column("_offset"), error.offset)).unique()
        # With several inputs two may have a record of that offset.
        found = [ranges[number].category for number in inputs.to_pylist()]
        return partition if len(found) != 1 else f" of {found[0]!r}{partition}"

    def _snapshot(
        self, row: IntervalRow, names: Iterable[str], timers_up_to: Millis, wall_up_to: Millis = LOW_MIN
    ) -> Snapshot:
        """What `row` says, or VersionMoved. States that are known as of its version are not read again."""
        self._known.fits(row)
        known, missing = self._known.split(names)
        found = self._rows.snapshot(
            self._ref, token=self._token, keys=missing, timers_up_to=timers_up_to, wall_up_to=wall_up_to
        )
        if found.row.version != row.version:
            raise VersionMoved("a twin wrote between two reads of a step")
        if self._cache is not None:
            self._known.learn(found.row, missing, found.states)
        return replace(found, states={**known, **found.states}) if known else found

    def _read_more(self, row: IntervalRow, names: Iterable[str]) -> Mapping[str, bytes]:
        """More states of the same version; if all are known, the commit will tell whether it still stands."""
        wanted = list(names)
        known, missing = self._known.split(wanted) if self._known.fits(row) else ({}, wanted)
        return self._snapshot(row, wanted, LOW_MIN).states if missing else known

    def _cuts(
        self, ranges: Sequence[InputRange], fresh: _Rows, row: IntervalRow
    ) -> tuple[_Rows, tuple[Cut, ...]]:
        marks = [
            self._log.marks(
                asked.category,
                self._ref.partition,
                above=row.input_low,
                up_to=max(asked.end, row.offsets[asked.birth]),
            )
            for asked in ranges
        ]
        order = order_at_marks(fresh.inputs, fresh.offsets, marks, low=row.input_low)
        if order is not None:
            fresh = _Rows.of(fresh.table.take(pa.array(order)))
        return fresh, cut_at_marks(fresh.inputs, fresh.offsets, marks, low=row.input_low)

    def _changes(
        self,
        result: StepResult,
        row: IntervalRow,
        ends: dict[str, int],
        low: Millis,
        counters: dict[str, int],
    ) -> Changes:
        sequences = Sequences(next=row.next_seq, in_life=not self._sending.dedup)
        outbox = [
            out
            for stream, produced in result.produced.items()
            for out in (
                pack_table(produced, self._outputs[stream], sequences)
                if isinstance(produced, pa.Table)
                else pack_productions(produced, self._outputs[stream], sequences, job=self._ref.job)
            )
        ]
        return Changes(
            offsets=ends,  # the planned end, not the last row seen: rows may have been filtered out
            input_low=low,
            states=result.states,
            timers_set=result.timers_set,
            timers_deleted=result.timers_deleted,
            outbox=tuple(outbox),
            counters={name: count for name, count in counters.items() if count},
            keys=result.keys,
        )

    def _send_outbox(self, now_ms: Millis) -> tuple[IntervalRow, bool]:
        """Publish whatever is undelivered, oldest first, and only then forget it. Are wall timers due?"""
        snapshot = self._rows.snapshot(
            self._ref, token=self._token, keys=(), timers_up_to=LOW_MIN, wall_up_to=now_ms
        )
        if not snapshot.outbox:
            return snapshot.row, bool(snapshot.timers)
        sent = publish_outbox(snapshot.outbox, log=self._log, birth=self._ref.birth, token=self._token)
        row = self._rows.delivered(self._ref, token=self._token, ids=sent)
        self._known.committed(snapshot.row, row, {})
        return row, bool(snapshot.timers)


def _note(before: dict[str, int | None], names: Iterable[str], states: Mapping[str, bytes]) -> None:
    """These were read, and some of them found."""
    before.update(dict.fromkeys(names))
    before.update(zip(states, map(len, states.values()), strict=True))


def _with_keys(table: pa.Table) -> pa.Table:
    """A missing key is the empty one."""
    keys = table.column("_key")
    if not keys.null_count:
        return table
    return table.set_column(table.column_names.index("_key"), "_key", pc.fill_null(keys, ""))


def _table_of(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    found = list(batches)
    if found:
        return pa.Table.from_batches(found)
    kinds = {
        "_input": pa.int8(),
        "_offset": pa.int64(),
        "_ts": pa.int64(),
        "_key": pa.string(),
        "_late": pa.bool_(),
    }
    return pa.table({name: pa.array([], kind) for name, kind in kinds.items()})


def _ints(table: pa.Table, name: str) -> Ints:
    return np.asarray(table.column(name).to_numpy(), dtype=np.int64)
