"""A control policy: detect → diagnose → resolve (StreamOps 4.1, Algorithm 1), and its possible results.

Pure: a policy maps facts to a verdict. `round.py` decides whether an action is applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from penstock.core.errors import ConfigError
from penstock.core.text import did_you_mean, make_known, some_of
from penstock.scaling.policies.facts import JobFacts

Seconds = Annotated[float, Meta(ge=0, le=30 * 24 * 3600)]
Share = Annotated[float, Meta(ge=0, le=1)]
Minutes = Annotated[int, Meta(ge=1, le=14 * 24 * 60)]
Hour = Annotated[int, Meta(ge=0, le=23)]
Code = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}/[A-Za-z_][A-Za-z0-9_./]*\.py:[A-Za-z_][A-Za-z0-9_]*$")]


class ControlSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that every policy has. A policy adds its own in a subclass."""

    enabled: bool = True
    advice_only: bool = False  # the action is reported, not applied
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None  # None: the policy's own
    minutes: Minutes | None = None  # minutes of metrics, complete; None: the policy's own
    every_s: Annotated[float, Meta(ge=1, le=7 * 24 * 3600)] = 60.0
    when_lag_s: Seconds | None = None  # run only while the job's lag is at least this,
    when_busy: Share | None = None  # or a task is at least this busy
    from_hour: Hour | None = None  # run only in these hours, UTC; 22 to 6 is the night
    to_hour: Hour | None = None
    cooldown_s: Seconds = 600.0  # between two actions of this policy on this job
    check_after_s: Seconds = 300.0  # after this an action is checked: is its symptom gone?
    code: Code | None = None  # of a user-defined policy: package hash/file:class

    def __post_init__(self) -> None:
        if (self.from_hour is None) != (self.to_hour is None):
            raise ValueError("from_hour and to_hour must be set together")


COMMON_SETTINGS = frozenset(ControlSettings.__struct_fields__)
S = TypeVar("S", bound=ControlSettings)


def read_settings(kind: type[S], policy: str, given: Mapping[str, Any]) -> S:
    """Parse settings from a job's config; ConfigError names the setting that is wrong."""
    for name in given:
        if name not in kind.__struct_fields__:
            known = kind.__struct_fields__
            raise ConfigError(
                f"policies.{policy}.{name} is not a setting",
                why=f"the settings of {policy} are {some_of(known)}",
                fix=did_you_mean(name, known, otherwise="remove it, or correct its name"),
            )
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        path, _, _ = str(error).partition(" - at `$.")[2].partition("`")
        raise ConfigError(
            f"policies.{policy}{'.' + path if path else ''} is invalid: {str(error).partition(' - at ')[0]}",
            why=f"its value is {given.get(path)!r}" if path else f"its value is {dict(given)!r}",
            fix=f"set a valid value: penstock oncall set JOB policies.{policy}.{path or 'NAME'}=VALUE "
            '--why "…"',
        ) from error


def split_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(common settings, the policy's own). Only the code of a user's policy can check its own ones."""
    common = {name: value for name, value in given.items() if name in COMMON_SETTINGS}
    return common, {name: value for name, value in given.items() if name not in COMMON_SETTINGS}


Text = Annotated[str, Meta(min_length=1, max_length=2000)]
Word = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
Evidence = Mapping[str, float | int | str]

# Config fields that a policy may write: how much a job gets, never what it runs.
CHANGEABLE = frozenset(
    {"task_count", "threads", "resources", "trigger_ms", "batch_rows_max", "batch_bytes_max"}
)
RESOURCES = frozenset({"cpu", "memory_mb", "disk_mb", "network_mbps"})
SEVERITIES = ("info", "warning", "critical")
Severity = Literal["info", "warning", "critical"]


class Symptom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is wrong with the job. Rounds compare symptoms by name."""

    name: Word
    text: Text
    evidence: Evidence = {}


class Cause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why it is wrong, and how sure the policy is."""

    name: Word
    text: Text
    confidence: Annotated[float, Meta(ge=0, le=1)] = 1.0
    evidence: Evidence = {}


class ChangeLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="change"):
    """Change fields of the scaler layer, given as a partial config."""

    changes: dict[str, Any]
    text: Text

    @property
    def is_rescale(self) -> bool:
        """Whether partitions are assigned to tasks again."""
        return "task_count" in self.changes or "partition_tasks" in self.changes


class ExcludeContainers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="exclude"):
    """Keep the job's tasks off these containers for some time; tasks that run there move."""

    containers: tuple[str, ...]
    tasks: tuple[str, ...]
    minutes: Annotated[int, Meta(ge=1, le=7 * 24 * 60)] = 60
    text: Text


class MoveTasks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="move"):
    """Move these tasks to other containers, once."""

    tasks: tuple[str, ...]
    text: Text


class RaiseAlert(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="alert"):
    """Raise an alarm. The key identifies the problem among those of the job."""

    key: Word
    text: Text
    severity: Severity = "warning"
    what_to_do: str = ""
    evidence: Evidence = {}


class Nothing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="nothing"):
    """No action, and the reason."""

    reason: Text


Resolution = ChangeLayer | ExcludeContainers | MoveTasks | RaiseAlert | Nothing
Action = ChangeLayer | ExcludeContainers | MoveTasks


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="verdict"):
    """One policy's result for one job. Without a symptom there is neither cause nor action."""

    policy: str
    resolution: Resolution
    symptom: Symptom | None = None
    cause: Cause | None = None


class Broken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="broken"):
    """A policy gave no verdict: it raised, timed out, returned an invalid value, or has wrong settings."""

    policy: str
    how: Literal["raised", "hung", "nonsense", "settings", "metrics"]
    text: Text


