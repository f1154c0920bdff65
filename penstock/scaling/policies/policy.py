"""What a control policy is: detect → diagnose → resolve (StreamOps 4.1, Algorithm 1), and what it may answer.

Pure: a policy looks at facts and returns values. Whether one of them is applied is decided in `round.py`.
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
    """What every policy has. A policy adds its own by subclassing."""

    enabled: bool = True
    advice_only: bool = False  # it says what it would do, and does nothing
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None  # None: as the policy says
    minutes: Minutes | None = None  # how many it is shown, complete; None: as the policy says
    every_s: Annotated[float, Meta(ge=1, le=7 * 24 * 3600)] = 60.0
    when_lag_s: Seconds | None = None  # look only while the job lags so far,
    when_busy: Share | None = None  # or a task is so busy that it holds back what is before it
    from_hour: Hour | None = None  # look only in these hours, UTC; 22 to 6 is the night
    to_hour: Hour | None = None
    cooldown_s: Seconds = 600.0  # between two actions of this policy on this job
    check_after_s: Seconds = 300.0  # then it is looked whether an action helped
    code: Code | None = None  # of a user's own policy: package hash/file:class

    def __post_init__(self) -> None:
        if (self.from_hour is None) != (self.to_hour is None):
            raise ValueError("from_hour and to_hour need each other")


EVERYBODYS = frozenset(ControlSettings.__struct_fields__)
S = TypeVar("S", bound=ControlSettings)


def read_settings(kind: type[S], policy: str, given: Mapping[str, Any]) -> S:
    """Settings from a job's config; ConfigError says which of them cannot be."""
    for name in given:
        if name not in kind.__struct_fields__:
            known = kind.__struct_fields__
            raise ConfigError(
                f"policies.{policy}.{name} is no setting",
                why=f"{policy} has {some_of(known)}",
                fix=did_you_mean(name, known, otherwise="take it out, or correct its name"),
            )
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        path, _, _ = str(error).partition(" - at `$.")[2].partition("`")
        raise ConfigError(
            f"policies.{policy}{'.' + path if path else ''} cannot be: {str(error).partition(' - at ')[0]}",
            why=f"given is {given.get(path)!r}" if path else f"given is {dict(given)!r}",
            fix=f"set it within its range: penstock oncall set JOB policies.{policy}.{path or 'NAME'}=VALUE "
            '--why "…"',
        ) from error


def split_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(those that every policy has, the rest): of a user's own policy only its code knows the rest."""
    common = {name: value for name, value in given.items() if name in EVERYBODYS}
    return common, {name: value for name, value in given.items() if name not in EVERYBODYS}


Text = Annotated[str, Meta(min_length=1, max_length=2000)]
Word = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
Evidence = Mapping[str, float | int | str]

# What a policy may write: what a job gets, never what it runs.
CHANGEABLE = frozenset(
    {"task_count", "threads", "resources", "trigger_ms", "batch_rows_max", "batch_bytes_max"}
)
RESOURCES = frozenset({"cpu", "memory_mb", "disk_mb", "network_mbps"})
SEVERITIES = ("info", "warning", "critical")
Severity = Literal["info", "warning", "critical"]


class Symptom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is wrong, seen from outside. Its name tells one kind from another over rounds."""

    name: Word
    text: Text
    evidence: Evidence = {}


class Cause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why, and how sure that is."""

    name: Word
    text: Text
    confidence: Annotated[float, Meta(ge=0, le=1)] = 1.0
    evidence: Evidence = {}


class ChangeLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="change"):
    """Other resources: fields of the scaler layer, as a partial config."""

    changes: dict[str, Any]
    text: Text

    @property
    def is_rescale(self) -> bool:
        """Whether the job's tasks are dealt anew."""
        return "task_count" in self.changes or "partition_tasks" in self.changes


class ExcludeContainers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="exclude"):
    """No task of this job on these containers for a while; those that are there go elsewhere."""

    containers: tuple[str, ...]
    tasks: tuple[str, ...]
    minutes: Annotated[int, Meta(ge=1, le=7 * 24 * 60)] = 60
    text: Text


class MoveTasks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="move"):
    """These tasks run elsewhere, once."""

    tasks: tuple[str, ...]
    text: Text


class RaiseAlert(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="alert"):
    """Somebody has to look. The key tells one trouble of the job from another."""

    key: Word
    text: Text
    severity: Severity = "warning"
    what_to_do: str = ""
    evidence: Evidence = {}


class Nothing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="nothing"):
    """Nothing is to be done, because."""

    reason: Text


Resolution = ChangeLayer | ExcludeContainers | MoveTasks | RaiseAlert | Nothing
Action = ChangeLayer | ExcludeContainers | MoveTasks


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="verdict"):
    """What one policy said of one job. Without a symptom there is neither cause nor action."""

    policy: str
    resolution: Resolution
    symptom: Symptom | None = None
    cause: Cause | None = None


