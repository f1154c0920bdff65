"""Partial results as state rows: one block per time cell and step, merged when there are many.

Pure. A step adds to a window without reading the window's state: it writes its own partial results of all
keys as one row, and the blocks of a window are merged when its result is due. The row `#index` lists the
blocks. Eight blocks of one level are merged into one, so that a window that is open for a day has only a few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from penstock.core.errors import StateMismatch
from penstock.streams.operators.aggregates import CELL, Aggregates, Partials
from penstock.streams.step.keyed_work import StepInput


def decode_rows(states: Mapping[str, bytes], schema: pa.Schema, *, job: str, operator: str) -> pa.Table:
    """The stored rows of these keys, key by key; the schema's first column is the key.

    StateMismatch: another plan wrote them.
    """
    names = schema.names
    rows: list[tuple[Any, ...]] = []
    for key, data in sorted(states.items()):
        try:
            found = msgspec.msgpack.decode(data, type=list[list[Any]])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise _mismatch(key, job, operator, str(error)) from error
        if any(len(row) != len(names) - 1 for row in found):
            raise _mismatch(key, job, operator, "it has other columns")
        rows += [(key, *row) for row in found]
    columns: Iterable[Sequence[Any]] = zip(*rows, strict=True) if rows else [()] * len(names)
    try:
        arrays = [pa.array(column, schema.field(number).type) for number, column in enumerate(columns)]
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise _mismatch(min(states), job, operator, str(error)) from error
    return pa.Table.from_arrays(arrays, schema=schema)


def _mismatch(key: str, job: str, operator: str, why: str) -> StateMismatch:
    return StateMismatch(
        f"the state of key {key!r} of job {job!r} does not match its {operator}",
        why=why,
        fix="reset the job's state: another plan wrote it",
    )


INDEX = "#index"
FAN = 8
Read = Callable[[Iterable[str]], Mapping[str, bytes]]


class Block(NamedTuple):
    """The name of a row. `fired`: 1 if its results were emitted already, 0 if not."""

    cell: int
    fired: int
    level: int
    version: int

    @property
    def name(self) -> str:
        return f"{self.cell}:{self.fired}:{self.level}:{self.version}"


class Blocks:
    """The blocks of an interval: those of the snapshot, and the changes of this step."""

    def __init__(self, aggregates: Aggregates, given: StepInput) -> None:
        self._aggregates, self._read = aggregates, given.read
        self._version, self._job = given.version, given.job
        self._before = given.states.get(INDEX)
        self._stored = set(self._decoded_index(self._before))
        self._gone: list[Block] = []
        self._fresh: dict[int, list[Partials]] = {0: [], 1: []}
        # Number of keys in all blocks; a key in several blocks is counted several times.
        self.keys = self._counted(self._stored) if given.keys is None else given.keys
        self.made: list[str] = []

    def cells(self, fired: int) -> set[int]:
        """Cells with partial results."""
        known = {block.cell for block in self._stored if block.fired == fired}
        return known.union(*(np.unique(part.cells).tolist() for part in self._fresh[fired]))

    def add(self, partials: Partials, fired: int = 0) -> None:
        """Add partial results; they are merged later."""
        if partials.main.num_rows:
            self._fresh[fired].append(partials)

    def take(self, cells: Iterable[int], *fired: int) -> list[Partials]:
        """Remove and return all partial results of some cells."""
        wanted, kinds = set(cells), fired or (0, 1)
        blocks = sorted(block for block in self._stored if block.cell in wanted and block.fired in kinds)
        found = self._load(blocks)
        self.keys -= sum(part.main.num_rows for part in found)
        self._stored -= set(blocks)
        self._gone += blocks
        for kind in kinds:
            for number, part in enumerate(self._fresh[kind]):
                there = set(np.unique(part.cells).tolist())
                if there & wanted:
                    found.append(part if there <= wanted else part.where(wanted))
                    self._fresh[kind][number] = part.where(there - wanted)
            self._fresh[kind] = [part for part in self._fresh[kind] if part.main.num_rows]
        return found

    def drop(self, cells: Iterable[int]) -> None:
        """Remove all partial results of some cells."""
        wanted = set(cells)
        blocks = {block for block in self._stored if block.cell in wanted}
        self.keys -= self._counted(blocks)
        self._stored -= blocks
        self._gone += sorted(blocks)
        for kind, parts in self._fresh.items() if wanted else ():
            left = [part.where(set(np.unique(part.cells).tolist()) - wanted) for part in parts]
            self._fresh[kind] = [part for part in left if part.main.num_rows]

    def read(self, cells: Iterable[int]) -> list[Partials]:
        """Like `take`, without removing. Requires: these cells have no new results of this step."""
        wanted = set(cells)
        return self._load(sorted(block for block in self._stored if block.cell in wanted))

    def is_one_block(self, cell: int) -> bool:
        """True if a cell is one stored row, so that nothing needs to be merged."""
        fresh = any((part.cells == cell).any() for parts in self._fresh.values() for part in parts)
        return not fresh and sum(block.cell == cell for block in self._stored) == 1

    def changes(self) -> dict[str, bytes | None]:
        """The rows to write and delete."""
        written: dict[str, bytes | None] = {}
        for fired, parts in self._fresh.items():
            if parts:
                written |= self._written(fired, self._aggregates.merge(parts))
        written = {**{block.name: None for block in self._gone}, **written}
        index = msgspec.msgpack.encode(sorted(self._stored)) if self._stored else None
        if index != self._before:
            written[INDEX] = index
        return written

    def _written(self, fired: int, merged: Partials) -> dict[str, bytes]:
        """One block for each cell, merged with older blocks of the cell if there are too many."""
        cells = np.unique(merged.cells).tolist()
        absorbed = {cell: self._blocks_to_merge(cell, fired) for cell in cells}
        older = [block for _, blocks in absorbed.values() for block in blocks]
        if older:
            loaded = self._load(older)
            self.keys -= sum(part.main.num_rows for part in loaded)
            merged = self._aggregates.merge([*loaded, merged])
            self._stored -= set(older)
            self._gone += older
        made = {}
        for cell in cells:
            block = Block(cell, fired, absorbed[cell][0], self._version)
            self._stored.add(block)
            own = merged if len(cells) == 1 else merged.where([cell])
            made[block.name] = _encoded(own)
            self.keys += own.main.num_rows
        self.made += made
        return made

    def _blocks_to_merge(self, cell: int, fired: int) -> tuple[int, list[Block]]:
        mine = [block for block in self._stored if (block.cell, block.fired) == (cell, fired)]
        level, found = 0, []
        while len(same := [block for block in mine if block.level == level]) >= FAN - 1:
            found += same
            level += 1
        return level, sorted(found)

    def _load(self, blocks: Sequence[Block]) -> list[Partials]:
        if not blocks:
            return []
        rows = self._read([block.name for block in blocks])
        missing = [block.name for block in blocks if block.name not in rows]
        if missing:
            raise self._damaged(f"blocks of its index are missing: {missing[:3]}")
        return [_decoded(rows[block.name], block.cell) for block in blocks]

    def _counted(self, blocks: Iterable[Block]) -> int:
        # One by one: all together may not fit into memory.
        return sum(part.main.num_rows for block in sorted(blocks) for part in self._load([block]))

    def _decoded_index(self, row: bytes | None) -> list[Block]:
        if row is None:
            return []
        try:
            return [
                Block(*item) for item in msgspec.msgpack.decode(row, type=list[tuple[int, int, int, int]])
            ]
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, why: str) -> StateMismatch:
        return StateMismatch(
            f"the state of job {self._job!r} is not that of a window",
            why=why,
            fix="reset the job's state: another kind of step wrote it",
        )


def _encoded(partials: Partials) -> bytes:
    tables = {"": partials.main, **partials.long}
    return msgspec.msgpack.encode(
        {name: ipc_of(table.drop_columns([CELL])) for name, table in tables.items()}
    )


def _decoded(row: bytes, cell: int) -> Partials:
    tables = {}
    for name, data in msgspec.msgpack.decode(row, type=dict[str, bytes]).items():
        table = table_of(data)
        cells = pa.array(np.full(table.num_rows, cell, dtype=np.int64))
        tables[name] = table.add_column(0, CELL, cells)
    return Partials(main=tables.pop(""), long=tables)


def ipc_of(table: pa.Table) -> bytes:
    """A table as bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return bytes(sink.getvalue().to_pybytes())


def table_of(data: bytes) -> pa.Table:
    """The table from the bytes of `ipc_of`."""
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()
