"""Deduplication by the records' own ids: a record whose id was seen within the slack is dropped (MillWheel
6.1.1).

Seen ids are rows of the interval, committed with the step that read the record. A Bloom filter finds ids that
are certainly new; only the others are looked up in the rows, so a false positive costs one read. Ids are
stored in slots of event time: when the low has passed the end of a slot by the slack, the slot has expired,
and its rows are deleted in pieces. Whether a slot has expired depends on the low at the record, not on what
is deleted: the dropped records are a function of the log, however it is cut.

Rows, all under `PREFIX`: one per id (`i<slot>:<digest>`); per step and slot a chunk with the added digests
(`c<slot>:<level>:<version>`), from which filters are built and slots are deleted; and `index`, the list of
chunks. Eight chunks of one level are merged into one.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from rbloom import Bloom

from penstock.core.clock import Millis
from penstock.core.errors import ComputationFailed, StateMismatch
from penstock.streams.rows.row_store import PREFIX, IntervalRef
from penstock.streams.step.keyed_work import StepInput, StepLogic, StepResult
from penstock.streams.step.watermark import Cut, Ints

INDEX = f"{PREFIX}index"
DIGEST_BYTES = 16
FAN = 8
CHUNK_IDS_MAX = 50_000  # limit for a merged chunk, and for the ids deleted in one step
CHUNKS_PER_READ = 64
FALSE_POSITIVES = 0.001
LAYER_IDS_MIN = 10_000
INTERVALS_MAX = 64
SLOT_MS_MIN: Millis = 1000

Digest = bytes


class Chunk(NamedTuple):
    """The ids that one step added to one slot. `slot`: its end in event time; `mark`: a hash of the ids."""

    slot: Millis
    level: int
    version: int
    size: int  # how many
    mark: int

    @property
    def name(self) -> str:
        return f"{PREFIX}c{self.slot}:{self.level}:{self.version}"


class IdFilters:
    """Bloom filters over the ids of one interval in one process: per slot, with their chunks.

    A filter may contain ids that were not committed (false positives), but it always contains its chunks.
    """

    def __init__(self) -> None:
        self._slots: dict[Millis, _SlotFilter] = {}

    def missing(self, index: Iterable[Chunk]) -> list[Chunk]:
        """The chunks that are not in the filters yet. Filters of slots that left the index are dropped."""
        chunks = list(index)
        live = {chunk.slot for chunk in chunks}
        self._slots = {slot: found for slot, found in self._slots.items() if slot in live}
        return [chunk for chunk in chunks if chunk not in self._of(chunk.slot).chunks]

    def include(self, chunk: Chunk, digests: Sequence[Digest]) -> None:
        """Add a chunk to the filter of its slot."""
        found = self._of(chunk.slot)
        found.chunks.add(chunk)
        found.add(digests)

    def slots_with(self, digest: Digest) -> list[Millis]:
        """The slots that may contain it; empty: it is certainly new."""
        return [slot for slot, found in self._slots.items() if found.maybe(digest)]

    def _of(self, slot: Millis) -> _SlotFilter:
        return self._slots.setdefault(slot, _SlotFilter())


class _SlotFilter:
    """A Bloom filter that grows by layers, each twice as large as the one before."""

    def __init__(self) -> None:
        self.chunks: set[Chunk] = set()
        self._layers: list[Bloom] = []
        self._room = 0

    def add(self, digests: Sequence[Digest]) -> None:
        fresh = [digest for digest in digests if not self.maybe(digest)]
        if len(fresh) > self._room:
            size = max(LAYER_IDS_MIN << len(self._layers), 2 * len(fresh))
            self._layers.append(Bloom(size, FALSE_POSITIVES))
            self._room = size
        if fresh:
            self._layers[-1].update(fresh)
            self._room -= len(fresh)

    def maybe(self, digest: Digest) -> bool:
        return any(digest in layer for layer in self._layers)


class FilterCache:
    """An LRU cache of the filters of a process's intervals."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, IntervalRef], IdFilters] = OrderedDict()

    def of(self, rows: str, ref: IntervalRef) -> IdFilters:
        """The filters of one interval; new ones if they are not in the cache."""
        found = self._kept.pop((rows, ref), None) or IdFilters()
        self._kept[rows, ref] = found
        while len(self._kept) > INTERVALS_MAX:
            self._kept.popitem(last=False)
        return found


