"""The typed config of a job; each merge of layers is validated against it (Turbine III-A).

Each field is annotated with the cost of a change: see `Sync`. Pure: no clock, no I/O.
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
# Placeholders of a command, besides `arguments.<name>`; the task's container replaces them.
COMMAND_FIELDS = frozenset({"job", "task", "index", "count", "generation", "partitions"})
COMMAND_FIELD = re.compile(r"\{([a-z_]+(?:\.[A-Za-z0-9_.\-]+)?)\}")
# Fields of process jobs only; `STREAM_FIELDS` are those of stream jobs only.
PROCESS_FIELDS = frozenset({"command", "environment"})
# Built-in operators, which a stateful job may run instead of a user's class.
OPERATORS = frozenset({"aggregate", "combine", "dedup", "join", "partial", "top"})
STREAM_FIELDS = ("package", "partitions", "inputs", "outputs", "plan")


def stream_problems(config: JobConfig) -> Iterator[str]:
    """The problems of a stream job, each with its path."""
    for name in STREAM_FIELDS:
        if name not in config.model_fields_set or (name == "package" and config.package is None):
            yield f"{name}: Field required"
    if not config.inputs and "inputs" in config.model_fields_set:
        yield f"inputs: a {config.kind} job reads at least one category"
    if len({source.category for source in config.inputs}) < len(config.inputs):
        yield "inputs: a category is listed twice"
    branches = [branch.input for branch in config.plan.branches]
    if (branches or len(config.inputs) > 1) and set(branches) != set(range(len(config.inputs))):
        yield "plan.branches: each input needs a branch, and each branch an input"
    if len(config.plan.reads) not in (0, len(config.inputs)):
        yield "plan.reads: it needs one list of columns for each input"
    for name in sorted(PROCESS_FIELDS):
        if getattr(config, name):
            yield f"{name}: only a job of kind `process` has this field"
    if config.isolation == "process" and config.resources.memory_mb < ISOLATED_MEMORY_MB_MIN:
        yield f"resources.memory_mb: with isolation `process` at least {ISOLATED_MEMORY_MB_MIN} are needed"
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
    """The problems of a `spark` job: it needs a package and a function, and no fields of a pipeline."""
    if config.package is None:
        yield "package: Field required"
    if not (config.plan.computation or {}).get("function"):
        yield "plan.computation.function: the function that starts the query is needed"
    for name in ("inputs", "outputs", *sorted(PROCESS_FIELDS)):
        if getattr(config, name):
            yield f"{name}: a job of kind `spark` has no such field, its query reads and writes by itself"
    if config.partitions != 1:
        yield "partitions: a job of kind `spark` runs as one task"
    if config.plan.stages or config.plan.key or config.plan.branches:
        yield "plan: a job of kind `spark` may only have `computation`"


def process_problems(config: JobConfig) -> Iterator[str]:
    """The problems of a process job."""
    if not config.command or not config.command[0]:
        yield "command: a process needs a program to run"
    for name in STREAM_FIELDS:
        value, field = getattr(config, name), type(config).model_fields[name]
        if name != "partitions" and value != field.get_default(call_default_factory=True):
            yield f"{name}: a job of kind `process` has no such field; use `command` and `environment`"
    if config.isolation != "shared":
        yield "isolation: a job of kind `process` always runs in its own process"
    known = COMMAND_FIELDS | {f"arguments.{name}" for name in config.arguments}
    for number, part in enumerate(config.command):
        if "\x00" in part:
            yield f"command[{number}]: it contains a NUL character"
        for field in COMMAND_FIELD.findall(part):
            if field not in known:
                near = difflib.get_close_matches(field, known, n=1)
                hint = f", did you mean {{{near[0]}}}?" if near else ""
                yield f"command[{number}]: {{{field}}} is not one of {', '.join(sorted(known))}{hint}"
    for name in sorted(config.environment):
        if name.startswith("PENSTOCK_"):
            yield f"environment.{name}: names that start with PENSTOCK_ are reserved"


PROBLEMS_SHOWN_MAX = 5
PATH_SHOWN_MAX = 200


def config_error(
    job: str, error: ValidationError, model: type[BaseModel], patterns: Mapping[str, str]
) -> ConfigError:
    """A ConfigError with path and reason of each invalid field; `patterns`: explanations of patterns."""
    reasons, hints = [], []
    for problem in error.errors()[:PROBLEMS_SHOWN_MAX]:
        # The first part is the kind of job, not a field.
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
        fix="; ".join(hints) or "correct these fields and write the layer again; nothing was changed",
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
        # A list index or the tag of a union is not a field: the candidates stay the same.
        models = [model for annotation in fields for model in _models_in(annotation)] or models
    known = sorted({name for model in models for name in model.model_fields})
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    return [f"did you mean `{path[: len(path) - len(str(location[-1]))]}{near[0]}`?"] if near else []


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


# Turbine V-D: only jobs that an admin marked as privileged may have more tasks.
TASKS_UNPRIVILEGED_MAX = 32
TASKS_MAX = 1_000_000
PARTITIONS_MAX = 4096
INPUTS_MAX = 32
YEAR_S = 365 * 24 * 3600


class Sync(StrEnum):
    """The cost of a change of a field: a plan, a restart of tasks in place, or nothing."""

    COMPLEX = "complex"
    RESTART = "restart"
    LIVE = "live"


def _plain(value: object) -> object:
    """Check a scalar value. Not a union of types: pydantic would report one error for each type."""
    if isinstance(value, str) and is_line(value, length_max=1000):
        return value
    if value is None or isinstance(value, bool) or (isinstance(value, float) and isfinite(value)):
        return value
    if isinstance(value, int) and -INT_MAX <= value <= INT_MAX:
        return value
    raise ValueError("it must be a line of text, a boolean or a finite number of at most 64 bits")


# Which roles may set which field, in any layer that they may write; other fields may be set by no role.
# What decides which code runs, with what and on which data, is for developers, not for tuning roles.
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

# Names are parts of file names and URLs, so they may not contain path separators or start with a dot.
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}$"
LABEL_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_./\-]{0,99}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
LabelKey = Annotated[str, StringConstraints(pattern=LABEL_PATTERN)]
Line = Annotated[str, StringConstraints(pattern=LINE_PATTERN, max_length=200)]
Argument = Annotated[str, StringConstraints(pattern=LINE_PATTERN, max_length=10_000)]
Code = Annotated[str, StringConstraints(max_length=100_000)]
ENVIRONMENT_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,199}$"
EnvironmentName = Annotated[str, StringConstraints(pattern=ENVIRONMENT_PATTERN)]
TaskIndex = Annotated[int, Field(ge=0, lt=TASKS_MAX)]
Scalar = Annotated[bool | int | float | str | None, BeforeValidator(_plain)]
# Values are strict: "3" is not 3 and true is not 1. Lists are not: JSON arrays become tuples.
Column = Annotated[tuple[Line, Argument], Strict(False)]
SelectColumn = Annotated[tuple[Line, Code, Argument], Strict(False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    if not TYPE_CHECKING:  # for user policies from when configs were maps: facts.config["slo"]["lag_s"]

        def __getitem__(self, field: str) -> Any:
            if field not in type(self).model_fields:
                raise KeyError(field)
            return getattr(self, field)

        def get(self, field: str, default: Any = None) -> Any:
            return getattr(self, field) if field in type(self).model_fields else default


class PackageRef(_Part):
    """A package of user code by its hash, and the module to import from it."""

    name: Line
    version: Line
    hash: Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z]{1,128}$")]
    entry: Line


class Input(_Part):
    """A category the job reads, and the offset of its first start."""

    category: Name
    start: Literal["earliest", "latest"] = "earliest"
    writer: Name | None = Field(
        default=None, description="The job of the same pipeline that writes it; none: it comes from outside."
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
    """Keeps the rows for which a Spark SQL expression is true."""

    op: Literal["filter"]
    expr: Code


class SelectStage(_Part):
    """Computes columns: (name, Spark SQL, type)."""

    op: Literal["select"]
    columns: tuple[SelectColumn, ...] = Field(max_length=1000, strict=False)


class ExplodeStage(_Part):
    """Emits a row for each element of an array; columns: position (optional) and element."""

    op: Literal["explode"]
    array: Code
    type: Argument
    outer: bool = False
    columns: tuple[Column, ...] = Field(min_length=1, max_length=2, strict=False)


class KeyStage(_Part):
    """Computes the key of rows between stages."""

    op: Literal["key"]
    expr: Code


Stage = Annotated[FilterStage | SelectStage | ExplodeStage | KeyStage, Field(discriminator="op")]


class Branch(_Part):
    """The stages of one input before the union with the others."""

    input: int = Field(ge=0, lt=INPUTS_MAX)
    stages: tuple[Stage, ...] = Field(default=(), max_length=1000, strict=False)


class WorkPlan(_Part):
    """What tasks do with each record, as plain JSON: the control plane never imports user code."""

    stages: tuple[Stage, ...] = Field(default=(), max_length=1000, strict=False)
    branches: tuple[Branch, ...] = Field(
        default=(), max_length=256, strict=False, description="Of several inputs, before `stages`."
    )
    reads: tuple[Annotated[tuple[Line, ...], Strict(False)], ...] = Field(
        default=(), max_length=INPUTS_MAX, strict=False, description="Columns of each input; none: all."
    )
    key: Code | None = None
    spread: bool = Field(
        default=False, description="Records of a key are distributed over all partitions, round robin."
    )
    computation: dict[str, Any] | None = None
    late: Literal["drop", "process"] = "drop"


class Resources(_Part):
    """The resources of each task. 0 of disk or network: nothing is reserved."""

    cpu: float = Field(default=1.0, gt=0, le=1024)
    memory_mb: int = Field(default=512, ge=1, le=16_777_216)
    disk_mb: int = Field(default=0, ge=0, le=1_073_741_824)
    network_mbps: float = Field(default=0.0, ge=0, le=1_000_000)


class Slo(_Part):
    """The service level objective of the job."""

    lag_s: float = Field(default=90, gt=0, le=YEAR_S)


class ScalerSettings(_Part):
    """The settings of the auto scaler for this job."""

    enabled: bool = True
    quiet_s: float | None = Field(
        default=None,
        ge=0,
        le=YEAR_S,
        description="Fewer resources must have been enough for so long before a downscale; "
        "none: an hour, for `reactive` a day.",
    )
    settle_s: float = Field(default=10, ge=0, le=YEAR_S)
    task_count_min: int = Field(default=1, ge=1, le=TASKS_MAX)
    generation: Literal["reactive", "proactive", "preactive"] = "preactive"
    advice_only: bool = Field(default=False, description="Decisions are reported, but not applied.")
    recovery_s: float = Field(
        default=1800, ge=1, le=30 * 86_400, description="A backlog must be worked off within this time."
    )
    target: float = Field(
        default=0.7, ge=0.05, le=0.95, description="Utilisation that a new size is chosen for."
    )
    up_at: float = Field(
        default=0.85, ge=0.1, le=1, description="Utilisation above which the job is scaled up."
    )
    history_hours: float = Field(
        default=4, ge=0.25, le=24, description="Load of this many hours must fit before a downscale."
    )

    @model_validator(mode="after")
    def _has_a_dead_band(self) -> ScalerSettings:
        if self.target >= self.up_at:
            raise ValueError(f"target: it is {self.target:g}, and must be below up_at, {self.up_at:g}")
        return self


# Fields added after the first version: at their defaults they are left out of the stored form.
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
    """The config of one job: a `StreamJob`, a `ProcessJob` or a `SparkJob`, selected by `kind`.

    All kinds have the same fields; `problems` checks which of them a kind may use.
    `validate_config` builds one from the merged layers, `from_stored` from the stored form.
    """

    name: Annotated[Name, Sync.RESTART]
    pipeline: Annotated[Name, Sync.RESTART]
    owner: Annotated[Line, Sync.LIVE] = ""
    labels: Annotated[dict[LabelKey, Line], Sync.LIVE] = Field(default_factory=dict, max_length=64)
    kind: Annotated[Literal["stateless", "stateful", "process", "spark"], Sync.COMPLEX] = Field(
        description="`process`: any command as a task. `spark`: a user's own streaming query, one task."
    )
    state: Annotated[Literal["running", "paused", "stopped"], Sync.COMPLEX] = "running"
    package: Annotated[PackageRef | None, Sync.RESTART] = None
    arguments: Annotated[dict[Line, Argument], Sync.RESTART] = Field(default_factory=dict, max_length=256)
    task_count: Annotated[int, Sync.COMPLEX] = Field(default=1, ge=1, le=TASKS_MAX)
    task_count_max: Annotated[int, Sync.LIVE] = Field(
        default=TASKS_UNPRIVILEGED_MAX,
        ge=1,
        le=TASKS_MAX,
        description=f"Above {TASKS_UNPRIVILEGED_MAX} only privileged jobs.",
    )
    partitions: Annotated[int, Sync.COMPLEX] = Field(
        default=1, ge=1, le=PARTITIONS_MAX, description="Default of a process job: one per task."
    )
    partition_tasks: Annotated[tuple[TaskIndex, ...], Sync.COMPLEX] = Field(
        default=(),
        max_length=PARTITIONS_MAX,
        strict=False,
        description="The task of each partition; none: assigned evenly. Ignored if it does not fit.",
    )
    inputs: Annotated[tuple[Input, ...], Sync.COMPLEX] = Field(
        default=(), max_length=INPUTS_MAX, strict=False
    )
    outputs: Annotated[tuple[Output, ...], Sync.COMPLEX] = Field(default=(), max_length=256, strict=False)
    plan: Annotated[WorkPlan, Sync.RESTART] = Field(default_factory=WorkPlan)
    command: Annotated[tuple[Code, ...], Sync.RESTART] = Field(
        default=(), max_length=256, strict=False, description="Of a process job: program and arguments."
    )
    environment: Annotated[dict[EnvironmentName, Argument], Sync.RESTART] = Field(
        default_factory=dict,
        max_length=256,
        description="Of a process job: additional environment variables.",
    )
    lineage: Annotated[int, Sync.COMPLEX] = Field(
        default=0, ge=0, le=2**31 - 1, description="A larger number starts from empty state."
    )
    priority: Annotated[int, Sync.LIVE] = Field(default=0, ge=-1000, le=1000)
    privileged: Annotated[bool, Sync.LIVE] = Field(
        default=False, description="Set by admins only: task_count_max is the only limit of tasks."
    )
    resources: Annotated[Resources, Sync.RESTART] = Field(default_factory=Resources)
    threads: Annotated[int, Sync.RESTART] = Field(default=1, ge=1, le=1024)
    slo: Annotated[Slo, Sync.LIVE] = Field(default_factory=Slo)
    scaler: Annotated[ScalerSettings, Sync.LIVE] = Field(default_factory=ScalerSettings)
    policies: Annotated[dict[Name, Annotated[dict[Name, Scalar], Field(max_length=64)]], Sync.LIVE] = Field(
        default_factory=dict,
        max_length=32,
        description="Settings of control policies, by name of the policy.",
    )
    isolation: Annotated[Literal["shared", "process"], Sync.RESTART] = Field(
        default="shared",
        description="`process`: each task has its own process and JVM, killed above `memory_mb`.",
    )
    poison: Annotated[Literal["dead_letter", "skip", "fail"], Sync.RESTART] = Field(
        default="dead_letter",
        description="Records that cannot be processed: written to the dead letters, or the task fails. "
        "`skip`: dead letters also for records at which a computation raises.",
    )
    # `weak`: sent before the checkpoint; `off`: duplicates after a crash. Both: at least once.
    productions: Annotated[Literal["strong", "weak"], Sync.RESTART] = "strong"
    dedup: Annotated[Literal["on", "off"], Sync.RESTART] = "on"
    straggler_ms: Annotated[int, Sync.RESTART] = Field(
        default=1000,
        ge=0,
        le=600_000,
        description="Weak productions that take longer are checkpointed first.",
    )
    trigger_ms: Annotated[int, Sync.RESTART] = Field(default=1000, ge=0, le=86_400_000)
    batch_rows_max: Annotated[int, Sync.RESTART] = Field(default=50_000, ge=1, le=100_000_000)
    batch_bytes_max: Annotated[int, Sync.RESTART] = Field(
        default=64 * 2**20,
        ge=1,
        le=2**40,
        description="Limit of a task per trigger, but at least one record of each partition.",
    )
    state_cache_bytes: Annotated[int, Sync.RESTART] = Field(
        default=16 * 2**20,
        ge=0,
        le=2**40,
        description="State that each worker process caches between batches; 0: no cache.",
    )

    backlog: Annotated[Literal["read", "leave"], Sync.LIVE] = Field(
        default="read",
        description="Unread records of an input that a release removes: read by the old code, or dropped.",
    )

    @model_validator(mode="after")
    def _check_problems(self, info: ValidationInfo) -> JobConfig:
        # A stored config was checked when it was written, by the rules of that version.
        problems = () if info.context is _STORED else [*self.problems()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def problems(self) -> Iterator[str]:
        """Fields that contradict each other or the kind, each with its path."""
        raise AssertionError("each kind of job overrides this")

    @staticmethod
    def from_stored(data: str | bytes | Mapping[str, Any], *, job: str = "") -> JobConfig:
        """Read the output of `to_json`, of this or another version. CorruptData if it is invalid.

        Missing fields have their defaults; unknown fields are dropped. `job`: its name, for the error.
        """
        try:
            if isinstance(data, Mapping):
                return _KINDS.validate_python(data, context=_STORED, extra="ignore")
            return _KINDS.validate_json(data, context=_STORED, extra="ignore")
        except ValidationError as error:
            raise CorruptData(
                f"the stored config of job {shown(job)} cannot be read",
                why=config_error(job, error, JobConfig, _PATTERNS).why,
                fix="restore the store from a backup, or submit the job again",
            ) from None

    def to_json(self, only: set[str] | None = None) -> dict[str, Any]:
        """The form that is stored, compared and sent to containers; `only`: these fields."""
        data = self.model_dump(mode="json", include=only)
        # Left out where unused, so that jobs of an earlier version do not change.
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
    def code(self) -> PackageRef:
        """The package. Requires: the job has one, as every step of a pipeline does."""
        assert self.package is not None, f"{self.name} has no package"
        return self.package

    @property
    def computation(self) -> Mapping[str, Any]:
        """The stateful computation of the plan; empty: none."""
        return self.plan.computation or {}


class StreamJob(JobConfig):
    """A step of a pipeline: its tasks own intervals, write as producers, and have watermarks."""

    kind: Literal["stateless", "stateful"]

    def problems(self) -> Iterator[str]:
        """See `stream_problems`."""
        return stream_problems(self)


class ProcessJob(JobConfig):
    """Any command; Penstock passes it its task index and partitions, and does not see what it reads."""

    kind: Literal["process"]

    def problems(self) -> Iterator[str]:
        """See `process_problems`."""
        return process_problems(self)


class SparkJob(JobConfig):
    """A user's own streaming query, in one task."""

    kind: Literal["spark"]

    def problems(self) -> Iterator[str]:
        """See `query_problems`."""
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
    """The roles that may set a dotted path of a config, in layers that allow the field; empty: none."""
    field, _, rest = path.partition(".")
    if field == "policies" and rest.endswith(".code"):  # the name of a user policy's code
        return _DEVELOPERS
    if path == "plan.late":  # how late records are handled: no change of code or schema
        return _OPERATORS
    return FIELD_WRITERS.get(field, frozenset())


