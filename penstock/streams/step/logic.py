"""What stands between the exactly-once step and the work it does: one call per interval and micro-batch.

Pure: the work gets the rows of the snapshot and gives back what to write. User code per key and record is one
kind of work (`KeyedLogic`); windows and joins over Arrow tables are another (`streams/operators`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from penstock.core.clock import Millis
from penstock.streams.dsl.computation import Computation, Record, record_type
from penstock.streams.rows.row_store import TimerRow
from penstock.streams.step.keyed_work import TIMERS_PER_STEP_MAX, KeyedWork, SetAside
from penstock.streams.step.outbox import Production
from penstock.streams.step.watermark import Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """What the work of one step is given.

    `table`: the rows not committed before, in order, with `_input`, `_offset`, `_ts`, `_key` (never null) and
    `_late`. `states`: of the rows asked for and of those with due timers. `read`: more rows of the same
    snapshot. `version`: of the interval before this step; no two commits have the same. `keys`: how many
    there are, as the last step said; None: it said nothing.
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
    """What the work of one step changed: in memory until the commit."""

    states: Mapping[str, bytes | None] = field(default_factory=dict)  # None: delete
    timers_set: tuple[TimerRow, ...] = ()
    timers_deleted: tuple[tuple[str, str], ...] = ()
    # Of each stream a list, or a table with `_ts`, `_key`, `_late` and the stream's columns.
    produced: Mapping[str, Sequence[Production] | pa.Table] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    # Where a row is not the state of one key: rows that cannot have been there before, and how many keys
    # there are now.
    made: Collection[str] = ()
    keys: int | None = None


class StepLogic(Protocol):
    """The work of a job's steps. Keeps nothing between two calls: only states and timers survive."""

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        """Stream -> column -> Spark SQL type."""

    def wanted(self, table: pa.Table) -> Iterable[str]:
        """Names of the state rows it needs, beside those of due timers."""

    def run(self, given: StepInput) -> StepResult:
        """The records up to each cut, then what its low makes due, then on to the next."""


class KeyedLogic:
    """A Computation: its hooks run per record and per timer."""

    def __init__(
        self,
        computation: Computation,
        *,
        timers_max: int = TIMERS_PER_STEP_MAX,
        inputs: Sequence[tuple[str, Sequence[str]]] = (),
        dead: tuple[str, int] | None = None,
        late: str | None = None,
    ) -> None:
        """`inputs`: name and columns of each, by the number in `_input`; none: there is only one.

        `dead`: the stream for records at which a hook raises, and the partition they come from.
        `late`: the job's word on late records; None: the computation's own.
        """
        self._late = late
        self._dead = dead
        self._computation, self._timers_max, self._inputs = computation, timers_max, tuple(inputs)

    @property
    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        return self._computation.outputs

    def wanted(self, table: pa.Table) -> Iterable[str]:
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
        """The records, in order, each with the columns and the name of its input."""
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
