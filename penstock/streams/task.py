"""What one task needs in every process that works for it: driver, source planner, Python workers. Pure:
values only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.core.clock import Millis
from penstock.jobs.guarantees import why_no_skip
from penstock.streams.bus.log import LOW_COLUMN, Category
from penstock.streams.rows.row_store import IntervalRef
from penstock.streams.step import DEAD_COLUMNS, OutputSpec, dead_category, dead_stream, is_dead

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
BATCH_BYTES_MAX = 64 * 2**20  # unless a job says otherwise
STATE_CACHE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
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
    """Everything the processes of one task share; JSON, since it travels as an option of the data source."""

    task_id: str
    job: str
    kind: str
    bus: str
    rows: str
    intervals: tuple[OwnedInterval, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[OutputSpec, ...]
    plan: Mapping[str, Any]
    package_hash: str
    package_folder: str
    package_entry: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    batch_rows_max: int = 50_000
    batch_bytes_max: int = BATCH_BYTES_MAX
    state_cache_bytes: int = STATE_CACHE_BYTES  # what each worker keeps of its state between batches
    drain_file: str = ""  # once it exists no further batch is planned: how a task stops between batches
    turn_ms: Millis = 0  # how long one of its intervals may take in a batch; 0: as long as it takes
    # "fail": stop at a record that cannot be worked on; "skip": put aside, also where user code raises.
    poison: str = "dead_letter"
    sending: Mapping[str, Any] = field(default_factory=dict)  # the job's words on productions and dedup
    # partition -> {input category birth: {offset: why}}: records at which Spark's own expressions failed.
    poisoned: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)
    # Batch mode only: partition -> {input category birth: [start, end)}, for replaying an intent.
    replay: Mapping[str, Mapping[str, tuple[int, int]]] | None = None

    def logic(self) -> dict[str, Any]:
        """What decides which records come out for a range: kept in an intent, so that a successor can
        repeat it.
        """
        return {
            "inputs": [_told(source) for source in self.inputs],
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

    def inputs_of(self, partition: int) -> tuple[tuple[int, Input], ...]:
        """Number and input of those that have this partition."""
        return tuple(
            (number, source) for number, source in enumerate(self.inputs) if partition < source.partitions
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> TaskDescriptor:
        data = json.loads(text)
        data["inputs"] = tuple(input_from(item) for item in data["inputs"])
        data["outputs"] = tuple(output_from(item) for item in data["outputs"])
        data["intervals"] = tuple(
            OwnedInterval(ref=IntervalRef(**item["ref"]), token=item["token"], producers=item["producers"])
            for item in data["intervals"]
        )
        return TaskDescriptor(**data)


def _told(source: Input) -> dict[str, Any]:
    """Fields that were added later are told if they say something: promises made before stay the same."""
    later = ("idle_after_ms", "ahead_max_ms")
    return {name: value for name, value in asdict(source).items() if value or name not in later}


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a task takes over from its job's config as it is."""
    words = ("productions", "dedup", "straggler_ms")
    return {
        "poison": config.get("poison", "dead_letter"),
        "state_cache_bytes": config.get("state_cache_bytes", STATE_CACHE_BYTES),
        "sending": {name: config[name] for name in words if name in config},
    }


def outputs_of(job: str, config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The outputs of a job's tasks: those of its plan, and a place for dead letters if it needs one.

    A plan has one only if the pipeline itself says `poison = "skip"`; an operator may say so later.
    """
    outputs = list(config["outputs"])
    skips = config["kind"] == "stateful" and config.get("poison") == "skip" and not why_no_skip(config)
    if not skips or any(is_dead(item["stream"]) for item in outputs):
        return outputs
    dead = {
        "stream": dead_stream(0),
        "category": dead_category(job),
        "partitions": config["partitions"],
        "columns": [list(column) for column in DEAD_COLUMNS],
        "internal": False,
    }
    return [*outputs, dead]


def schema_ddl(columns: Iterable[tuple[str, str]]) -> str:
    """The system columns and these, as Spark SQL."""
    own = [f"`{name}` {kind}" for name, kind in columns]
    return ", ".join([*(f"{name} {kind}" for name, kind in SYSTEM_COLUMNS), *own])


def input_of(category: Category, reads: Collection[str] | None = None) -> Input:
    """A category as a task reads it; `reads`: which columns, None: all. An Avro record says what it holds by
    the order alone, so of such a category it is all of them.
    """
    spec = category.spec
    if spec.format == "avro":
        reads = None
    return Input(
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


def input_from(data: Mapping[str, Any]) -> Input:
    """An input from its JSON form."""
    return Input(**{**data, "columns": tuple((name, kind) for name, kind in data["columns"])})


def output_from(data: Mapping[str, Any]) -> OutputSpec:
    """An output from its JSON form."""
    return OutputSpec(**{**data, "columns": tuple((name, kind) for name, kind in data["columns"])})
