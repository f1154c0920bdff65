"""Submitted pipelines: parses the compiled form, and computes the changes of its jobs.

Pure: `JobService` reads and writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.core.errors import ConfigError, NeedsConsent, Refused
from penstock.jobs.config import NAME_PATTERN, JobConfig
from penstock.jobs.syncer.sync_plan import (
    ComplexSync,
    FieldChange,
    InSync,
    RunningView,
    SimpleSync,
    is_active,
    plan_sync,
)
from penstock.jobs.text_rules import shown

STATEFUL = "stateful"
# Fields that `state_conflict` compares.
STATE_CHECK_FIELDS = frozenset({"kind", "lineage", "partitions", "plan", "inputs"})
# Aggregates whose stored type does not follow from the type of their result.
_UNTYPED_FUNCTIONS = ("avg", "approx_count_distinct")


def state_conflict(old: JobConfig, new: JobConfig) -> str:
    """Why the state of the running config `old` cannot be used by `new`; "" if it can, or is reset."""
    if old.kind != STATEFUL or old.lineage != new.lineage:
        return ""
    if new.kind != STATEFUL:
        return f"it has state, and a job of kind {new.kind} has none"
    if old.partitions != new.partitions:
        return (
            f"its keys are distributed over {old.partitions} partitions, not {new.partitions}: "
            "most keys would not find their state"
        )
    before, after = old.computation, new.computation
    if "keys" in before and "keys" in after and before["keys"] != after["keys"]:
        return f"its state is stored by {_key_list(before['keys'])}, not by {_key_list(after['keys'])}"
    if _computation_kind(before) != _computation_kind(after):
        return f"its state is that of {_computation_kind(before)}, not of {_computation_kind(after)}"
    if before.get("operator") is not None:
        return _rows_conflict(old, new)
    find_conflict = _column_conflict if before.get("vectorised") else _value_conflict
    return _record_ids_conflict(before, after) or find_conflict(before.get("state"), after.get("state"))


def _rows_conflict(old: JobConfig, new: JobConfig) -> str:
    """For a built-in operator: everything that its rows depend on must be unchanged."""
    before, after = old.computation, new.computation
    running_state, new_state = _declared_state(before), _declared_state(after)
    for name in running_state:
        if name in new_state and running_state[name] != new_state[name]:
            return f"its {name} are {running_state[name]}, not {new_state[name]}"
    if running_state and running_state.keys() == new_state.keys():
        return ""
    # An older version compiled one of the two, and recorded less: then nothing relevant may have changed.
    differs = [name for name in sorted({*before, *after} - {"state"}) if before.get(name) != after.get(name)]
    # Partial results in its input belong to its state.
    is_second = before.get("operator") == "combine"
    if (is_second or _has_untyped_state(before)) and _records_path(old) != _records_path(new):
        differs.append("inputs or stages")
    if not differs:
        return ""
    return (
        "an older version compiled it and did not record all that its state depends on, and the new plan "
        f"differs in {', '.join(differs)}; submit it first without the change, and then with it"
    )


def _column_conflict(before: Any, after: Any) -> str:
    """For a computation over tables: a row stores its values in the declared order."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return ""
    if changed := _value_conflict(before, after):
        return changed
    if list(after)[: len(before)] == list(before):
        return ""
    return (
        f"its columns are stored in the order {_key_list(list(before))}, and {_key_list(list(after))} is "
        "another order: new columns can only be appended"
    )


def _value_conflict(before: Any, after: Any) -> str:
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return ""  # not recorded by an older version: checked when the state is read
    for name, kind in before.items():
        if name not in after:
            return f"it stores a value {name!r}, which the new code does not declare"
        if after[name] != kind:
            return f"its value {name!r} is {kind}, not {after[name]}"
    return ""