class DropRepeated:
    """Drops records whose id was seen before, and passes the others to the inner logic."""

    def __init__(
        self,
        inner: StepLogic,
        *,
        column: str,
        slack_ms: Millis,
        filters: IdFilters,
        inputs: Sequence[str] = (),
    ) -> None:
        """`inputs`: names of the inputs, by the number in `_input`; empty: a single input."""
        self._inner, self._column, self._slack_ms, self._filters = inner, column, slack_ms, filters
        self._inputs = tuple(inputs)
        self._slot_ms = max(SLOT_MS_MIN, slack_ms // 4)

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        return self._inner.outputs

    def needed_states(self, table: pa.Table) -> Iterable[str]:
        yield from self._inner.needed_states(table)
        yield INDEX

    def run(self, given: StepInput) -> StepResult:
        index = _decoded_index(given)
        for some in _slices(self._filters.missing(index), CHUNKS_PER_READ):
            for chunk, digests in _read_chunks(given, some):
                self._filters.include(chunk, digests)
        lows = _lows(given)
        is_new, added = self._decide(given, lows)
        table = given.table if is_new.all() else given.table.filter(pa.array(is_new))
        wanted = {*self._inner.needed_states(table), *(timer.key for timer in given.timers)}
        result = self._inner.run(
            replace(
                given,
                table=table,
                cuts=_cuts_without(given.cuts, is_new),
                states={name: value for name, value in given.states.items() if name in wanted},
            )
        )
        repeated = int(np.count_nonzero(~is_new))
        return replace(
            result,
            states={**result.states, **self._changes(given, index, added)},
            counters={**result.counters, "repeated": repeated} if repeated else result.counters,
        )

    def _decide(
        self, given: StepInput, lows: Ints
    ) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], dict[Millis, list[Digest]]]:
        """For each record whether it is new; and the ids to add to each slot."""
        digests = list(_digests(given.table, self._column, given.job, self._inputs))
        stored = self._stored(given, {digest for digest in digests if digest is not None})
        stamps = np.asarray(given.table.column("_ts").to_numpy(), dtype=np.int64).tolist()
        is_new = np.ones(len(digests), dtype=np.bool_)
        added: dict[Millis, list[Digest]] = {}
        for place, (digest, ts, low) in enumerate(zip(digests, stamps, lows.tolist(), strict=True)):
            if digest is None:
                continue  # a record without an id is never dropped
            slots = stored.setdefault(digest, set())
            if any(slot + self._slack_ms > low for slot in slots):
                is_new[place] = False
                continue
            own = (ts // self._slot_ms + 1) * self._slot_ms
            if own + self._slack_ms > low and own not in slots:
                slots.add(own)
                added.setdefault(own, []).append(digest)
        return is_new, added

    def _stored(self, given: StepInput, digests: Iterable[Digest]) -> dict[Digest, set[Millis]]:
        """The slots that contain each id, from the rows; ids that the filters call new are not read."""
        asked = {
            id_name(slot, digest): (digest, slot)
            for digest in digests
            for slot in self._filters.slots_with(digest)
        }
        found: dict[Digest, set[Millis]] = {}
        for name in given.read(list(asked)) if asked else ():
            if name in asked:
                digest, slot = asked[name]
                found.setdefault(digest, set()).add(slot)
        return found

    def _changes(
        self, given: StepInput, index: list[Chunk], added: Mapping[Millis, list[Digest]]
    ) -> dict[str, bytes | None]:
        written: dict[str, bytes | None] = {}
        left = [chunk for chunk in index if chunk.slot + self._slack_ms > given.low_after]
        gone = [chunk for chunk in index if chunk.slot + self._slack_ms <= given.low_after]
        for chunk, digests in _read_chunks(given, _first_ids(gone)):
            written |= {id_name(chunk.slot, digest): None for digest in digests}
            written[chunk.name] = None
            gone.remove(chunk)
        left += gone
        for slot, digests in added.items():
            written |= {id_name(slot, digest): b"" for digest in digests}
            if slot + self._slack_ms <= given.low_after:
                # The slot expires within this step: rows would never be deleted.
                written |= {id_name(slot, digest): None for digest in digests}
                continue
            older, level = _chunks_to_merge(left, slot, len(digests))
            merged = [*digests, *(one for _, found in _read_chunks(given, older) for one in found)]
            chunk = _chunk_of(slot, level, given.version, merged)
            written |= {old.name: None for old in older}
            written[chunk.name] = b"".join(merged)
            left = [*(old for old in left if old not in older), chunk]
            self._filters.include(chunk, digests)
        if sorted(left) != index:
            written[INDEX] = msgspec.msgpack.encode(sorted(left)) if left else None
        return written


def id_name(slot: Millis, digest: Digest) -> str:
    """The name of the row of a seen id."""
    return f"{PREFIX}i{slot}:{digest.hex()}"


def _digests(table: pa.Table, column: str, job: str, inputs: Sequence[str] = ()) -> Iterator[Digest | None]:
    """The digest of each record's input, key and id; None for a record without id."""
    if not table.num_rows:
        return
    if column not in table.column_names:
        raise ComputationFailed(
            f"records of job {job!r} have no column {column!r}",
            why="its computation declares it as `record_id`",
            fix="select the column up to the computation, or remove `record_id` from it",
            job=job,
        )
    columns = (table.column(name).to_pylist() for name in ("_input", "_key", column))
    # By name, because the number changes when the inputs are declared in another order.
    sources = [b"%d=%b" % (len(name), name.encode()) for name in inputs] or [b"0"]
    for number, key, own in zip(*columns, strict=True):
        if key.startswith(PREFIX):
            raise ComputationFailed(
                f"job {job!r} cannot store state for a key that starts with {PREFIX!r}",
                why="this prefix is reserved for the rows of record ids",
                fix="use another key, or remove `record_id` from the computation",
                job=job,
                key=key,
            )
        if own is None:
            yield None
            continue
        text = own if isinstance(own, bytes) else str(own).encode()
        name = key.encode()
        yield hashlib.blake2b(
            b"%b:%d:%b%b" % (sources[number], len(name), name, text), digest_size=DIGEST_BYTES
        ).digest()


def _lows(given: StepInput) -> Ints:
    """For each record the low at which it is read."""
    positions = np.array([cut.position for cut in given.cuts], dtype=np.int64)
    lows = np.array([given.low, *(cut.low for cut in given.cuts)], dtype=np.int64)
    return lows[np.searchsorted(positions, np.arange(given.table.num_rows), side="right")]


def _cuts_without(cuts: Sequence[Cut], is_new: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[Cut, ...]:
    before = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(is_new)))
    return tuple(Cut(position=int(before[cut.position]), low=cut.low) for cut in cuts)


