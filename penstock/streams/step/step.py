"""What every step is given and what it reports, and how a driver opens an interval before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.core.clock import Millis
from penstock.core.errors import IntervalError, OffsetAhead, RowsOlderThanBus
from penstock.streams.bus.log import LOW_MIN, CategorySpec, Log
from penstock.streams.rows.codec import name_of
from penstock.streams.rows.row_store import IntervalRef, IntervalRow, RowStore, counter_name

# A stateless step's sequence is the input offset and the index among the records made of that input record.
INDEX_BITS = 16
_DEAD = "dead"
DEAD_COLUMNS: tuple[tuple[str, str], ...] = (
    ("reason", "string"),
    ("value", "binary"),
    ("source_partition", "int"),
    ("source_offset", "bigint"),
)


def dead_stream(number: int) -> str:
    """The stream for what could not be read of input `number`; no stream of a user is called so."""
    return f"{_DEAD}.{number}" if number else _DEAD


def dead_category(job: str) -> str:
    """Where the records go at which the user code of a job with state raises."""
    return f"{job}.dead"


def is_dead(stream: str) -> bool:
    """True for dead letters, which have no watermark."""
    return stream == _DEAD or stream.startswith(f"{_DEAD}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRange:
    """What a step reads of one input: offsets [start, end) of the interval's own partition.

    `number`: of the input, as rows have it in `_input`.
    """

    category: str
    birth: str
    start: int
    end: int
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """Where one output stream goes. `watermarked` is False for dead letters, which nobody waits for."""

    stream: str
    category: str
    birth: str
    partitions: int
    columns: tuple[tuple[str, str], ...]
    watermarked: bool = True

    def schema(self) -> pa.Schema:
        """The Arrow schema of what is published."""
        return CategorySpec(name=self.category, partitions=self.partitions, columns=self.columns).schema()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did, and where the interval stands after it."""

    committed: bool  # False: a twin had done it, or there was nothing to do
    offsets: Mapping[str, int]
    input_low: Millis
    output_low: Millis
    records: int = 0
    late: int = 0
    behind_low: int = 0  # on time by their flag, yet behind the low: somebody upstream broke a promise
    timers: int = 0
    published: int = 0
    bad: int = 0

    @staticmethod
    def of(row: IntervalRow, counters: Mapping[str, int] | None) -> StepReport:
        """The report of a step that counted this, or of one that had nothing to commit."""
        counted = counters or {}
        return StepReport(
            committed=counters is not None,
            offsets=row.offsets,
            input_low=row.input_low,
            output_low=row.output_low,
            records=counted.get("records", 0),
            late=counted.get("late", 0),
            behind_low=counted.get("behind_low", 0),
            timers=counted.get("timers", 0),
            published=counted.get("productions", 0),
            bad=counted.get("bad", 0) + counted.get("poison", 0),
        )


def open_interval(
    *,
    ref: IntervalRef,
    generation: int,
    shard_epoch: int,
    producer_for: Callable[[str], str],
    rows: RowStore,
    log: Log,
    outputs: Sequence[OutputSpec],
) -> IntervalRow:
    """Own the interval: a new token in its rows, then on the bus. Nothing is read for a step before this.

    `producer_for`: as whom records made of the input of this birth are published. Inputs that an earlier plan
    had count too: whoever still works for it is fenced.
    """
    row = rows.acquire(ref, generation=generation, shard_epoch=shard_epoch)
    for output in outputs:
        check_category(log, output.category, output.birth)
        for birth in row.offsets:
            producer = producer_for(birth)
            # Fenced before compared: a late publish of the old life could slip in behind the comparison.
            log.fence(output.category, producer, row.token)
            ahead = _bus_ahead(ref, row, producer, birth, output, log.published_to(output.category, producer))
            if ahead is not None:
                # A successor may have published meanwhile: then we are fenced, and nothing is wrong.
                rows.snapshot(ref, token=row.token, keys=(), timers_up_to=LOW_MIN)
                raise ahead
    return row


def check_category(log: Log, category: str, birth: str) -> None:
    """Names are for people, births are compared: a category made anew is another one."""
    found = log.describe(category).birth
    if found != birth:
        raise IntervalError(
            f"category {category!r} is not the one that was planned",
            why=f"it was born as {found}, the plan has {birth}: it was removed and created again",
            fix="submit the pipeline again, so that its jobs get a plan for the category as it is",
        )


def check_start(ref: IntervalRef, row: IntervalRow, ranges: Sequence[InputRange]) -> None:
    """A step may repeat what was committed, never skip."""
    for asked in ranges:
        committed = row.offsets.get(asked.birth)
        if committed is None:
            raise IntervalError(
                f"interval {name_of(ref)} does not read category {asked.category!r}",
                why=f"it has no offset for the birth {asked.birth}, only for {sorted(row.offsets)}",
                fix="let the job's plan add the input; a task never chooses where to start",
            )
        if asked.start > committed:
            raise OffsetAhead(
                f"interval {name_of(ref)} would skip records of {asked.category!r}",
                why=f"the step starts at offset {asked.start}, committed is {committed}",
                fix="restart the task, it starts from the committed offset; report it if it happens again",
            )


def report_low(
    row: IntervalRow, *, producer: str, log: Log, outputs: Sequence[OutputSpec], now_ms: Millis
) -> None:
    """Tell the outputs how far this interval is. `row` is durable: a low above it could go back."""
    for output in outputs:
        if output.watermarked:
            log.report_low(
                output.category, producer=producer, epoch=row.token, low=row.output_low, now_ms=now_ms
            )


def _bus_ahead(
    ref: IntervalRef,
    row: IntervalRow,
    producer: str,
    birth: str,
    output: OutputSpec,
    published: Mapping[int, int],
) -> RowsOlderThanBus | None:
    for partition, last in published.items():
        if producer == ref.birth:  # stateful: sequences are counted by the outbox
            known = row.next_seq.get(counter_name(output.birth, partition, in_life=False), 1) - 1
        else:  # stateless: sequences are input offsets, committed or promised by an intent
            _, promised = (row.intent.ranges if row.intent else {}).get(birth, (0, 0))
            known = (max(row.offsets.get(birth, 0), promised) + 1 << INDEX_BITS) - 1
        if last > known:
            return RowsOlderThanBus(
                f"the rows of interval {name_of(ref)} are older than the bus",
                why=f"{output.category!r} partition {partition} has sequence {last} of this interval, "
                f"its rows know of {known} at most: they were restored from an older copy",
                fix="restore the newest copy of the interval's rows, or reset the job with a new birth",
            )
    return None
