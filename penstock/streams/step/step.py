"""What every step is given and what it reports, and how a driver opens an interval before the first step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import pyarrow as pa

from penstock.core import text as json_text
from penstock.core.clock import Millis
from penstock.core.errors import IntervalError, OffsetAhead, RowsOlderThanBus
from penstock.jobs.config import PackageRef
from penstock.jobs.tasks import TaskSpec
from penstock.streams.bus.log import LOW_COLUMN, LOW_MIN, Category, CategorySpec, Log
from penstock.streams.rows.row_store import IntervalRef, IntervalRow, RowStore, counter_name, name_of

# Columns that every row between the source and the step carries beside the user's own.
# `_kind`: 0 data, 1 begin of the range, 2 end of it, 3 a record that could not be read, 4 all of it was done
# at the source.
SYSTEM_COLUMNS = (
    ("_kind", "tinyint"),
    ("_meta", "string"),
    ("_input", "tinyint"),
    ("_offset", "bigint"),
    ("_ts", "bigint"),
    ("_key", "string"),
    ("_late", "boolean"),
    LOW_COLUMN,
    ("_bad", "string"),
    ("_raw", "binary"),
)
DATA, BEGIN, END, BAD, DONE = 0, 1, 2, 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """A category a task reads, as it was when the task started; `columns`: those that are read."""

    category: str
    birth: str
    columns: tuple[tuple[str, str], ...]
    format: str
    watermark: str
    lateness_ms: Millis
    ts_column: str
    partitions: int
    idle_after_ms: Millis = 0
    ahead_max_ms: Millis = 0  # of event_time alone; 0: records may come from any future


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedInterval:
    """An interval this task acquired: under which token it writes, and as whom it publishes.

    `producers`: by the birth of the input a record was made of, also of inputs that an earlier plan had.
    """

    ref: IntervalRef
    token: int
    producers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDescriptor:
    """A task spec and what the task added when it acquired its intervals.

    It travels to Spark's workers as JSON, as an option of the data source.
    """

    spec: TaskSpec
    bus: str
    rows: str
    package_folder: str  # the package of `spec.config`, unpacked
    intervals: tuple[OwnedInterval, ...]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    drain_file: str = ""  # once it exists no further batch is planned: how a task stops between batches
    turn_ms: Millis = 0  # how long one of its intervals may take in a batch; 0: as long as it takes
    # partition -> {input category birth: {offset: why}}: records at which Spark's own expressions failed.
    poisoned: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)
    # Batch mode only: partition -> {input category birth: [start, end)}, for replaying an intent.
    replay: Mapping[str, Mapping[str, tuple[int, int]]] | None = None
    _plan: Mapping[str, Any] | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def kind(self) -> str:
        return self.spec.config.kind

    @property
    def plan(self) -> Mapping[str, Any]:
        """As it is stored: an intent is compared by its text, so it passes through no other form."""
        if self._plan is None:
            object.__setattr__(self, "_plan", json_text.loads(self.spec.config_json)["plan"])
            assert self._plan is not None
        return self._plan

    @property
    def package(self) -> PackageRef:
        return self.spec.config.code

    @property
    def poison(self) -> str:
        """`fail`: stop at a record that cannot be processed; `skip`: put aside, also if user code raises."""
        return self.spec.config.poison

    @property
    def batch_rows_max(self) -> int:
        return self.spec.config.batch_rows_max

    @property
    def batch_bytes_max(self) -> int:
        return self.spec.config.batch_bytes_max

    @property
    def state_cache_bytes(self) -> int:
        """How much of its state each worker keeps between batches."""
        return self.spec.config.state_cache_bytes

    def with_config(self, **changes: Any) -> TaskDescriptor:
        """The same task with other values in its config."""
        stored = {**json_text.loads(self.spec.config_json), **changes}
        return replace(self, spec=replace(self.spec, config_json=json_text.dumps(stored)))

    def logic(self) -> dict[str, Any]:
        """What decides which records come out for a range: kept in an intent, so that a successor can
        repeat it.
        """
        return {
            "inputs": [_said_of(source) for source in self.inputs],
            "outputs": [asdict(output) for output in self.outputs],
            "plan": dict(self.plan),
        }

    def logic_hash(self) -> str:
        return hashlib.sha256(json.dumps(self.logic(), sort_keys=True).encode()).hexdigest()[:16]

    def schema_ddl(self) -> str:
        """Columns of the source's rows, as Spark SQL."""
        return schema_ddl(
            (self.column(number, name), kind)
            for number, source in enumerate(self.inputs)
            for name, kind in source.columns
        )

    def column(self, number: int, name: str) -> str:
        """What a column of input `number` is called between source and step: inputs may share names."""
        return f"_i{number}_{name}" if self.plan.get("branches") else name

    def inputs_of(self, partition: int) -> tuple[tuple[int, InputSpec], ...]:
        """Number and input of those that have this partition."""
        return tuple(
            (number, source) for number, source in enumerate(self.inputs) if partition < source.partitions
        )

    def to_json(self) -> str:
        data = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        data["spec"] = self.spec.to_json()
        for name in ("intervals", "inputs", "outputs"):
            data[name] = [asdict(item) for item in data[name]]
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> TaskDescriptor:
        data = json.loads(text)
        data["spec"] = TaskSpec.from_json(data["spec"])
        data["inputs"] = tuple(input_from(item) for item in data["inputs"])
        data["outputs"] = tuple(output_from(item) for item in data["outputs"])
        data["intervals"] = tuple(
            OwnedInterval(ref=IntervalRef(**item["ref"]), token=item["token"], producers=item["producers"])
            for item in data["intervals"]
        )
        return TaskDescriptor(**data)


