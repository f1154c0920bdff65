"""What it takes to make a job run as expected: nothing, a simple change, or a plan (Turbine III-B).

Pure: compares values and answers with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.core.clock import Millis
from penstock.jobs.config import SYNC_OF, JobConfig, Sync
from penstock.jobs.layers import LayerRow, is_same
from penstock.jobs.tasks import PARTITION_TASKS, (
    describe_moves,
    ignored_mapping_reason,
    map_partitions,
    requested_mapping,
)

Json = Mapping[str, Any]


class PlanStep(StrEnum):
    """Where an open plan stands: the step that is to be done next."""

    PREPARE = "prepare"
    HOLD = "hold"
    CONFIRM = "confirm"
    COMMIT = "commit"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """One path whose value differs."""

    path: str
    old: Any
    new: Any
    sync: Sync


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningView:
    """What runs, as a plan needs to see it."""

    config: JobConfig
    generation: int
    mapping: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InSync:
    """Nothing to do."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleSync:
    """Copy the config over; tasks restart in place, or not at all."""

    target: JobConfig
    changed: tuple[FieldChange, ...]
    restarts: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComplexSync:
    """A plan is needed: the old tasks must be gone before the new ones start."""

    target: JobConfig | None  # None: the job is removed
    mapping: tuple[int, ...]
    changed: tuple[FieldChange, ...]
    reason: str


def plan_sync(expected: JobConfig | None, running: RunningView | None) -> InSync | SimpleSync | ComplexSync:
    """Compare what should run with what runs. No `expected`: removed; no `running`: never started."""
    if expected is None:
        if running is None:
            return InSync(reason="removed, and nothing runs")
        return ComplexSync(target=None, mapping=running.mapping, changed=(), reason="the job is removed")
    if running is None:
        if not is_active(expected):
            return InSync(reason=f"{expected.state}, and never started")
        mapping = plan_mapping(expected, None)
        reason = "first start" + _explain_mapping(expected, mapping, None)
        return ComplexSync(target=expected, mapping=mapping, changed=(), reason=reason)
    changed = diff_configs(running.config, expected)
    reason = explain(changed)
    if not changed:
        return InSync(reason=reason)
    if any(change.sync is Sync.COMPLEX for change in changed):
        mapping = plan_mapping(expected, running)
        reason += _explain_mapping(expected, mapping, running)
        return ComplexSync(target=expected, mapping=mapping, changed=changed, reason=reason)
    return SimpleSync(target=expected, changed=changed, restarts=needs_restart(changed), reason=reason)


def needs_restart(changed: Iterable[FieldChange]) -> bool:
    """Whether tasks read any of this when they start."""
    return any(change.sync is Sync.RESTART for change in changed)


# What becomes of the tasks when the desired state changes; said wherever a plan is shown.
_STATES: Mapping[str, str] = {
    "running": "its tasks start where they left off, under a new generation",
    "paused": "its tasks stop; partitions, state and producers keep their places, readers downstream wait",
    "stopped": "its tasks stop",
}


def explain(changed: Sequence[FieldChange]) -> str:
    """Why a sync is needed or not, in a line."""
    if not changed:
        return "runs as expected"
    parts, notes = [], []
    for change in changed:
        parts.append(change.path)
        if change.path == "state":
            notes.append(f"{change.old} to {change.new}: {_STATES[change.new]}")
    return " ".join([", ".join(parts), "changed", *(f"({note})" for note in notes)])


def plan_mapping(target: JobConfig, running: RunningView | None) -> tuple[int, ...]:
    """The mapping of the target: what it asks for; else the present one while nothing of it changes."""
    asked = requested_mapping(target)
    if asked is not None:
        return asked
    if running is not None and _size_of(target) == _size_of(running.config):
        return running.mapping
    return map_partitions(target.partitions, target.task_count)


def _size_of(config: JobConfig) -> tuple[int, int, tuple[int, ...]]:
    return config.partitions, config.task_count, config.partition_tasks


def _explain_mapping(target: JobConfig, mapping: tuple[int, ...], running: RunningView | None) -> str:
    """What a plan does to the mapping, where nothing else says it."""
    even = map_partitions(target.partitions, target.task_count)
    is_same_size = running is not None and target.task_count == running.config.task_count
    moves = describe_moves(running.mapping, mapping) if running is not None and is_same_size else ""
    if why := ignored_mapping_reason(target):
        return f" ({moves + '; ' if moves else ''}{PARTITION_TASKS} is ignored: {why})"
    if moves:
        return f" ({moves})"
    return f" (partitions are dealt as {PARTITION_TASKS} says)" if mapping != even and not is_same_size else ""


