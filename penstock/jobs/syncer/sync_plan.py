"""Decides how a job becomes in sync: no change, a simple change, or a plan (Turbine III-B).

Pure: compares configs; each decision has its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.core.clock import Millis
from penstock.jobs.config import SYNC_OF, JobConfig, Sync
from penstock.jobs.layers import LayerRow, is_same
from penstock.jobs.tasks import (
    PARTITION_TASKS,
    describe_moves,
    ignored_mapping_reason,
    map_partitions,
    requested_mapping,
)

Json = Mapping[str, Any]


class PlanStep(StrEnum):
    """The next step of an open plan."""

    PREPARE = "prepare"
    HOLD = "hold"
    CONFIRM = "confirm"
    COMMIT = "commit"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """One path of a config with different values."""

    path: str
    old: Any
    new: Any
    sync: Sync


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningView:
    """The running config of a job, as far as a plan needs it."""

    config: JobConfig
    generation: int
    mapping: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InSync:
    """The running config is as expected: nothing to do."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleSync:
    """Replace the running config; tasks restart in place, or not at all."""

    target: JobConfig
    changed: tuple[FieldChange, ...]
    restarts: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComplexSync:
    """A plan is needed: the old tasks must stop before the new ones start."""

    target: JobConfig | None  # None: the job is removed
    mapping: tuple[int, ...]
    changed: tuple[FieldChange, ...]
    reason: str


def plan_sync(expected: JobConfig | None, running: RunningView | None) -> InSync | SimpleSync | ComplexSync:
    """Compare the expected with the running config. No `expected`: removed; no `running`: never started."""
    if expected is None:
        if running is None:
            return InSync(reason="removed, and no tasks run")
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
    """Whether tasks must restart for any of these changes."""
    return any(change.sync is Sync.RESTART for change in changed)


# What a change of the desired state does to the tasks; part of a plan's reason.
_STATES: Mapping[str, str] = {
    "running": "its tasks start at their checkpoints, under a new generation",
    "paused": "its tasks stop; partitions, state and producers are kept, downstream jobs wait",
    "stopped": "its tasks stop",
}


def explain(changed: Sequence[FieldChange]) -> str:
    """The reason of a sync, in one line."""
    if not changed:
        return "runs as expected"
    parts, notes = [], []
    for change in changed:
        parts.append(change.path)
        if change.path == "state":
            notes.append(f"{change.old} to {change.new}: {_STATES[change.new]}")
    return " ".join([", ".join(parts), "changed", *(f"({note})" for note in notes)])


def plan_mapping(target: JobConfig, running: RunningView | None) -> tuple[int, ...]:
    """The mapping of the target: the requested one, or the running one if its size fits, or an even one."""
    requested = requested_mapping(target)
    if requested is not None:
        return requested
    if running is not None and _size_of(target) == _size_of(running.config):
        return running.mapping
    return map_partitions(target.partitions, target.task_count)


def _size_of(config: JobConfig) -> tuple[int, int, tuple[int, ...]]:
    return config.partitions, config.task_count, config.partition_tasks


def _explain_mapping(target: JobConfig, mapping: tuple[int, ...], running: RunningView | None) -> str:
    """The part of a plan's reason about the mapping; "" if it is not special."""
    even = map_partitions(target.partitions, target.task_count)
    is_same_size = running is not None and target.task_count == running.config.task_count
    moves = describe_moves(running.mapping, mapping) if running is not None and is_same_size else ""
    if why := ignored_mapping_reason(target):
        return f" ({moves + '; ' if moves else ''}{PARTITION_TASKS} is ignored: {why})"
    if moves:
        return f" ({moves})"
    return f" (partitions are assigned by {PARTITION_TASKS})" if mapping != even and not is_same_size else ""


def is_active(config: JobConfig | None) -> bool:
    """Whether tasks of this config must run."""
    return config is not None and config.state == "running"


def steps_of(target: JobConfig | None, *, has_old: bool) -> tuple[PlanStep, ...]:
    """The steps of a plan: no preparation if no task will run, no stop if no task ran."""
    before = (PlanStep.PREPARE,) if is_active(target) else ()
    stop = (PlanStep.HOLD, PlanStep.CONFIRM) if has_old else ()
    return (*before, *stop, PlanStep.COMMIT)


def step_after(step: PlanStep, target: JobConfig | None, *, has_old: bool) -> PlanStep:
    """The next step. Requires: `step` is not the last."""
    steps = steps_of(target, has_old=has_old)
    return steps[steps.index(step) + 1]


def why_replace(
    plan_target: JobConfig | None, plan_version: int, expected: JobConfig | None, urgent: Iterable[LayerRow]
) -> str | None:
    """Why the newest expected config replaces an open plan between two steps; None: it waits for the plan."""
    if expected == plan_target:
        return None
    if expected is None:
        return "the job is removed"
    if expected.state == "stopped" and plan_target is not None and plan_target.state != "stopped":
        return "the job must stop"
    if expected.state == "paused" and is_active(plan_target):
        return "the job must pause"
    for row in urgent:
        if row.version > plan_version:
            return f"{row.actor} changed the {row.layer} layer"
    return None


def plan_batch(jobs: int, *, written: int, took_ms: Millis, aim_ms: Millis, jobs_max: int) -> int:
    """The size of the next batch, so that its transaction takes about `aim_ms`.

    `jobs` is the size limit of the last batch, `written` its number of jobs.
    """
    fitting = written * aim_ms // max(took_ms, 1)
    if took_ms <= aim_ms:
        # Only a full batch shows how long a full batch takes.
        fitting = min(fitting, 2 * jobs) if written == jobs else jobs
    return max(1, min(fitting, jobs_max))


def diff_configs(old: JobConfig, new: JobConfig) -> tuple[FieldChange, ...]:
    """Every dotted path with different values, and the cost of its change; lists are compared as a whole."""
    before, after = old.__dict__, new.__dict__
    fields = {name for name, value in after.items() if before[name] != value}
    # To Python true == 1, and the values in these have no declared type.
    if not is_same(old.policies, new.policies):
        fields.add("policies")
    if not is_same(old.plan.computation, new.plan.computation):
        fields.add("plan")
    return diff_json(old.to_json(fields), new.to_json(fields)) if fields else ()


def diff_json(old: Json, new: Json) -> tuple[FieldChange, ...]:
    """As `diff_configs`, for two configs or parts of configs as JSON."""
    # Most fields are equal; only the others are traversed.
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
    """Category and writer of each input that the pipeline writes for this job and `target` does not have.

    None if the backlog is dropped, by `backlog: leave` or with the state, or if no task will run.
    """
    if target is None or not is_active(target) or target.backlog == "leave":
        return
    if (old.kind, old.lineage) != (target.kind, target.lineage):
        return
    remaining = {item.category for item in target.inputs}
    for item in old.inputs:
        if item.writer and item.category not in remaining:
            yield item.category, item.writer


class CategoryEnd(StrEnum):
    """When a job has written the last record of a category."""

    NEVER = "never"  # the job continues to write it
    RETIRED = "retired"  # when its producers are unregistered
    STOPPED = "stopped"  # when its tasks have stopped: a stopped job stays registered


def category_end(expected: JobConfig | None, category: str) -> CategoryEnd:
    """When a job has written the last record of a category. `expected` None: the job is removed."""
    if expected is None or all(item.category != category for item in expected.outputs):
        return CategoryEnd.RETIRED
    return CategoryEnd.STOPPED if expected.state == "stopped" else CategoryEnd.NEVER