@lru_cache(maxsize=64)
def task_of(descriptor: str) -> TaskDescriptor:
    """A descriptor from its JSON, decoded once per process: it is the same in every batch of a query."""
    return TaskDescriptor.from_json(descriptor)


def _said_of(source: InputSpec) -> dict[str, Any]:
    """Fields that were added later only where they are set: intents stored before stay the same."""
    later = ("idle_after_ms", "ahead_max_ms")
    return {name: value for name, value in asdict(source).items() if value or name not in later}


def schema_ddl(columns: Iterable[tuple[str, str]]) -> str:
    """The system columns and these, as Spark SQL."""
    own = [f"`{name}` {kind}" for name, kind in columns]
    return ", ".join([*(f"{name} {kind}" for name, kind in SYSTEM_COLUMNS), *own])


def input_of(category: Category, reads: Collection[str] | None = None) -> InputSpec:
    """A category as a task reads it; `reads`: which columns, None: all. An Avro record says what it holds by
    the order alone, so of such a category it is all of them.
    """
    spec = category.spec
    if spec.format == "avro":
        reads = None
    return InputSpec(
        category=spec.name,
        birth=category.birth,
        columns=tuple(
            column
            for column in spec.columns
            if column != LOW_COLUMN and (reads is None or column[0] in reads)
        ),
        format=spec.format,
        watermark=spec.watermark,
        lateness_ms=spec.lateness_ms,
        ts_column=spec.ts_column,
        partitions=spec.partitions,
        idle_after_ms=spec.idle_after_ms if spec.watermark == "event_time" else 0,
        ahead_max_ms=spec.ahead_max_ms if spec.watermark == "event_time" else 0,
    )


def input_from(data: Mapping[str, Any]) -> InputSpec:
    """An input from its JSON form."""
    return InputSpec(**{**data, "columns": tuple((name, kind) for name, kind in data["columns"])})


def output_from(data: Mapping[str, Any]) -> OutputSpec:
    """An output from its JSON form."""
    return OutputSpec(**{**data, "columns": tuple((name, kind) for name, kind in data["columns"])})


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