class Policy:
    """A control policy. Subclass it, name it, declare the metrics it reads, and write the three steps.

    A policy is stateless: each round gives it everything in the facts.
    """

    name: ClassVar[str] = ""
    priority: ClassVar[int] = 0  # of several actions that with the highest priority is applied
    metrics: ClassVar[
        tuple[str, ...]
    ] = ()  # required, from `frames.METRICS`; it runs only if all are complete
    if_known: ClassVar[tuple[str, ...]] = ()  # optional metrics, which may have gaps: NaN is unknown
    minutes: ClassVar[int] = 15  # of metrics
    settings: ClassVar[type[ControlSettings]] = ControlSettings

    def detect(self, facts: JobFacts, settings: Any) -> Symptom | None:
        """What is wrong; None if nothing is."""
        return None

    def diagnose(self, symptom: Symptom, facts: JobFacts, settings: Any) -> Cause | None:
        """Why it is wrong; None if this policy finds no cause."""
        return None

    def resolve(self, cause: Cause, facts: JobFacts, settings: Any) -> Resolution:
        """What to do about it."""
        return Nothing(reason="this policy takes no action")


def evaluate(policy: Policy, facts: JobFacts, settings: ControlSettings) -> Verdict | Broken:
    """Run the three steps and check each result. Exceptions of the policy are not caught."""
    symptom = policy.detect(facts, settings)
    if symptom is None:
        return Verdict(policy=policy.name, resolution=Nothing(reason="no symptom"))
    if not isinstance(symptom, Symptom):
        return _nonsense(policy, f"detect must return a Symptom or None, and returned {_shown(symptom)}")
    cause = policy.diagnose(symptom, facts, settings)
    if cause is None:
        reason = f"{symptom.text}; its cause was not found"
        return _checked(
            Verdict(policy=policy.name, symptom=symptom, resolution=Nothing(reason=reason)), facts
        )
    if not isinstance(cause, Cause):
        return _nonsense(policy, f"diagnose must return a Cause or None, and returned {_shown(cause)}")
    resolution = policy.resolve(cause, facts, settings)
    if not isinstance(resolution, Resolution):
        return _nonsense(policy, f"resolve must return a resolution, and returned {_shown(resolution)}")
    verdict = Verdict(policy=policy.name, symptom=symptom, cause=cause, resolution=resolution)
    return _checked(verdict, facts)


def _checked(verdict: Verdict, facts: JobFacts) -> Verdict | Broken:
    """The verdict in plain values, or what is wrong with it. Types are checked on its encoded form."""
    try:
        plain = msgspec.convert(msgspec.to_builtins(verdict, enc_hook=_plain), Verdict)
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError, RecursionError) as error:
        return Broken(policy=verdict.policy, how="nonsense", text=f"its verdict is invalid: {error}"[:2000])
    problem = find_nonsense(plain, facts)
    return Broken(policy=verdict.policy, how="nonsense", text=problem) if problem else plain


def find_nonsense(verdict: Verdict, facts: JobFacts) -> str:
    """Why a verdict is invalid for this job; "" if it is valid."""
    numbers = [*(verdict.symptom.evidence.values() if verdict.symptom else ())]
    numbers += [*(verdict.cause.evidence.values() if verdict.cause else ())]
    if isinstance(verdict.resolution, RaiseAlert):
        numbers += verdict.resolution.evidence.values()
    if any(isinstance(value, float) and not isfinite(value) for value in numbers):
        return "its evidence has a value that is NaN or infinite"
    ours = {task.task_id for task in facts.tasks}
    match verdict.resolution:
        case ChangeLayer(changes=changes):
            return _wrong_change(changes, facts)
        case ExcludeContainers(containers=containers, tasks=tasks):
            strange = sorted({*containers} - facts.containers)
            if not containers:
                return "it excludes containers and names none"
            if strange:
                return f"it excludes {', '.join(strange)}, where no task of this job can run"
            if facts.containers <= {*containers}:
                return "it excludes all containers of the job"
            return _strangers(tasks, ours)
        case MoveTasks(tasks=tasks):
            return _strangers(tasks, ours) if tasks else "it moves tasks and names none"
    return ""


def _strangers(tasks: tuple[str, ...], ours: set[str]) -> str:
    strange = sorted({*tasks} - ours)
    return f"not tasks of this job: {', '.join(strange)}" if strange else ""


def _wrong_change(changes: Mapping[str, Any], facts: JobFacts) -> str:
    strange = sorted({*changes} - CHANGEABLE)
    if strange or not changes or changes == {"resources": {}}:
        return f"a policy may not change {', '.join(strange) or 'nothing'}"
    count = changes.get("task_count", 1)
    if not _is_count(count) or not 1 <= count <= max(facts.task_count_max, facts.task_count):
        return f"its task_count is {_shown(count)}, and must be from 1 to {facts.task_count_max}"
    plain = {name: value for name, value in changes.items() if name not in ("resources", "task_count")}
    wrong = sorted(name for name, value in plain.items() if not _is_count(value) or value < 0)
    resources = changes.get("resources", {})
    if not isinstance(resources, Mapping):
        wrong.append("resources")
    else:
        wrong += [
            f"resources.{name}"
            for name, value in resources.items()
            if name not in RESOURCES or not _is_amount(value)
        ]
    return f"invalid values of {', '.join(wrong)}" if wrong else ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value > 0


def _plain(value: Any) -> Any:
    """Convert NumPy's scalars."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a plain value")


def _nonsense(policy: Policy, text: str) -> Broken:
    return Broken(policy=policy.name, how="nonsense", text=text)


def _shown(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:100]!r}"


FLEET = "fleet"  # the job name of alarms that concern no single job
Levels = Mapping[str, tuple[RaiseAlert, ...]]  # by job: all alerts that hold now


make_known(Verdict, ControlSettings)
