"""The stateful step: one interval, one micro-batch, exactly once (MillWheel 6.1, 6.2).

A step reads a snapshot, runs user code outside any transaction, commits one short fenced write, and then
sends the outbox in order. A crash between any two lines, a retry, or two workers that run the same step at
once do not change what is committed and sent.
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

# --- changes written by other workers --------------------------------------------------------------------

_HEAD = struct.Struct(">II")  # length and CRC-32 of what follows
FILE_SHARE = 4  # a file is replaced when it is larger than this many times the cache of a worker
FILE_BYTES_MIN = 2**20
HEAD_BYTES = 16  # length and checksum of the first record, its token and versions


class CachedChange(msgspec.Struct, frozen=True, array_like=True):
    """The state changes of one step under one token, from version `old` to version `new`."""

    token: int
    old: int
    new: int
    states: dict[str, bytes | None]  # None: deleted
    read: int = 0  # states that the step read from the row store


@dataclass(frozen=True, slots=True)
class FilePosition:
    """How far a worker has read a file of changes. `head`: the first bytes, which differ in a new file."""

    head: bytes = b""
    position: int = 0


_DECODER = msgspec.msgpack.Decoder(CachedChange)


class SharedChanges:
    """Files of state changes, in a folder that the workers of one machine share while they run."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder, self._bytes_max = folder, bytes_max

    def append(self, ref: IntervalRef, change: CachedChange) -> None:
        """Append what a step of this worker wrote. A change larger than a worker's cache is skipped."""
        if _bytes_of(change.states) > self._bytes_max:
            return
        data = msgspec.msgpack.encode(change)
        data = _HEAD.pack(len(data), zlib.crc32(data)) + data
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._append(self._path(ref), data)
        except OSError:
            pass  # for example a full disk: other workers read the row store instead

    def _append(self, path: Path, data: bytes) -> None:
        if _file_size(path) + len(data) > max(FILE_SHARE * self._bytes_max, FILE_BYTES_MIN):
            new = path.with_suffix(f".{os.getpid()}")
            new.write_bytes(data)
            new.replace(path)
            return
        # One write in append mode, so that concurrent appends of two workers do not mix.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def end(self, ref: IntervalRef) -> FilePosition:
        """The end of the file: where a worker with an empty cache starts to read."""
        try:
            with self._path(ref).open("rb") as file:
                return FilePosition(file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size)
        except OSError:
            return FilePosition()

    def read_after(self, ref: IntervalRef, place: FilePosition) -> tuple[list[CachedChange], FilePosition]:
        """The changes after this position, in order, and the position after the last one."""
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
    """The complete records and where they end; after a damaged record all of the data is discarded."""
    changes, at = [], 0
    while at + _HEAD.size <= len(data):
        length, crc = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(body) < length:
            break  # not written completely yet
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

# Overhead of an entry beside its name and bytes: two objects and a slot in a map.
ENTRY_BYTES = 200
# Tasks of several jobs share a worker; the least recently used job above this number loses its cache.
JOBS_MAX = 8