def _decoded_index(given: StepInput) -> list[Chunk]:
    row = given.states.get(INDEX)
    if row is None:
        return []
    try:
        return [
            Chunk(*item) for item in msgspec.msgpack.decode(row, type=list[tuple[int, int, int, int, int]])
        ]
    except msgspec.MsgspecError as error:
        raise _damaged(given.job, str(error)) from error


def _read_chunks(given: StepInput, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, list[Digest]]]:
    rows = given.read([chunk.name for chunk in chunks]) if chunks else {}
    for chunk in chunks:
        data = rows.get(chunk.name)
        if data is None or len(data) != chunk.size * DIGEST_BYTES:
            raise _damaged(given.job, f"chunk {chunk.name!r} of the index is missing or has the wrong size")
        yield chunk, [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)]


def _damaged(job: str, why: str) -> StateMismatch:
    return StateMismatch(
        f"the record ids of job {job!r} cannot be read",
        why=why,
        fix="reset the job's state: its rows are damaged",
    )


def _chunk_of(slot: Millis, level: int, version: int, digests: Sequence[Digest]) -> Chunk:
    mark = hashlib.blake2b(b"".join(digests), digest_size=8).digest()
    return Chunk(slot, level, version, len(digests), int.from_bytes(mark, "big") >> 1)


def _chunks_to_merge(chunks: Sequence[Chunk], slot: Millis, count: int) -> tuple[list[Chunk], int]:
    """The older chunks to merge with a new chunk of a slot, and the level of the result."""
    found: list[Chunk] = []
    level = 0
    while True:
        same = [chunk for chunk in chunks if (chunk.slot, chunk.level) == (slot, level)]
        size = count + sum(chunk.size for chunk in (*found, *same))
        if len(same) < FAN - 1 or size > CHUNK_IDS_MAX:
            return found, level
        found += same
        level += 1


def _first_ids(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks to delete in one step: at least one, and at most CHUNK_IDS_MAX ids."""
    found: list[Chunk] = []
    for chunk in chunks:
        if found and sum(one.size for one in found) + chunk.size > CHUNK_IDS_MAX:
            break
        found.append(chunk)
    return found


def _slices(chunks: Sequence[Chunk], size: int) -> Iterator[Sequence[Chunk]]:
    for first in range(0, len(chunks), size):
        yield chunks[first : first + size]
