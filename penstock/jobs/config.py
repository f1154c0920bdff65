"""What one job should run: the typed config that every merge of layers must fit (Turbine III-A).

Each field says what a change of it costs: see `Sync`. Pure: no clock, no I/O.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from penstock.core.errors import ConfigError, CorruptData
from penstock.jobs.text_rules import INT_MAX, LINE_PATTERN, is_line, shown

ISOLATED_MEMORY_MB_MIN = 1024
# What a command may name in braces; `arguments.<name>` too. A task's container fills them in.
COMMAND_FIELDS = frozenset({"job", "task", "index", "count", "generation", "partitions"})
COMMAND_FIELD = re.compile(r"\{([a-z_]+(?:\.[A-Za-z0-9_.\-]+)?)\}")
# Fields that only a process has, and those that only work on streams has.
PROCESS_FIELDS = frozenset({"command", "environment"})
# What a stateful job may run instead of a user's class.
OPERATORS = frozenset({"aggregate", "combine", "dedup", "join", "partial", "top"})
STREAM_FIELDS = ("package", "partitions", "inputs", "outputs", "plan")


def stream_problems(config: JobConfig) -> Iterator[str]:
    """Of a step of a pipeline: path and reason of each; none: it fits together."""
    for name in STREAM_FIELDS:
        if name not in config.model_fields_set or (name == "package" and config.package is None):
            yield f"{name}: Field required"
    if not config.inputs and "inputs" in config.model_fields_set:
        yield f"inputs: a {config.kind} job reads at least one category"
    if len({source.category for source in config.inputs}) < len(config.inputs):
        yield "inputs: a category is there twice"
    branches = [branch.input for branch in config.plan.branches]
    if (branches or len(config.inputs) > 1) and set(branches) != set(range(len(config.inputs))):
        yield "plan.branches: each input needs a branch, and each branch an input"
    if len(config.plan.reads) not in (0, len(config.inputs)):
        yield "plan.reads: there is one list of columns for each input"
    for name in sorted(PROCESS_FIELDS):
        if getattr(config, name):
            yield f"{name}: only a job of kind `process` has one"
    if config.isolation == "process" and config.resources.memory_mb < ISOLATED_MEMORY_MB_MIN:
        yield f"resources.memory_mb: with isolation `process` it is at least {ISOLATED_MEMORY_MB_MIN}"
    computation = config.plan.computation
    if config.kind == "stateful" and not ((computation or {}).get("class") or _operator(computation)):
        yield "a stateful job needs plan.computation with a class"
    if config.kind == "stateless" and computation is not None:
        yield "a stateless job may not have a plan.computation"
    for what in ("stream", "category"):
        names = [getattr(output, what) for output in config.outputs]
        if len(set(names)) < len(names):
            yield f"two outputs have the same {what}"


def _operator(computation: Mapping[str, Any] | None) -> bool:
    return computation is not None and computation.get("operator") in OPERATORS


def query_problems(config: JobConfig) -> Iterator[str]:
    """A query brought as it is: code and the function that starts it, nothing that only our steps have."""
    if config.package is None:
        yield "package: Field required"
    if not (config.plan.computation or {}).get("function"):
        yield "plan.computation.function: the function that starts the query is needed"
    for name in ("inputs", "outputs", *sorted(PROCESS_FIELDS)):
        if getattr(config, name):
            yield f"{name}: a job of kind `spark` has none, its query reads and writes by itself"
    if config.partitions != 1:
        yield "partitions: a query brought as it is runs as one task"
    if config.plan.stages or config.plan.key or config.plan.branches:
        yield "plan: only `computation` means something to a job of kind `spark`"


def process_problems(config: JobConfig) -> Iterator[str]:
    """Of any command as a task."""
    if not config.command or not config.command[0]:
        yield "command: a process needs a program to run"
    for name in STREAM_FIELDS:
        value, field = getattr(config, name), type(config).model_fields[name]
        if name != "partitions" and value != field.get_default(call_default_factory=True):
            yield f"{name}: a process has none, it is told its place by its command and environment"
    if config.isolation != "shared":
        yield "isolation: a process is one already"
    known = COMMAND_FIELDS | {f"arguments.{name}" for name in config.arguments}
    for number, part in enumerate(config.command):
        if "\x00" in part:
            yield f"command[{number}]: no program can be given a NUL"
        for field in COMMAND_FIELD.findall(part):
            if field not in known:
                near = difflib.get_close_matches(field, known, n=1)
                hint = f", did you mean {{{near[0]}}}?" if near else ""
                yield f"command[{number}]: {{{field}}} is not one of {', '.join(sorted(known))}{hint}"
    for name in sorted(config.environment):
        if name.startswith("PENSTOCK_"):
            yield f"environment.{name}: names with PENSTOCK_ are for what the container tells the task"


PROBLEMS_SHOWN_MAX = 5
PATH_SHOWN_MAX = 200


def config_error(
    job: str, error: ValidationError, model: type[BaseModel], patterns: Mapping[str, str]
) -> ConfigError:
    """Each wrong field with its path and reason; `patterns`: what a pattern asks for, in words."""
    reasons, hints = [], []
    for problem in error.errors()[:PROBLEMS_SHOWN_MAX]:
        # The first part says of which kind of job it is, which is no field.
        location, reason = problem["loc"][1:], problem["msg"].removeprefix("Value error, ")
        if problem["loc"] == () and problem["type"].startswith("union_tag"):
            location = ("kind",)
            expected = problem.get("ctx", {}).get("expected_tags", "")
            reason = f"Input should be one of {expected}" if expected else "Field required"
        path = _path(location)
        reason = patterns.get(problem.get("ctx", {}).get("pattern", ""), reason)
        if problem["type"] == "tuple_type":
            reason = "Input should be a list"
        if problem["type"] == "extra_forbidden":
            reason = "there is no such field"
            hints += _suggestions(location, path, model)
        reasons.append(f"{path}: {reason}" if path else reason)
    hidden = error.error_count() - len(reasons)
    if hidden > 0:
        reasons.append(f"and {hidden} more")
    return ConfigError(
        f"the config of job {shown(job)} is not valid",
        why="; ".join(reasons),
        fix="; ".join(hints) or "correct the named fields and write the layer again; nothing was changed",
    )


def _path(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{shown(part)[1:-1]}"
    return text.removeprefix(".")[:PATH_SHOWN_MAX]


def _suggestions(location: tuple[int | str, ...], path: str, model: type[BaseModel]) -> list[str]:
    models: list[type[BaseModel]] = [model]
    for part in location[:-1]:
        fields = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        # A list index or the tag of a union is no field: the candidates stay.
        models = [model for annotation in fields for model in _models_in(annotation)] or models
    known = sorted({name for model in models for name in model.model_fields})
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    return [f"did you mean `{path[: len(path) - len(str(location[-1]))]}{near[0]}`?"] if near else []


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


# Turbine V-D: more tasks than this only for jobs that an admin has marked as privileged.
TASKS_UNPRIVILEGED_MAX = 32
TASKS_MAX = 1_000_000
PARTITIONS_MAX = 4096
INPUTS_MAX = 32
YEAR_S = 365 * 24 * 3600


class Sync(StrEnum):
    """What a change of a field costs: a plan, a restart of tasks in place, or nothing."""

    COMPLEX = "complex"
    RESTART = "restart"
    LIVE = "live"


def _plain(value: object) -> object:
    """A setting of a policy: one plain value. A union of types would tell each type's trouble with it."""
    if isinstance(value, str) and is_line(value, length_max=1000):
        return value
    if value is None or isinstance(value, bool) or (isinstance(value, float) and isfinite(value)):
        return value
    if isinstance(value, int) and -INT_MAX <= value <= INT_MAX:
        return value
    raise ValueError("it should be a line of text, a boolean or a finite number of at most 64 bits")


