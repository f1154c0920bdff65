"""What one job should run: the typed config that every merge of layers must fit (Turbine III-A).

Each field says what a change of it costs: see `Sync`. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import isfinite
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StringConstraints,
    ValidationError,
    model_validator,
)

from penstock.core.errors import ConfigError
from penstock.jobs.config_errors import config_error
from penstock.jobs.config_rules import PROCESS_FIELDS, misfits
from penstock.jobs.text_rules import INT_MAX, LINE_PATTERN, is_line, shown

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
    """What one job should run."""

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
    def _fits_together(self) -> JobConfig:
        problems = [*misfits(self)]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def to_json(self) -> dict[str, Any]:
        """The plain form that is stored, compared and sent to containers."""
        # Left out where they mean nothing: a job of an earlier version then runs on as it is.
        unused: dict[str, Any] = {} if self.kind == "process" else dict.fromkeys(PROCESS_FIELDS, True)
        known = JobConfig.model_fields
        unused |= {name: True for name in LATER_FIELDS if getattr(self, name) == known[name].default}
        for part, names in LATER_PART_FIELDS.items():
            value: BaseModel = getattr(self, part)
            fields = type(value).model_fields
            later = {name: True for name in names if getattr(value, name) == fields[name].default}
            unused |= {part: later} if later else {}
        outside = {n: {"writer": True} for n, source in enumerate(self.inputs) if source.writer is None}
        unused |= {"inputs": outside} if outside else {}
        return self.model_dump(mode="json", exclude=unused)


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


def validate_config(job: str, merged: Mapping[str, Any]) -> JobConfig:
    """The typed config of a merge, or a ConfigError with path and reason. Limits clamp, none refuses."""
    try:
        config = JobConfig.model_validate({"name": job, **merged})
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