class Broken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="broken"):
    """A policy that gave no verdict: it raised, took too long, answered nonsense, or has wrong settings."""

    policy: str
    how: Literal["raised", "hung", "nonsense", "settings", "metrics"]
    text: Text


class Policy:
    """A control policy. Subclass it, name it, declare what it reads, and write the three steps.

    A policy keeps nothing between rounds: what it may know is in the facts.
    """

    name: ClassVar[str] = ""
    priority: ClassVar[int] = 0  # of several with an action the largest is applied
    metrics: ClassVar[tuple[str, ...]] = ()  # names of `frames.METRICS`; without all of them it is not asked
    if_known: ClassVar[tuple[str, ...]] = ()  # those that it also looks at, holes and all: NaN is unknown
    minutes: ClassVar[int] = 15  # of history
    settings: ClassVar[type[ControlSettings]] = ControlSettings

    def detect(self, facts: JobFacts, settings: Any) -> Symptom | None:
        """What is wrong; None: nothing."""
        return None

    def diagnose(self, symptom: Symptom, facts: JobFacts, settings: Any) -> Cause | None:
        """Why; None: this policy knows no cause."""
        return None

    def resolve(self, cause: Cause, facts: JobFacts, settings: Any) -> Resolution:
        """What to do about it."""
        return Nothing(reason="this policy only looks")


def evaluate(policy: Policy, facts: JobFacts, settings: ControlSettings) -> Verdict | Broken:
    """The three steps, each answer checked. What a policy raises goes through."""
    symptom = policy.detect(facts, settings)
    if symptom is None:
        return Verdict(policy=policy.name, resolution=Nothing(reason="no symptom"))
    if not isinstance(symptom, Symptom):
        return _nonsense(policy, f"detect returned {_shown(symptom)}, not a Symptom or None")
    cause = policy.diagnose(symptom, facts, settings)
    if cause is None:
        reason = f"{symptom.text}; its cause was not found"
        return _checked(
            Verdict(policy=policy.name, symptom=symptom, resolution=Nothing(reason=reason)), facts
        )
    if not isinstance(cause, Cause):
        return _nonsense(policy, f"diagnose returned {_shown(cause)}, not a Cause or None")
    resolution = policy.resolve(cause, facts, settings)
    if not isinstance(resolution, Resolution):
        return _nonsense(policy, f"resolve returned {_shown(resolution)}, not a resolution")
    verdict = Verdict(policy=policy.name, symptom=symptom, cause=cause, resolution=resolution)
    return _checked(verdict, facts)


def _checked(verdict: Verdict, facts: JobFacts) -> Verdict | Broken:
    """The verdict in plain values, or what is wrong with it: what a type says is checked on its wire form."""
    try:
        plain = msgspec.convert(msgspec.to_builtins(verdict, enc_hook=_plain), Verdict)
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError, RecursionError) as error:
        return Broken(policy=verdict.policy, how="nonsense", text=f"its answer cannot be: {error}"[:2000])
    problem = find_nonsense(plain, facts)
    return Broken(policy=verdict.policy, how="nonsense", text=problem) if problem else plain


def find_nonsense(verdict: Verdict, facts: JobFacts) -> str:
    """What about a verdict does not fit its job; "" if all does."""
    numbers = [*(verdict.symptom.evidence.values() if verdict.symptom else ())]
    numbers += [*(verdict.cause.evidence.values() if verdict.cause else ())]
    if isinstance(verdict.resolution, RaiseAlert):
        numbers += verdict.resolution.evidence.values()
    if any(isinstance(value, float) and not isfinite(value) for value in numbers):
        return "its evidence has a number that is none"
    ours = {task.task_id for task in facts.tasks}
    match verdict.resolution:
        case ChangeLayer(changes=changes):
            return _wrong_change(changes, facts)
        case ExcludeContainers(containers=containers, tasks=tasks):
            strange = sorted({*containers} - facts.containers)
            if not containers or strange:
                return f"it excludes {', '.join(strange) or 'no container'}, which has no task of this job"
            if facts.containers <= {*containers}:
                return "it would leave the job no container"
            return _strangers(tasks, ours)
        case MoveTasks(tasks=tasks):
            return _strangers(tasks, ours) if tasks else "it moves no task"
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
        return f"{_shown(count)} tasks cannot be: 1 to {facts.task_count_max}"
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
    return f"not numbers that can be: {', '.join(wrong)}" if wrong else ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value > 0


def _plain(value: Any) -> Any:
    """NumPy's numbers are numbers."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no plain value")


def _nonsense(policy: Policy, text: str) -> Broken:
    return Broken(policy=policy.name, how="nonsense", text=text)


def _shown(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:100]!r}"


FLEET = "fleet"  # the job of alarms that are no single job's
Levels = Mapping[str, tuple[RaiseAlert, ...]]  # alerts by job: what is wrong now, for as long as it is


make_known(Verdict, ControlSettings)