class CachedStates:
    """Cached states of one interval at one version. The value None means: this name has no state."""

    def __init__(self, read_to: FilePosition | None = None) -> None:
        self._at: tuple[int, int] | None = None
        self._states: OrderedDict[str, bytes | None] = OrderedDict()
        self.size = 0
        self.read_to = read_to or FilePosition()  # position in the changes of other workers
        self._written: CachedChange | None = None  # by the current step
        self._read = 0  # names that this step read from the row store

    def __len__(self) -> int:
        return len(self._states)

    def matches(self, row: IntervalRow) -> bool:
        """True if the cache is at the version of this row; otherwise the cache is cleared."""
        if self._at == (row.token, row.version):
            return True
        self.clear()
        return False

    def clear(self) -> None:
        """Drop all states."""
        self._at, self.size = None, 0
        self._states.clear()

    def apply(self, changes: Iterable[CachedChange], read_to: FilePosition) -> None:
        """Apply changes of other workers, as long as each follows the cached version."""
        self.read_to = read_to
        for change in changes:
            if self._at == (change.token, change.old):
                self._at = (change.token, change.new)
                self._change(change.states)

    def take_written(self) -> CachedChange | None:
        """What was written since the last call, to be shared with other workers."""
        written, read, self._written, self._read = self._written, self._read, None, 0
        return None if written is None else msgspec.structs.replace(written, read=read)

    def split(self, names: Iterable[str]) -> tuple[dict[str, bytes], list[str]]:
        """The cached states among these names, and the names that must be read."""
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

    def add_read(self, row: IntervalRow, names: Iterable[str], states: Mapping[str, bytes]) -> None:
        """Add the result of a read. Requires: `matches` was called with a row of the same version."""
        self._at = (row.token, row.version)
        for name in names:
            self._read += 1
            if name not in states:
                self._put(name, None)
        for name, value in states.items():
            self._put(name, value)

    def committed(self, old: IntervalRow, new: IntervalRow, changed: Mapping[str, bytes | None]) -> None:
        """Record a commit of this worker. If the version rose by more than 1, other workers wrote too."""
        if (new.token, new.version) != (old.token, old.version + 1):
            self.clear()
            return
        self._note(new, changed)
        if self.matches(old):
            self._at = (new.token, new.version)
            self._change(changed)

    def _note(self, new: IntervalRow, changed: Mapping[str, bytes | None]) -> None:
        """Consecutive writes of one step are one change."""
        last, old = self._written, new.version - 1
        if last is None or (last.token, last.new) != (new.token, old):
            last = CachedChange(token=new.token, old=old, new=old, states={})
        self._written = msgspec.structs.replace(last, new=new.version, states={**last.states, **changed})

    def _change(self, states: Mapping[str, bytes | None]) -> None:
        for name, value in states.items():
            if value == b"":  # a marker row, as for record ids: not worth caching
                self._drop(name)
            else:
                self._put(name, value)

    def shrink(self, bytes_max: int) -> None:
        """Evict the least recently used states until the size is at most `bytes_max`."""
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
    """The states of one job's intervals that one process has cached, at most `bytes_max`."""

    def __init__(self, bytes_max: int, changes: SharedChanges | None = None) -> None:
        self.bytes_max, self._changes = bytes_max, changes
        self._cached: OrderedDict[IntervalRef, CachedStates] = OrderedDict()

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        return sum(cached.size for cached in self._cached.values())

    def take(self, ref: IntervalRef) -> CachedStates:
        """Take the cached states of an interval out of the cache, until `put_back`."""
        cached = self._cached.pop(ref, None)
        if cached is None:
            return CachedStates(FilePosition() if self._changes is None else self._changes.end(ref))
        if self._changes is not None:
            cached.apply(*self._changes.read_after(ref, cached.read_to))
        return cached

    def put_back(self, ref: IntervalRef, cached: CachedStates) -> None:
        """Put the states back and share what was written; evict least recently used entries if needed."""
        written = cached.take_written()
        if self._changes is not None and written is not None:
            self._changes.append(ref, written)
        cached.shrink(self.bytes_max)
        if not len(cached):
            return
        self._cached[ref] = cached
        excess = self.size - self.bytes_max
        for other in list(self._cached):
            if excess <= 0:
                return
            before = self._cached[other].size
            self._cached[other].shrink(before - excess)
            excess -= before - self._cached[other].size
            if not len(self._cached[other]):
                del self._cached[other]