# Which roles may set which field, in whichever layer they may write; a field that is not here is nobody's.
# What decides which code runs, with what and on which data, is for developers, not for who tunes.
_ADMINS = frozenset({"admin"})
_DEVELOPERS = _ADMINS | {"developer"}
_OPERATORS = _DEVELOPERS | {"oncall"}
_TUNERS = _OPERATORS | {"scaler"}
_FIELDS_OF: Mapping[frozenset[str], str] = {
    _ADMINS: "privileged",
    _DEVELOPERS: "name pipeline kind package arguments partitions inputs outputs plan command "
    "environment lineage productions dedup",
    _OPERATORS: "owner labels task_count_max priority slo scaler policies isolation poison "
    "straggler_ms backlog",
    _TUNERS: "state task_count partition_tasks resources threads trigger_ms batch_rows_max batch_bytes_max "
    "state_cache_bytes",
}
FIELD_WRITERS: Mapping[str, frozenset[str]] = {
    field: roles for roles, fields in _FIELDS_OF.items() for field in fields.split()
}

# Names become parts of file names and URLs, so they may not climb out of a folder.
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}$"
LABEL_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_./\-]{0,99}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
LabelKey = Annotated[str, StringConstraints(pattern=LABEL_PATTERN)]
Line = Annotated[str, StringConstraints(pattern=LINE_PATTERN, max_length=200)]
Argument = Annotated[str, StringConstraints(pattern=LINE_PATTERN, max_length=10_000)]
Code = Annotated[str, StringConstraints(max_length=100_000)]
# What a process finds in its environment; PENSTOCK_ is for what it is told of its place.
ENVIRONMENT_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,199}$"
EnvironmentName = Annotated[str, StringConstraints(pattern=ENVIRONMENT_PATTERN)]
TaskIndex = Annotated[int, Field(ge=0, lt=TASKS_MAX)]
Scalar = Annotated[bool | int | float | str | None, BeforeValidator(_plain)]
# Strict about values: "3" is not 3 and true is not 1. Lists come as lists, whatever they become here.
Column = Annotated[tuple[Line, Argument], Strict(False)]
SelectColumn = Annotated[tuple[Line, Code, Argument], Strict(False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    if not TYPE_CHECKING:  # policies of users, written when configs were maps: facts.config["slo"]["lag_s"]

        def __getitem__(self, field: str) -> Any:
            if field not in type(self).model_fields:
                raise KeyError(field)
            return getattr(self, field)

        def get(self, field: str, default: Any = None) -> Any:
            return getattr(self, field) if field in type(self).model_fields else default


class PackageRef(_Part):
    """User code by hash, and the module to import from it."""

    name: Line
    version: Line
    hash: Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z]{1,128}$")]
    entry: Line


class Input(_Part):
    """A category the job reads, and where its first start begins."""

    category: Name
    start: Literal["earliest", "latest"] = "earliest"
    writer: Name | None = Field(
        default=None, description="The job of the same pipeline that makes it; none: it comes from outside."
    )


class Output(_Part):
    """A category the job writes."""

    stream: Name
    category: Name
    partitions: int = Field(ge=1, le=PARTITIONS_MAX)
    columns: tuple[Column, ...] = Field(max_length=1000, strict=False)
    internal: bool
    format: Literal["typed"] = "typed"


class FilterStage(_Part):
    """Keeps the rows for which a Spark SQL expression holds."""

    op: Literal["filter"]
    expr: Code


class SelectStage(_Part):
    """Makes columns: (name, Spark SQL, type)."""

    op: Literal["select"]
    columns: tuple[SelectColumn, ...] = Field(max_length=1000, strict=False)


class ExplodeStage(_Part):
    """Makes a row of each element of an array; columns: position (if wanted) and element."""

    op: Literal["explode"]
    array: Code
    type: Argument
    outer: bool = False
    columns: tuple[Column, ...] = Field(min_length=1, max_length=2, strict=False)


class KeyStage(_Part):
    """Gives rows their key on the way."""

    op: Literal["key"]
    expr: Code


Stage = Annotated[FilterStage | SelectStage | ExplodeStage | KeyStage, Field(discriminator="op")]


class Branch(_Part):
    """What happens to the rows of one input before they come together with others."""

    input: int = Field(ge=0, lt=INPUTS_MAX)
    stages: tuple[Stage, ...] = Field(default=(), max_length=1000, strict=False)


class WorkPlan(_Part):
    """What the tasks do with each record: plain JSON, the control plane never imports user code."""

    stages: tuple[Stage, ...] = Field(default=(), max_length=1000, strict=False)
    branches: tuple[Branch, ...] = Field(
        default=(), max_length=256, strict=False, description="Of several inputs, before `stages`."
    )
    reads: tuple[Annotated[tuple[Line, ...], Strict(False)], ...] = Field(
        default=(), max_length=INPUTS_MAX, strict=False, description="Columns of each input; none: all."
    )
    key: Code | None = None
    spread: bool = Field(default=False, description="Records of a key go to all partitions in turn.")
    computation: dict[str, Any] | None = None
    late: Literal["drop", "process"] = "drop"


class Resources(_Part):
    """What each task gets. 0 of disk or network: none is reserved."""

    cpu: float = Field(default=1.0, gt=0, le=1024)
    memory_mb: int = Field(default=512, ge=1, le=16_777_216)
    disk_mb: int = Field(default=0, ge=0, le=1_073_741_824)
    network_mbps: float = Field(default=0.0, ge=0, le=1_000_000)


class Slo(_Part):
    """What the job's owner was promised."""

    lag_s: float = Field(default=90, gt=0, le=YEAR_S)


class ScalerSettings(_Part):
    """How the auto scaler treats this job."""

    enabled: bool = True
    quiet_s: float | None = Field(
        default=None,
        ge=0,
        le=YEAR_S,
        description="Less must have been enough for so long; none: an hour, for `reactive` a day.",
    )
    settle_s: float = Field(default=10, ge=0, le=YEAR_S)
    task_count_min: int = Field(default=1, ge=1, le=TASKS_MAX)
    generation: Literal["reactive", "proactive", "preactive"] = "preactive"
    advice_only: bool = Field(default=False, description="It says what it would do, and does nothing.")
    recovery_s: float = Field(default=1800, ge=1, le=30 * 86_400, description="A backlog is gone by then.")
    target: float = Field(default=0.7, ge=0.05, le=0.95, description="How much of a new size is used.")
    up_at: float = Field(default=0.85, ge=0.1, le=1, description="More is used: it needs a larger size.")
    history_hours: float = Field(default=4, ge=0.25, le=24, description="For so long less must do.")

    @model_validator(mode="after")
    def _has_a_dead_band(self) -> ScalerSettings:
        if self.target >= self.up_at:
            raise ValueError(f"target: it is {self.target:g}, and must be below up_at, {self.up_at:g}")
        return self


# Fields that came later: at their defaults they are left out of the stored form.
LATER_FIELDS = (
    "partition_tasks",
    "isolation",
    "poison",
    "batch_bytes_max",
    "productions",
    "dedup",
    "straggler_ms",
    "state_cache_bytes",
    "backlog",
)
LATER_PART_FIELDS: Mapping[str, tuple[str, ...]] = {
    "plan": ("spread",),
    "scaler": ("quiet_s", "generation", "advice_only", "recovery_s", "target", "up_at", "history_hours"),
}


class JobConfig(_Part):
    """What one job should run: a `StreamJob`, a `ProcessJob` or a `SparkJob`, told apart by `kind`.

    All kinds are stored with the same fields; which of them a kind may use is said by its `misfits`.
    `validate_config` makes one of what layers say, `from_stored` of what is stored.
    """

    name: Annotated[Name, Sync.RESTART]
    pipeline: Annotated[Name, Sync.RESTART]
    owner: Annotated[Line, Sync.LIVE] = ""
    labels: Annotated[dict[LabelKey, Line], Sync.LIVE] = Field(default_factory=dict, max_length=64)
    kind: Annotated[Literal["stateless", "stateful", "process", "spark"], Sync.COMPLEX] = Field(
        description="`process`: any command as a task. `spark`: a streaming query as it is, one task."
    )
    state: Annotated[Literal["running", "paused", "stopped"], Sync.COMPLEX] = "running"
    package: Annotated[PackageRef | None, Sync.RESTART] = None
    arguments: Annotated[dict[Line, Argument], Sync.RESTART] = Field(default_factory=dict, max_length=256)
    task_count: Annotated[int, Sync.COMPLEX] = Field(default=1, ge=1, le=TASKS_MAX)
    task_count_max: Annotated[int, Sync.LIVE] = Field(
        default=TASKS_UNPRIVILEGED_MAX,
        ge=1,
        le=TASKS_MAX,
        description=f"Above {TASKS_UNPRIVILEGED_MAX} it counts for privileged jobs only.",
    )
    partitions: Annotated[int, Sync.COMPLEX] = Field(
        default=1, ge=1, le=PARTITIONS_MAX, description="A process that names none has one per task."
    )
    partition_tasks: Annotated[tuple[TaskIndex, ...], Sync.COMPLEX] = Field(
        default=(),
        max_length=PARTITIONS_MAX,
        strict=False,
        description="By partition the task that reads it; none: dealt evenly. Ignored where it does not fit.",
    )
    inputs: Annotated[tuple[Input, ...], Sync.COMPLEX] = Field(
        default=(), max_length=INPUTS_MAX, strict=False
    )
    outputs: Annotated[tuple[Output, ...], Sync.COMPLEX] = Field(default=(), max_length=256, strict=False)
    plan: Annotated[WorkPlan, Sync.RESTART] = Field(default_factory=WorkPlan)
    command: Annotated[tuple[Code, ...], Sync.RESTART] = Field(
        default=(), max_length=256, strict=False, description="Of a process: program and arguments."
    )
    environment: Annotated[dict[EnvironmentName, Argument], Sync.RESTART] = Field(
        default_factory=dict, max_length=256, description="Of a process, besides what every task is told."
    )
    lineage: Annotated[int, Sync.COMPLEX] = Field(
        default=0, ge=0, le=2**31 - 1, description="A larger one starts from empty state."
    )
    priority: Annotated[int, Sync.LIVE] = Field(default=0, ge=-1000, le=1000)
    privileged: Annotated[bool, Sync.LIVE] = Field(
        default=False, description="Set by admins only: no limit of tasks but its own."
    )
    resources: Annotated[Resources, Sync.RESTART] = Field(default_factory=Resources)
    threads: Annotated[int, Sync.RESTART] = Field(default=1, ge=1, le=1024)
    slo: Annotated[Slo, Sync.LIVE] = Field(default_factory=Slo)
    scaler: Annotated[ScalerSettings, Sync.LIVE] = Field(default_factory=ScalerSettings)
    policies: Annotated[dict[Name, Annotated[dict[Name, Scalar], Field(max_length=64)]], Sync.LIVE] = Field(
        default_factory=dict, max_length=32, description="Settings of control policies, by policy."
    )
    isolation: Annotated[Literal["shared", "process"], Sync.RESTART] = Field(
        default="shared",
        description="`process`: each task in a process and JVM of its own, which ends above `memory_mb`.",
    )
    poison: Annotated[Literal["dead_letter", "skip", "fail"], Sync.RESTART] = Field(
        default="dead_letter",
        description="Records that cannot be read or computed: put aside, or stop the task at the first. "
        "`skip`: also those at which a computation raises.",
    )
    # `weak`: sent before they are checkpointed; `off`: sent again after a crash. Both: at least once.
    productions: Annotated[Literal["strong", "weak"], Sync.RESTART] = "strong"
    dedup: Annotated[Literal["on", "off"], Sync.RESTART] = "on"
    straggler_ms: Annotated[int, Sync.RESTART] = Field(
        default=1000, ge=0, le=600_000, description="Weak productions that take longer are checkpointed."
    )
    trigger_ms: Annotated[int, Sync.RESTART] = Field(default=1000, ge=0, le=86_400_000)
    batch_rows_max: Annotated[int, Sync.RESTART] = Field(default=50_000, ge=1, le=100_000_000)
    batch_bytes_max: Annotated[int, Sync.RESTART] = Field(
        default=64 * 2**20,
        ge=1,
        le=2**40,
        description="What a task reads at most per trigger, but one record of each partition at least.",
    )
    state_cache_bytes: Annotated[int, Sync.RESTART] = Field(
        default=16 * 2**20,
        ge=0,
        le=2**40,
        description="How much of its state each worker process keeps in memory between batches; 0: none.",
    )

    backlog: Annotated[Literal["read", "leave"], Sync.LIVE] = Field(
        default="read",
        description="Of an input that a release no longer has: read to its end by the old code, or given up.",
    )

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> JobConfig:
        # What is stored was checked when it was written, by the rules of the version that wrote it.
        problems = () if info.context is _STORED else [*self.misfits()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def misfits(self) -> Iterator[str]:
        """Path and reason of what does not fit together, beyond the types of the fields."""
        raise AssertionError("a job is of one of the kinds below")

    @staticmethod
    def from_stored(data: str | bytes | Mapping[str, Any], *, job: str = "") -> JobConfig:
        """Read what `to_json` made, of this version or an earlier one. CorruptData if it is something else.

        A field that an earlier version did not write has its default; one that only a later version knows is
        left out. `job`: its name, for the error.
        """
        try:
            if isinstance(data, Mapping):
                return _KINDS.validate_python(data, context=_STORED, extra="ignore")
            return _KINDS.validate_json(data, context=_STORED, extra="ignore")
        except ValidationError as error:
            raise CorruptData(
                f"the stored config of job {shown(job)} cannot be read",
                why=config_error(job, error, JobConfig, _PATTERNS).why,
                fix="restore the store from a copy, or submit the job again",
            ) from None

    def to_json(self, only: set[str] | None = None) -> dict[str, Any]:
        """The plain form that is stored, compared and sent to containers; `only`: of these fields."""
        data = self.model_dump(mode="json", include=only)
        # Left out where they mean nothing: a job of an earlier version then runs on as it is.
        if self.kind != "process":
            for name in PROCESS_FIELDS:
                data.pop(name, None)
        for part, defaults in _LATER_DEFAULTS:
            if part and part not in data:
                continue
            values, place = (getattr(self, part), data[part]) if part else (self, data)
            for name, default in defaults:
                if getattr(values, name) == default:
                    place.pop(name, None)
        for source in data.get("inputs", ()):
            if source["writer"] is None:
                del source["writer"]
        return data

    @property
    def computation(self) -> Mapping[str, Any]:
        """What the job computes with state, as its plan says; empty: nothing."""
        return self.plan.computation or {}


class StreamJob(JobConfig):
    """A step of a pipeline: its tasks own intervals, write as producers, and have watermarks."""

    kind: Literal["stateless", "stateful"]

    def misfits(self) -> Iterator[str]:
        """A package, inputs and a plan are needed."""
        return stream_problems(self)


class ProcessJob(JobConfig):
    """Any command: it is told its place, and what it reads and writes is its own affair."""

    kind: Literal["process"]

    def misfits(self) -> Iterator[str]:
        """A command is needed, and nothing of a pipeline."""
        return process_problems(self)


class SparkJob(JobConfig):
    """A streaming query as it is, in one task."""

    kind: Literal["spark"]

    def misfits(self) -> Iterator[str]:
        """A package and the function that starts the query are needed."""
        return query_problems(self)


_KINDS: TypeAdapter[StreamJob | ProcessJob | SparkJob] = TypeAdapter(
    Annotated[StreamJob | ProcessJob | SparkJob, Field(discriminator="kind")]
)
# The context in which stored configs are validated.
_STORED = object()
_LATER_DEFAULTS: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = tuple(
    (
        part,
        tuple((name, model.model_fields[name].default) for name in names),
    )
    for part, model, names in (
        ("", JobConfig, LATER_FIELDS),
        ("plan", WorkPlan, LATER_PART_FIELDS["plan"]),
        ("scaler", ScalerSettings, LATER_PART_FIELDS["scaler"]),
    )
)


def writers_of(path: str) -> frozenset[str]:
    """The roles that may set a dotted path of a config, if their layer takes it; empty: nobody."""
    field, _, rest = path.partition(".")
    if field == "policies" and rest.endswith(".code"):  # it names the code of a user's policy
        return _DEVELOPERS
    if path == "plan.late":  # what becomes of late records; it changes no code and no shape
        return _OPERATORS
    return FIELD_WRITERS.get(field, frozenset())


def _declared(field: str) -> Sync:
    kinds = [item for item in JobConfig.model_fields[field].metadata if isinstance(item, Sync)]
    assert len(kinds) == 1, f"{field} does not say what a change of it costs"
    return kinds[0]


SYNC_OF: Mapping[str, Sync] = {field: _declared(field) for field in JobConfig.model_fields}
# A change of these reaches the job without a restart of its tasks: nobody inside a task reads them.
LIVE_FIELDS = frozenset(field for field, sync in SYNC_OF.items() if sync is Sync.LIVE)


def validate_config(job: str, merged: Mapping[str, Any]) -> JobConfig:
    """The typed config of a merge, or a ConfigError with path and reason. Limits clamp, none refuses."""
    try:
        config: JobConfig = _KINDS.validate_python({"name": job, **merged})
    except ValidationError as error:
        raise config_error(job, error, JobConfig, _PATTERNS) from None
    if config.name != job:
        raise ConfigError(
            f"the config of job {shown(job)} is not valid",
            why=f"name: it says {config.name!r}",
            fix=f"leave `name` out, or set it to {shown(job)}",
        )
    task_count_max = config.task_count_max
    if not config.privileged:
        task_count_max = min(task_count_max, TASKS_UNPRIVILEGED_MAX)
    partitions = config.partitions
    if config.kind == "process" and "partitions" not in config.model_fields_set:
        partitions = min(config.task_count, task_count_max, PARTITIONS_MAX)
    task_count = min(config.task_count, task_count_max, partitions)
    found = {"task_count": task_count, "task_count_max": task_count_max, "partitions": partitions}
    if found == {name: getattr(config, name) for name in found}:
        return config
    return config.model_copy(update=found)


# A pattern tells people nothing; these do.
_PATTERNS = {
    LINE_PATTERN: "it has control characters or marks that change the direction of text",
    ENVIRONMENT_PATTERN: "a variable is named by letters, digits and '_', and does not begin with a digit",
    LABEL_PATTERN: "a label is named by up to 100 letters, digits, '_', '-', '.' or '/'",
}


def guarantees_of(config: JobConfig) -> Iterator[str]:
    """One for each word of its config that decides it; without a word the defaults. Other kinds have none."""
    if config.kind != "stateful":
        return
    is_weak, is_off = config.productions == "weak", config.dedup == "off"
    if is_weak:
        yield (
            "weak productions: at least once; what is sent before a crash and not committed comes again, "
            "with other values if user code decides otherwise"
        )
    if is_off:
        yield "dedup off: at least once; what is sent again after a crash is not recognised"
    if not is_weak and not is_off:
        yield (
            "strong productions: exactly once; checkpointed with the state, then sent, and what is sent "
            "again after a crash is recognised"
        )
    if config.poison == "skip" and not skip_problem(config):
        yield "poison skip: records at which the computation raises become dead letters"


def skip_problem(config: JobConfig) -> str:
    """Why `poison: skip` cannot put aside records at which user code raises; "" if it can."""
    if config.computation.get("vectorised"):
        return "process_batch gets a whole batch at once, so the record that fails is not known"
    return "it runs no user code per record" if config.computation.get("operator") else ""
