"""What one job should run: the typed config that every merge of layers must fit (Turbine III-A).

Each field says what a change of it costs: see `Sync`. Pure: no clock, no I/O.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from penstock.core.errors import ConfigError

PROBLEMS_SHOWN_MAX = 5


class Sync(StrEnum):
    """What a change of a field costs: a plan, a restart of tasks in place, or nothing."""

    COMPLEX = "complex"
    RESTART = "restart"
    LIVE = "live"


# Names become parts of file names and URLs, so they may not climb out of a folder.
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PackageRef(_Part):
    """User code by hash, and the module to import from it."""

    name: str
    version: str
    hash: str
    entry: str


class Input(_Part):
    """A category the job reads, and where its first start begins."""

    category: Name
    start: Literal["earliest", "latest"] = "earliest"


class Output(_Part):
    """A category the job writes."""

    stream: str
    category: Name
    partitions: int = Field(ge=1, le=4096)
    columns: tuple[tuple[str, str], ...]
    internal: bool
    format: Literal["typed"] = "typed"


class FilterStage(_Part):
    """Keeps the rows for which a Spark SQL expression holds."""

    op: Literal["filter"]
    expr: str


class SelectStage(_Part):
    """Makes columns: (name, Spark SQL, type)."""

    op: Literal["select"]
    columns: tuple[tuple[str, str, str], ...]


class WorkPlan(_Part):
    """What the tasks do with each record: plain JSON, the control plane never imports user code."""

    stages: tuple[Annotated[FilterStage | SelectStage, Field(discriminator="op")], ...] = ()
    key: str | None = None
    computation: dict[str, Any] | None = None
    late: Literal["drop", "process"] = "drop"


class Resources(_Part):
    """What each task gets."""

    cpu: float = Field(default=1.0, gt=0)
    memory_mb: int = Field(default=512, ge=1)


class Slo(_Part):
    """What the job's owner was promised."""

    lag_s: float = Field(default=90, gt=0)


class ScalerSettings(_Part):
    """How the auto scaler treats this job."""

    enabled: bool = True
    quiet_s: float = Field(default=60, ge=0)
    settle_s: float = Field(default=10, ge=0)
    task_count_min: int = Field(default=1, ge=1)


class JobConfig(_Part):
    """What one job should run."""

    name: Annotated[Name, Sync.RESTART]
    pipeline: Annotated[Name, Sync.RESTART]
    owner: Annotated[str, Sync.LIVE] = ""
    labels: Annotated[dict[str, str], Sync.LIVE] = Field(default_factory=dict)
    kind: Annotated[Literal["stateless", "stateful"], Sync.COMPLEX]
    state: Annotated[Literal["running", "stopped"], Sync.COMPLEX] = "running"
    package: Annotated[PackageRef, Sync.RESTART]
    arguments: Annotated[dict[str, str], Sync.RESTART] = Field(default_factory=dict)
    task_count: Annotated[int, Sync.COMPLEX] = Field(default=1, ge=1)
    task_count_max: Annotated[int, Sync.LIVE] = Field(
        default=32, ge=1, description="The scaler never goes above it."
    )
    partitions: Annotated[int, Sync.COMPLEX] = Field(ge=1, le=4096)
    inputs: Annotated[tuple[Input, ...], Sync.COMPLEX] = Field(min_length=1, max_length=1)
    outputs: Annotated[tuple[Output, ...], Sync.COMPLEX]
    plan: Annotated[WorkPlan, Sync.RESTART]
    lineage: Annotated[int, Sync.COMPLEX] = Field(
        default=0, ge=0, description="A larger one starts from empty state."
    )
    priority: Annotated[int, Sync.LIVE] = 0
    resources: Annotated[Resources, Sync.RESTART] = Field(default_factory=Resources)
    threads: Annotated[int, Sync.RESTART] = Field(default=1, ge=1)
    slo: Annotated[Slo, Sync.LIVE] = Field(default_factory=Slo)
    scaler: Annotated[ScalerSettings, Sync.LIVE] = Field(default_factory=ScalerSettings)
    trigger_ms: Annotated[int, Sync.RESTART] = Field(default=1000, ge=0)
    batch_rows_max: Annotated[int, Sync.RESTART] = Field(default=50_000, ge=1)

    @model_validator(mode="after")
    def _fits_together(self) -> JobConfig:
        has_computation = self.plan.computation is not None
        if self.kind == "stateful" and (
            self.plan.computation is None or not self.plan.computation.get("class")
        ):
            raise ValueError("a stateful job needs plan.computation with a class")
        if self.kind == "stateless" and has_computation:
            raise ValueError("a stateless job may not have a plan.computation")
        for what in ("stream", "category"):
            names = [getattr(output, what) for output in self.outputs]
            if len(set(names)) < len(names):
                raise ValueError(f"two outputs have the same {what}")
        return self

    def to_json(self) -> dict[str, Any]:
        """The plain form that is stored, compared and sent to containers."""
        return self.model_dump(mode="json")


def _declared(field: str) -> Sync:
    kinds = [item for item in JobConfig.model_fields[field].metadata if isinstance(item, Sync)]
    assert len(kinds) == 1, f"{field} does not say what a change of it costs"
    return kinds[0]


SYNC_OF: Mapping[str, Sync] = {field: _declared(field) for field in JobConfig.model_fields}


def validate_config(job: str, merged: Mapping[str, Any]) -> JobConfig:
    """The typed config of a merge, or a ConfigError with path and reason. Limits clamp the task count."""
    try:
        config = JobConfig.model_validate({"name": job, **merged})
    except ValidationError as error:
        raise _config_error(job, error) from None
    if config.name != job:
        raise ConfigError(
            f"the config of job {job!r} is not valid",
            why=f"name: it says {config.name!r}",
            fix=f"leave `name` out, or set it to {job!r}",
        )
    cap = min(config.task_count_max, config.partitions)
    return config if config.task_count <= cap else config.model_copy(update={"task_count": cap})


def _config_error(job: str, error: ValidationError) -> ConfigError:
    reasons, hints = [], []
    for problem in error.errors()[:PROBLEMS_SHOWN_MAX]:
        path, reason = _path(problem["loc"]), problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            reason = "there is no such field"
            hints += _suggestions(problem["loc"], path)
        reasons.append(f"{path}: {reason}" if path else reason)
    hidden = error.error_count() - len(reasons)
    if hidden > 0:
        reasons.append(f"and {hidden} more")
    return ConfigError(
        f"the config of job {job!r} is not valid",
        why="; ".join(reasons),
        fix="; ".join(hints) or "correct the named fields and write the layer again; nothing was changed",
    )


def _path(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _suggestions(location: tuple[int | str, ...], path: str) -> list[str]:
    models: list[type[BaseModel]] = [JobConfig]
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
