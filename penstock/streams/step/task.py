"""What a task's processes share: driver, source planner, Python workers. Pure: values only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.core.clock import Millis
from penstock.jobs.tasks import TaskSpec
from penstock.streams.bus.log import LOW_COLUMN, Category
from penstock.streams.rows.row_store import IntervalRef
from penstock.streams.step.step import OutputSpec

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

    @property
    def kind(self) -> str:
        return str(self.spec.config["kind"])

    @property
    def plan(self) -> Mapping[str, Any]:
        """As it is stored: an intent is compared by its text, so it passes through no other form."""
        plan: Mapping[str, Any] = self.spec.config["plan"]
        return plan

    @property
    def package_hash(self) -> str:
        return str(self.spec.config["package"]["hash"])

    @property
    def poison(self) -> str:
        """`fail`: stop at a record that cannot be processed; `skip`: put aside, also if user code raises."""
        return str(self.spec.config.get("poison", "dead_letter"))

    @property
    def batch_rows_max(self) -> int:
        return int(self.spec.config.get("batch_rows_max", 50_000))

    @property
    def batch_bytes_max(self) -> int:
        return int(self.spec.config.get("batch_bytes_max", 64 * 2**20))

    @property
    def state_cache_bytes(self) -> int:
        """How much of its state each worker keeps between batches."""
        return int(self.spec.config.get("state_cache_bytes", 16 * 2**20))

    def with_config(self, **changes: Any) -> TaskDescriptor:
        """The same task with other values in its config."""
        return replace(self, spec=replace(self.spec, config={**self.spec.config, **changes}))

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
        return json.dumps(asdict(self))

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