def is_active(config: JobConfig | None) -> bool:
    """Whether tasks of this config are to run."""
    return config is not None and config.state == "running"


def steps_of(target: JobConfig | None, *, has_old: bool) -> tuple[PlanStep, ...]:
    """The steps of a plan. What will not run needs no preparation; what never ran need not be stopped."""
    before = (PlanStep.PREPARE,) if is_active(target) else ()
    stop = (PlanStep.HOLD, PlanStep.CONFIRM) if has_old else ()
    return (*before, *stop, PlanStep.COMMIT)


def step_after(step: PlanStep, target: JobConfig | None, *, has_old: bool) -> PlanStep:
    """Requires: `step` is not the last."""
    steps = steps_of(target, has_old=has_old)
    return steps[steps.index(step) + 1]


def why_replace(
    plan_target: JobConfig | None, plan_version: int, expected: JobConfig | None, urgent: Iterable[LayerRow]
) -> str | None:
    """Why an open plan gives way to the newest expected config between two steps; None: that config waits."""
    if expected == plan_target:
        return None
    if expected is None:
        return "the job is removed"
    if expected.state == "stopped" and plan_target is not None and plan_target.state != "stopped":
        return "the job is to stop"
    if expected.state == "paused" and is_active(plan_target):
        return "the job is to pause"
    for row in urgent:
        if row.version > plan_version:
            return f"{row.actor} changed the {row.layer} layer"
    return None


def plan_batch(jobs: int, *, written: int, took_ms: Millis, aim_ms: Millis, jobs_max: int) -> int:
    """How many jobs the next transaction takes, so that it keeps others waiting for about `aim_ms`.

    `jobs` is how many this one could have taken, `written` how many there were.
    """
    fitting = written * aim_ms // max(took_ms, 1)
    if took_ms <= aim_ms:
        # A transaction that was not full tells little about a full one.
        fitting = min(fitting, 2 * jobs) if written == jobs else jobs
    return max(1, min(fitting, jobs_max))


def diff_configs(old: JobConfig, new: JobConfig) -> tuple[FieldChange, ...]:
    """Every dotted path that differs, with what the change costs; lists are compared whole."""
    before, after = old.__dict__, new.__dict__
    fields = {name for name, value in after.items() if before[name] != value}
    # To Python true is 1; what these hold has no declared type.
    if not is_same(old.policies, new.policies):
        fields.add("policies")
    if not is_same(old.plan.computation, new.plan.computation):
        fields.add("plan")
    return diff_json(old.to_json(fields), new.to_json(fields)) if fields else ()


def diff_json(old: Json, new: Json) -> tuple[FieldChange, ...]:
    """As `diff_configs`, of two configs as JSON, whole or not."""
    # Most fields are equal, which is seen at once; only the others are descended into.
    fields = [field for field, value in new.items() if not is_same(old.get(field), value)]
    fields += [field for field in old if field not in new]
    return tuple(
        FieldChange(path=path, old=before, new=after, sync=SYNC_OF.get(field, Sync.RESTART))
        for field in sorted(fields)
        for path, before, after in _differences(field, old.get(field), new.get(field))
    )


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from _differences(f"{path}.{key}", old.get(key), new.get(key))
    elif not is_same(old, new):
        yield path, old, new


def dropped_inputs(old: JobConfig, target: JobConfig | None) -> Iterator[tuple[str, str]]:
    """Category and writer of each input that was made for this job and that `target` has no more.

    None if its backlog is given up, on purpose or together with its state, or if nothing is to run.
    """
    if target is None or not is_active(target) or target.backlog == "leave":
        return
    if (old.kind, old.lineage) != (target.kind, target.lineage):
        return
    kept = {item.category for item in target.inputs}
    for item in old.inputs:
        if item.writer and item.category not in kept:
            yield item.category, item.writer


class CategoryEnd(StrEnum):
    """When a category that a job writes comes to its end."""

    NEVER = "never"  # it goes on: its reader just turns to something else
    RETIRED = "retired"  # once its producers are unregistered
    STOPPED = "stopped"  # once its tasks have stopped: a stopped job stays registered


def category_end(expected: JobConfig | None, category: str) -> CategoryEnd:
    """When what a job (None: it is removed) has written to a category is all of it."""
    if expected is None or all(item.category != category for item in expected.outputs):
        return CategoryEnd.RETIRED
    return CategoryEnd.STOPPED if expected.state == "stopped" else CategoryEnd.NEVER