def _record_ids_conflict(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Ids of another column could be equal to stored ids by chance."""
    old, new = before.get("ids"), after.get("ids")
    if not isinstance(old, Mapping) or not isinstance(new, Mapping) or old.get("column") == new.get("column"):
        return ""
    return f"it stores record ids of column {old.get('column')!r}, not of {new.get('column')!r}"


def _declared_state(computation: Mapping[str, Any]) -> Mapping[str, Any]:
    found = computation.get("state")
    return found if isinstance(found, Mapping) else {}


def _has_untyped_state(computation: Mapping[str, Any]) -> bool:
    values = computation.get("columns")
    return isinstance(values, list | tuple) and any(
        isinstance(value, Mapping) and value.get("function") in _UNTYPED_FUNCTIONS for value in values
    )


def _records_path(config: JobConfig) -> Any:
    """What records pass before the operator."""
    return [item.category for item in config.inputs], config.plan.reads, config.plan.stages


def _key_list(keys: Any) -> str:
    return ", ".join(map(str, keys)) if isinstance(keys, list | tuple) and keys else "no key"


def _computation_kind(computation: Mapping[str, Any]) -> str:
    operator = computation.get("operator")
    if operator is not None:
        return f"the operator {operator!r}"
    return "a computation over tables" if computation.get("vectorised") else "a computation"


_BODY_FIELDS = frozenset(
    {"pipeline", "package", "jobs", "graph", "reset_state", "origin", "stops", "replaces"}
)
ORIGIN_MAX = 500
# Fields that identify the state of intervals: another value means another state.
STATE_FIELDS = ("kind", "lineage", "partitions")


SubmitAction = Literal["created", "updated", "unchanged", "reset", "stopped"]  # what was done to a job


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedPipeline:
    """A pipeline as posted by `penstock submit`: the provisioner layer of each job, and the graph."""

    name: str
    package: Mapping[str, Any]
    graph: Mapping[str, Any]
    jobs: Mapping[str, Mapping[str, Any]]
    reset_state: frozenset[str] = frozenset()  # jobs that start from empty state
    origin: str = ""  # path of the file that it was compiled from; "": not known
    stops: frozenset[str] = frozenset()  # jobs that the caller agrees to stop
    replaces: str = ""  # the origin that the caller agrees to replace

    def body_after(self, job: str, before: Mapping[str, Any], version: int) -> Mapping[str, Any]:
        """The new provisioner layer; it keeps the lineage of `before`, unless the state is reset.

        `version`: the job's expected version. It only grows, so a lineage is never used again, even after a
        rollback of the layer.
        """
        body = self.jobs[job]
        lineage = before.get("lineage", 0)
        if "lineage" in body or not isinstance(lineage, int):
            return body
        if job in self.reset_state:
            lineage = max(lineage + 1, version)
        return {**body, "lineage": lineage} if lineage else body


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChange:
    """What a submit would do to one job."""

    job: str
    change: str  # new | unchanged | simple | complex | removed
    changed: tuple[FieldChange, ...]
    restarts: tuple[str, ...]  # running tasks that would be stopped
    tasks_after: int
    state_kept: bool
    reason: str
    conflict: str = ""  # why a submit would be refused: its state cannot be used


def read_compiled(compiled: Mapping[str, Any]) -> SubmittedPipeline:
    """Parse and check the outer form; configs are validated when they are merged."""
    pipeline, jobs = compiled.get("pipeline"), compiled.get("jobs")
    if unknown := sorted(set(compiled) - _BODY_FIELDS):
        raise _refusal(f"there is no such field: {', '.join(map(shown, unknown[:5]))}")
    if not isinstance(pipeline, str) or not re.fullmatch(NAME_PATTERN, pipeline):
        raise _refusal(f"`pipeline` is {shown(pipeline)}, which is not a valid name")
    if not isinstance(jobs, list) or not jobs:
        raise _refusal("`jobs` is not a list with at least one job")
    package, graph = compiled.get("package"), compiled.get("graph", {})
    if not isinstance(package, Mapping) or not isinstance(graph, Mapping):
        raise _refusal("`package` or `graph` is not a map")
    bodies: dict[str, Mapping[str, Any]] = {}
    for number, body in enumerate(jobs):
        name = body.get("name") if isinstance(body, Mapping) else None
        if not isinstance(name, str) or not name.startswith(f"{pipeline}.") or name in bodies:
            raise _refusal(f"jobs[{number}] has no unique name that starts with {pipeline + '.'!r}")
        body = {"pipeline": pipeline, "package": dict(package), **body}
        if body["pipeline"] != pipeline:
            raise _refusal(f"job {shown(name)} has the pipeline {shown(body['pipeline'])}")
        bodies[name] = body
    origin, replaces = compiled.get("origin", ""), compiled.get("replaces", "")
    if not all(isinstance(text, str) and len(text) <= ORIGIN_MAX for text in (origin, replaces)):
        raise _refusal("`origin` or `replaces` is not a file name")
    return SubmittedPipeline(
        name=pipeline,
        package=package,
        graph=graph,
        jobs=bodies,
        reset_state=_reset(compiled, bodies),
        origin=origin,
        stops=_names(compiled, "stops"),
        replaces=replaces,
    )


def check_state_fits(changes: Mapping[str, tuple[JobConfig, JobConfig]]) -> None:
    """Refuse changes (running config, new config) that could not use the state of the job."""
    found = {job: state_conflict(old, new) for job, (old, new) in changes.items()}
    found = {job: conflict for job, conflict in found.items() if conflict}
    if found:
        raise state_refusal(found)


def state_refusal(conflicts: Mapping[str, str]) -> Refused:
    """The error for jobs whose state cannot be used; `conflicts`: the reason by job."""
    options = " ".join(f"--reset-state {job}" for job in conflicts)
    return Refused(
        f"the state of {', '.join(map(repr, conflicts))} cannot be kept",
        why="; ".join(f"{job}: {conflict}" for job, conflict in conflicts.items()),
        fix=f"do not change what the state depends on, rename the job, or use empty state: {options}",
    )


def cannot_run(job: str, body: Mapping[str, Any]) -> Refused | None:
    """The error for a job that can be planned but not run by this version; None if it can be run."""
    plan = body.get("plan")
    computation = plan.get("computation") if isinstance(plan, Mapping) else None
    if not isinstance(computation, Mapping) or computation.get("operator") is None:
        return None
    window = computation.get("window")
    is_session = isinstance(window, Mapping) and window.get("kind") == "session"
    if computation["operator"] != "join" or not is_session:
        return None
    return Refused(
        f"the job {job!r} cannot be run yet",
        why="it joins two streams in session windows, and only tumbling and sliding windows are supported",
        fix="use within=(before, after), or a tumbling or sliding window",
    )


def replaced_origin(pipeline: SubmittedPipeline, package: Mapping[str, Any] | None) -> str:
    """The other origin that a submit would replace, "" if none.

    `package`: of the last submit of this pipeline; None: there was none.
    """
    before = "" if package is None else str(package.get("origin", ""))
    return before if before and pipeline.origin and before != pipeline.origin else ""


def check_consent(pipeline: SubmittedPipeline, removed: Sequence[str], replaced: str) -> None:
    """NeedsConsent if a submit stops or replaces something that the caller did not name."""
    stops = [job for job in removed if job not in pipeline.stops]
    if stops or replaced not in ("", pipeline.replaces):
        raise NeedsConsent(pipeline.name, stops=list(removed), replaces=replaced, origin=pipeline.origin)


def action_taken(before: Mapping[str, Any], after: Mapping[str, Any]) -> SubmitAction:
    """What a write of the provisioner layer did: reset, unchanged or updated."""
    if after.get("lineage", 0) != before.get("lineage", 0):
        return "reset"
    return "unchanged" if dict(before) == dict(after) else "updated"


def plan_change(job: str, expected: JobConfig, running: RunningView | None) -> JobChange:
    """The change of a job when `expected` becomes its expected config."""
    sync = plan_sync(expected, running)
    tasks_after = expected.task_count if expected.state == "running" else 0
    before = expected if running is None else running.config
    has_state = not before.kind == expected.kind == "process"
    is_kept = not has_state or all(getattr(before, name) == getattr(expected, name) for name in STATE_FIELDS)
    changed: tuple[FieldChange, ...] = ()
    restarts: tuple[str, ...] = ()
    if running is None:
        kind = "new"
    elif isinstance(sync, InSync):
        kind = "unchanged"
    else:
        kind, changed = "simple" if isinstance(sync, SimpleSync) else "complex", sync.changed
        if isinstance(sync, ComplexSync) or sync.restarts:
            restarts = _tasks(job, running)
    conflict = "" if running is None else state_conflict(running.config, expected)
    return JobChange(
        job=job,
        change=kind,
        changed=changed,
        restarts=restarts,
        tasks_after=tasks_after,
        state_kept=is_kept and not conflict,
        reason=sync.reason,
        conflict=conflict,
    )


def plan_removal(job: str, running: RunningView | None) -> JobChange:
    """The change of a job that the pipeline no longer has: it stops, and keeps its state."""
    return JobChange(
        job=job,
        change="removed",
        changed=(),
        restarts=() if running is None else _tasks(job, running),
        tasks_after=0,
        state_kept=True,
        reason="the pipeline no longer has it: it is stopped",
    )


def _tasks(job: str, running: RunningView) -> tuple[str, ...]:
    return (
        tuple(f"{job}/{index}" for index in sorted(set(running.mapping))) if is_active(running.config) else ()
    )


def _reset(compiled: Mapping[str, Any], bodies: Mapping[str, Any]) -> frozenset[str]:
    wanted = _names(compiled, "reset_state")
    if unknown := sorted(wanted - bodies.keys()):
        raise ConfigError(
            f"the state of {shown(unknown[0])} cannot be reset",
            why=f"the pipeline has no such job; its jobs are {', '.join(sorted(bodies))}",
            fix="use the name of a job of the pipeline; `penstock plan` lists them",
        )
    return wanted


def _names(compiled: Mapping[str, Any], part: str) -> frozenset[str]:
    found = compiled.get(part, [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise _refusal(f"`{part}` is not a list of names")
    return frozenset(found)


def _refusal(why: str) -> ConfigError:
    return ConfigError(
        "the compiled pipeline is not valid", why=why, fix="compile it again with this version's client"
    )