class StateCaches:
    """The caches of all jobs that a process works for."""

    def __init__(self) -> None:
        self._caches: OrderedDict[tuple[str, str], StateCache] = OrderedDict()

    def of(
        self, rows: str, job_birth: str, bytes_max: int, shared: Callable[[], Path | None] = lambda: None
    ) -> StateCache | None:
        """The cache of a job with its rows in this store; None if the job has no cache.

        `shared` is called once; it gives the folder that all workers of this machine share for the job.
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

# A conflict between twins is rare, so more attempts than this mean a bug.
COMMIT_ATTEMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Records of a step."""

    inputs: Ints
    offsets: Ints
    table: pa.Table

    @staticmethod
    def of(table: pa.Table) -> _Rows:
        return _Rows(inputs=_ints(table, "_input"), offsets=_ints(table, "_offset"), table=table)

    def from_offsets(self, committed: Sequence[int]) -> _Rows:
        """Only the records at or above the committed offset of their input."""
        fresh = self.offsets >= np.array(committed, dtype=np.int64)[self.inputs]
        return self if fresh.all() else _Rows.of(self.table.filter(pa.array(fresh)))

    def readable(self) -> tuple[_Rows, int]:
        """The records that could be parsed, and the number of the others."""
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
        self._cache, self._cached = cache, CachedStates()
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
        """Run one step. Without records it still sends unsent outbox rows, fires timers and raises lows.

        Rows of `batches` are in order and have `_input` (index into `ranges`), `_offset`, `_ts`, `_key`,
        `_late`. Other columns that start with an underscore are system columns. Rows with `_bad` are counted
        and skipped.
        """
        # Taken out of the cache until the end: a step that fails anywhere leaves no cached states.
        self._cached = CachedStates() if self._cache is None else self._cache.take(self._ref)
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
            self._cache.put_back(self._ref, self._cached)
        report_low(
            row, producer=self._ref.birth, log=self._log, outputs=list(self._outputs.values()), now_ms=now_ms
        )
        return StepReport.of(row, counters)

    def _attempt(
        self, ranges: Sequence[InputRange], rows: _Rows, row: IntervalRow, now_ms: Millis, has_wall: bool
    ) -> tuple[dict[str, int] | None, IntervalRow, bool]:
        """Run the step from the state in `row` and commit. No counters: a twin had committed this step.

        Raises VersionMoved if a twin commits in the meantime.
        """
        check_start(self._ref, row, ranges)
        fresh, bad = rows.from_offsets([row.offsets[asked.birth] for asked in ranges]).readable()
        fresh, cuts = self._cuts(ranges, fresh, row)
        ends = {asked.birth: asked.end for asked in ranges if asked.end > row.offsets[asked.birth]}
        if not ends and not cuts and not has_wall:
            return None, row, False
        low = cuts[-1].low if cuts else row.input_low
        table = _with_keys(fresh.table)
        wanted = list(self._logic.needed_states(table))
        snapshot = self._snapshot(row, wanted, low, wall_up_to=now_ms)
        # Sizes of the states that this step has read, so that the commit need not read them again.
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
        self._cached.committed(row, new, changes.states)
        return counters, new, bool(changes.outbox)

    def _record_of(self, error: ComputationFailed, ranges: Sequence[InputRange], table: pa.Table) -> str:
        """The position of the record for which user code failed, as far as it is cached."""
        partition = f", partition {self._ref.partition}"
        if error.offset is None:
            return partition
        inputs = table.column("_input").filter(pc.equal(table.column("_offset"), error.offset)).unique()
        # With several inputs, two of them may have a record with this offset.
        found = [ranges[number].category for number in inputs.to_pylist()]
        return partition if len(found) != 1 else f" of {found[0]!r}{partition}"

    def _snapshot(
        self, row: IntervalRow, names: Iterable[str], timers_up_to: Millis, wall_up_to: Millis = LOW_MIN
    ) -> Snapshot:
        """A snapshot at the version of `row`, or VersionMoved. Cached states are not read again."""
        self._cached.matches(row)
        cached, missing = self._cached.split(names)
        found = self._rows.snapshot(
            self._ref, token=self._token, keys=missing, timers_up_to=timers_up_to, wall_up_to=wall_up_to
        )
        if found.row.version != row.version:
            raise VersionMoved("a twin wrote between two reads of a step")
        if self._cache is not None:
            self._cached.add_read(found.row, missing, found.states)
        return replace(found, states={**cached, **found.states}) if cached else found

    def _read_more(self, row: IntervalRow, names: Iterable[str]) -> Mapping[str, bytes]:
        """More states of the same version. If all are cached, only the commit compares the version."""
        wanted = list(names)
        cached, missing = self._cached.split(wanted) if self._cached.matches(row) else ({}, wanted)
        return self._snapshot(row, wanted, LOW_MIN).states if missing else cached

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
            offsets=ends,  # the planned end: the last rows may have been filtered out
            input_low=low,
            states=result.states,
            timers_set=result.timers_set,
            timers_deleted=result.timers_deleted,
            outbox=tuple(outbox),
            counters={name: count for name, count in counters.items() if count},
            keys=result.keys,
        )

    def _send_outbox(self, now_ms: Millis) -> tuple[IntervalRow, bool]:
        """Publish unsent outbox rows, oldest first, then delete them. The flag: wall timers are due."""
        snapshot = self._rows.snapshot(
            self._ref, token=self._token, keys=(), timers_up_to=LOW_MIN, wall_up_to=now_ms
        )
        if not snapshot.outbox:
            return snapshot.row, bool(snapshot.timers)
        sent = publish_outbox(snapshot.outbox, log=self._log, birth=self._ref.birth, token=self._token)
        row = self._rows.delivered(self._ref, token=self._token, ids=sent)
        self._cached.committed(snapshot.row, row, {})
        return row, bool(snapshot.timers)


def _note(before: dict[str, int | None], names: Iterable[str], states: Mapping[str, bytes]) -> None:
    """Note the sizes of states that were read; None for names without a state."""
    before.update(dict.fromkeys(names))
    before.update(zip(states, map(len, states.values()), strict=True))


def _with_keys(table: pa.Table) -> pa.Table:
    """A null key becomes the empty key."""
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