def _declared(field: str) -> Sync:
    kinds = [item for item in JobConfig.model_fields[field].metadata if isinstance(item, Sync)]
    assert len(kinds) == 1, f"{field} has no `Sync`"
    return kinds[0]


SYNC_OF: Mapping[str, Sync] = {field: _declared(field) for field in JobConfig.model_fields}
# A change of these needs no restart: tasks do not read them.
LIVE_FIELDS = frozenset(field for field, sync in SYNC_OF.items() if sync is Sync.LIVE)


def validate_config(job: str, merged: Mapping[str, Any]) -> JobConfig:
    """The typed config of merged layers, or a ConfigError. Numbers of tasks beyond a limit are clamped."""
    try:
        config: JobConfig = _KINDS.validate_python({"name": job, **merged})
    except ValidationError as error:
        raise config_error(job, error, JobConfig, _PATTERNS) from None
    if config.name != job:
        raise ConfigError(
            f"the config of job {shown(job)} is not valid",
            why=f"name: it is {config.name!r}",
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


# Explanations of the patterns, for messages.
_PATTERNS = {
    LINE_PATTERN: "it contains control characters, or characters that change the direction of text",
    ENVIRONMENT_PATTERN: "a variable name has only letters, digits and '_', and does not start with a digit",
    LABEL_PATTERN: "a label name has up to 100 letters, digits, '_', '-', '.' or '/'",
}


def guarantees_of(config: JobConfig) -> Iterator[str]:
    """The delivery guarantees of a stateful job, one line for each setting; other kinds have none."""
    if config.kind != "stateful":
        return
    is_weak, is_off = config.productions == "weak", config.dedup == "off"
    if is_weak:
        yield (
            "weak productions: at least once; what was sent and not committed before a crash is sent again, "
            "with other values if user code is not deterministic"
        )
    if is_off:
        yield "dedup off: at least once; duplicates after a crash are not removed"
    if not is_weak and not is_off:
        yield (
            "strong productions: exactly once; checkpointed with the state, then sent; "
            "duplicates after a crash are removed"
        )
    if config.poison == "skip" and not skip_problem(config):
        yield "poison skip: records at which the computation raises become dead letters"


def skip_problem(config: JobConfig) -> str:
    """Why `poison: skip` has no effect for this job; "" if it has."""
    if config.computation.get("vectorised"):
        return "process_batch gets a whole batch, so the failing record is not known"
    return "it runs no user code per record" if config.computation.get("operator") else ""
