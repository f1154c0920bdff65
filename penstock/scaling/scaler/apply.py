"""From a decision to its config change, journal entry, alerts and record, within all limits. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from penstock.core.clock import Millis
from penstock.core.journal import Entry
from penstock.fleet.messages import TaskReport
from penstock.jobs.config import ISOLATED_MEMORY_MB_MIN
from penstock.jobs.tasks import PARTITION_TASKS
from penstock.scaling.metrics.frames import MINUTE_MS, Frame
from penstock.scaling.policies.policy import ChangeLayer, ControlSettings, RaiseAlert, Symptom, Verdict
from penstock.scaling.policies.round import (
    Candidate,
    FleetState,
    PolicyRecord,
    RoundDecision,
    RoundJob,
    decide_round,
)
from penstock.scaling.scaler.decide import record_applied
from penstock.scaling.scaler.observation import (
    KINDS,
    TINY,
    AvailableResources,
    Decision,
    Hold,
    JobShape,
    Observation,
    Rebalance,
    Remaining,
    Resize,
    ScalerJobFacts,
    ScalerMemory,
    ScalingAction,
    Step,
    TaskResources,
    Untriaged,
    mapping_of,
    parallel,
    to_data,
    with_mapping,
)
from penstock.scaling.scaler.observe import ClusterCapacity, ScalableJob, settings_of
from penstock.scaling.scaler.outcome import GAIN, SAME_INPUT
from penstock.scaling.scaler.pipeline import JobEdge
from penstock.scaling.scaler.plan_generator import change
from penstock.scaling.scaler.window import read_window, total

NAME = "scaler"
PRIORITY = 50  # below the straggler detector: more tasks do not help against a slow host
# Batches shorter than their trigger can still grow: below this busy time alone is no reason to scale up.
BUSY_FULL = 0.95
MORE_THAN_BUSY = 0.1
# Cpu and memory alone are reduced only after this time, since it restarts every task.
RESOURCES_AFTER_MIN = 60
# Bounds that follow a change which is journaled itself.
NOT_JOURNALED = frozenset({"plan", "settle"})
_NUMBERS = re.compile(r"[-+]?\d[\d.,e+\-]*%?")


def temper(decision: Decision, observation: Observation) -> Decision:
    """Correct a decision for what per-minute metrics cannot show: batches, and tasks that fail."""
    match decision:
        case Hold(bound="metrics"):
            return _failing(decision, observation)
        case Resize(direction="up"):
            return _before_lag(decision, observation)
        case Resize(direction="down"):
            return _resources_alone(decision, observation)
    return decision


def _failing(held: Hold, observation: Observation) -> Decision:
    """Tasks fail so often that their rates are not known: raise an alert, and do not scale."""
    frame, window_min = observation.frame, observation.settings.window_min
    if not isinstance(frame, Frame):
        return held
    age = observation.now_ms // frame.step_ms - (frame.first_minute + frame.minutes - 1)
    failures = total(frame.values, "restarts", window_min) + total(frame.values, "exceptions", window_min)
    if not failures > 0 or not 0 <= age <= observation.settings.stale_min:
        return held
    return Untriaged(
        reason=f"its tasks failed {failures:g} times in {window_min} min; {held.reason}",
        ruled_out=("out of memory",) if total(frame.values, "oom", window_min) <= 0 else (),
        inputs={"failures": failures},
    )


def _before_lag(decision: Resize, observation: Observation) -> Decision:
    """Hold a step up that only busy time asks for while there is no lag."""
    inputs, job = decision.inputs, observation.job
    lag_s, used, busy = inputs.get("lag_s", 0.0), inputs.get("used", 0.0), inputs.get("busy_mean", 0.0)
    fewest = job.limits.task_count_min
    grows = _slots(decision.shape, job) > _slots(job.shape, job)
    if not grows or lag_s > job.slo_lag_s or job.shape.task_count < fewest or inputs.get("oom", 0) > 0:
        return decision
    if busy < BUSY_FULL and used < busy + MORE_THAN_BUSY:
        return Hold(
            reason=f"{busy:.0%} busy without lag: its batches are still shorter than the trigger interval",
            bound="no lag",
            formula=decision.formula,
            inputs=inputs,
            learnt=decision.learnt,
        )
    last = observation.past[-1] if observation.past else None
    minutes = observation.now_ms // MINUTE_MS - last.at_minute if last is not None else None
    if last is not None and minutes is not None and 0 <= minutes < observation.settings.observe_min:
        return Hold(
            reason=f"{used:.0%} used without lag, and its last change was only {minutes} min ago",
            bound="no lag",
            formula=decision.formula,
            inputs=inputs,
            learnt=decision.learnt,
        )
    return decision


def unless_pending(decision: Step, observation: Observation, pending: ScalingAction | None) -> Decision:
    """Hold a step up while the last one is not judged yet and shows no gain."""
    job = observation.job
    if isinstance(decision, Rebalance):
        return _unless_just_changed(decision, observation, pending)
    window = read_window(observation)
    if (
        decision.direction != "up"
        or pending is None
        or pending.after != job.shape
        or isinstance(window, Hold)
    ):
        return decision
    minutes = observation.now_ms // MINUTE_MS - pending.at_minute
    wait_min = observation.settings.judge_after_min + observation.settings.settle_min
    if pending.is_rebalance and 0 <= minutes < wait_min and not window.lag_grows:
        return Hold(
            reason=f"{decision.reason}; but partitions were rebalanced {minutes} min ago, "
            "and the lag does not grow",
            bound="outcome",
            formula=decision.formula,
            inputs=decision.inputs,
            learnt=decision.learnt,
        )
    stepped = _slots(pending.after, job) > pending.parallel_before
    if not stepped or _slots(decision.shape, job) <= _slots(job.shape, job):
        return decision
    expected = pending.rate_expected - pending.rate_before
    gain = window.processed_rate - pending.rate_before
    more_input = window.input_rate > SAME_INPUT * pending.input_rate
    if expected <= 0 or gain >= observation.settings.effective_at * expected or more_input:
        return decision
    return Hold(
        reason=f"{decision.reason}; but {change(pending.before, pending.after)} shows no gain yet",
        bound="outcome",
        formula=GAIN,
        inputs={**decision.inputs, "gain": gain, "expected gain": expected},
        learnt=decision.learnt,
    )


def _unless_just_changed(
    decision: Rebalance, observation: Observation, pending: ScalingAction | None
) -> Decision:
    """Hold a rebalance while it is too early to judge the last change."""
    settings = observation.settings
    minutes = None if pending is None else observation.now_ms // MINUTE_MS - pending.at_minute
    wait_min = settings.judge_after_min + settings.settle_min
    if decision.direction == "undo" or minutes is None or not 0 <= minutes < wait_min:
        return decision
    return Hold(
        reason=f"{decision.reason}; but its last change was {minutes} min ago, too early to judge its effect",
        bound="outcome",
        formula=decision.formula,
        inputs=decision.inputs,
        learnt=decision.learnt,
    )


def _slots(shape: JobShape, job: ScalerJobFacts) -> float:
    return parallel(shape.task_count, shape.task.threads, job.partitions)


def _resources_alone(decision: Resize, observation: Observation) -> Decision:
    job = observation.job
    same = (decision.task_count, decision.task.threads) == (job.shape.task_count, job.shape.task.threads)
    minutes = observation.now_ms // MINUTE_MS - job.changed_minute
    if not same or minutes >= RESOURCES_AFTER_MIN:
        return decision
    return Hold(
        reason=f"less cpu or memory has been enough for {minutes} of the required {RESOURCES_AFTER_MIN} min",
        bound="resources alone",
        formula=decision.formula,
        inputs=decision.inputs,
        learnt=decision.learnt,
    )


# --- the config change


def fit(decision: Step, job: ScalableJob) -> JobShape:
    """The shape as it can be written: rounded, at least the minimum of isolation, oncall's fields kept."""
    now = job.shape
    if isinstance(decision, Rebalance):
        return now if PARTITION_TASKS in job.oncall else with_mapping(now, decision.mapping)
    shape = decision.shape
    memory_min = ISOLATED_MEMORY_MB_MIN if job.config.isolation == "process" else 1
    resources = {
        "cpu": round(shape.task.cpu, 4),
        "memory_mb": float(max(memory_min, ceil(shape.task.memory_mb))),
        "disk_mb": float(ceil(shape.task.disk_mb)),
        "network_mbps": round(shape.task.network_mbps, 4),
    }
    for kind in KINDS:
        if _is_set(f"resources.{kind}", job.oncall):
            resources[kind] = getattr(now.task, kind)
    threads = now.task.threads if "threads" in job.oncall else shape.task.threads
    # A mapping set by oncall also fixes the number of tasks.
    is_fixed = "task_count" in job.oncall or PARTITION_TASKS in job.oncall
    task_count = now.task_count if is_fixed else shape.task_count
    return JobShape(
        task_count=task_count,
        task=TaskResources(threads=threads, **resources),
        # With another number of tasks the mapping is even, unless an undo restores an old one.
        mapping=now.mapping if task_count == now.task_count else shape.mapping,
    )


def _is_set(path: str, oncall: frozenset[str]) -> bool:
    return any(path == own or path.startswith(f"{own}.") for own in oncall)


def changes_of(job: ScalableJob, after: JobShape) -> dict[str, Any]:
    """The scaler layer's changes for a shape: only fields that differ. None removes a field."""
    now, changes = job.shape, dict[str, Any]()
    if now.task_count != after.task_count:
        changes["task_count"] = after.task_count
    if now.task.threads != after.task.threads:
        changes["threads"] = after.task.threads
    resources = {
        kind: int(value) if kind in ("memory_mb", "disk_mb") else value
        for kind in KINDS
        if (value := getattr(after.task, kind)) != getattr(now.task, kind)
    }
    return changes | ({"resources": resources} if resources else {}) | _mapping_change(job, after)


def _mapping_change(job: ScalableJob, after: JobShape) -> dict[str, Any]:
    """The change of the partition mapping, which holds for one number of tasks only."""
    if (after.task_count, after.mapping) == (job.shape.task_count, job.shape.mapping):
        return {}
    if after.mapping is not None:
        return {PARTITION_TASKS: [*after.mapping]}
    if PARTITION_TASKS in job.layer:
        return {PARTITION_TASKS: None}
    if (
        after.task_count == job.shape.task_count
    ):  # another layer sets a mapping: write the even one explicitly
        return {PARTITION_TASKS: [*mapping_of(after, job.config.partitions)]}
    return {}


def one_decision(
    decision: Step,
    applied: JobShape,
    job: ScalableJob,
    record: PolicyRecord,
    fleet: FleetState,
    *,
    advice_only: bool,
    now_ms: Millis,
) -> RoundDecision:
    """Apply the rules of policy rounds, with the scaler as the only candidate.

    The scaler's own open action does not hold it: it judges its actions itself.
    """
    changes = changes_of(job, applied)
    text = change(job.shape, applied)
    why = decision.reason.removesuffix(text).rstrip(":; ")  # the action's text has the change
    bounds = f"; limited by {', '.join(decision.bounds)}" if decision.bounds else ""
    verdict = Verdict(
        policy=NAME,
        symptom=Symptom(name=decision.direction, text=f"{why}{bounds}"[:2000]),
        resolution=ChangeLayer(changes=changes, text=text),
    )
    settings = ControlSettings(
        advice_only=advice_only, cooldown_s=0, check_after_s=_check_after_s(decision, job.shape, applied)
    )
    rival = Candidate(verdict=verdict, priority=PRIORITY, settings=settings)
    round_job = RoundJob(
        name=job.name, config=job.config, layer=job.layer, is_settled=job.is_settled, oncall=job.oncall
    )
    return decide_round([rival], round_job, without_own(record), fleet, now_ms=now_ms)


def _check_after_s(decision: Step, before: JobShape, after: JobShape) -> float:
    grows = after.task_count * after.task.threads > before.task_count * before.task.threads
    is_soon = grows or isinstance(decision, Rebalance)
    return 0.0 if decision.direction == "undo" else 600.0 if is_soon else 3600.0


def without_own(record: PolicyRecord) -> PolicyRecord:
    """The record without the scaler's open action."""
    if record.open is None or record.open.policy != NAME:
        return record
    return with_part(record, open=None)


def with_part(record: PolicyRecord, **news: Any) -> PolicyRecord:
    """The record with some fields replaced."""
    return PolicyRecord(**({name: getattr(record, name) for name in PolicyRecord.__struct_fields__} | news))


def action_of(decision: Step, applied: JobShape, observation: Observation) -> ScalingAction:
    """The action to store. Without rates there is no expectation, and it is not judged."""
    action = record_applied(decision, applied, observation)
    if action is not None:
        return action
    job = observation.job
    return ScalingAction(
        at_minute=observation.now_ms // MINUTE_MS,
        before=job.shape,
        after=applied,
        input_rate=0.0,
        rate_before=0.0,
        rate_expected=0.0,
        parallel_before=_slots(job.shape, job),
        outcome="worked",
    )


# --- journal and alerts


def key_of(decision: Decision) -> str:
    """Identifies a decision by its reason without numbers, so that repeats are not journaled."""
    kind = type(decision).__name__.lower()
    bound = decision.bound if isinstance(decision, Hold) else ""
    words = _NUMBERS.sub("#", decision.reason.partition(" (")[0]) if bound in ("", "metrics") else bound
    return f"{kind} {words}"[:200]


def alerts_of(
    decision: Decision,
    memory: ScalerMemory,
    settings_remember_min: int,
    errors: Sequence[str],
    now_ms: Millis,
) -> tuple[RaiseAlert, ...]:
    """All alerts that hold now: levels, not events."""
    found = []
    if isinstance(decision, Untriaged):
        error = f": {errors[0]}" if errors else ""
        ruled_out = f"; ruled out: {', '.join(decision.ruled_out)}" if decision.ruled_out else ""
        found.append(
            RaiseAlert(
                key="not_scaled",
                text=f"{decision.reason}{error}{ruled_out}; the job is not scaled"[:2000],
                what_to_do="see its errors: penstock task ls JOB; find the cause: penstock doctor JOB",
                evidence=_evidence(decision.inputs),
            )
        )
    for action in reversed(memory.past):
        judged = action.judged_minute
        if action.outcome not in ("ineffective", "broke_slo") or judged is None:
            continue
        if 0 <= now_ms // MINUTE_MS - judged <= settings_remember_min:
            found.append(
                RaiseAlert(
                    key=f"action_{action.outcome}",
                    text=f"{change(action.before, action.after)}: "
                    + ("this did not help" if action.outcome == "ineffective" else "this broke the SLO")
                    + "; it was undone",
                )
            )
            break
    return tuple(found)


def _evidence(inputs: Mapping[str, float]) -> dict[str, float | int | str]:
    return {name: value for name, value in inputs.items() if abs(value) < 1e300}  # neither NaN nor infinite


ACTOR = "autoscaler"
_SCALED = ("task_count", "threads", "resources", "partition_tasks")


class RoundContext:
    """What all jobs of a round share: capacity left, fleet limits, task reports, the time."""

    def __init__(
        self,
        capacity: ClusterCapacity,
        fleet: FleetState,
        reports: Mapping[str, Sequence[TaskReport]],
        now_ms: Millis,
    ) -> None:
        self.capacity, self.fleet, self.reports, self.now_ms = capacity, fleet, reports, now_ms

    @property
    def remaining(self) -> Remaining:
        """What the jobs served before have left."""
        return Remaining(room=self.capacity.remaining, privileged_only=self.capacity.privileged_only)

    def short_of(self, job: ScalableJob, shape: JobShape) -> str:
        """The resource that is too scarce for a shape; "" if it fits."""
        for kind in KINDS:
            more = shape.total(kind) - job.shape.total(kind)
            if more > 0 and more > getattr(self.capacity.remaining, kind) + TINY:
                return kind
        return ""

    def spend(self, job: ScalableJob, shape: JobShape) -> None:
        """Deduct the resources of a shape that a job got."""
        left = {
            kind: getattr(self.capacity.remaining, kind) - max(0.0, shape.total(kind) - job.shape.total(kind))
            for kind in KINDS
        }
        self.capacity = replace(self.capacity, remaining=AvailableResources(**left))
        if (shape.task_count, shape.mapping) != (job.task_count, job.shape.mapping):
            self.fleet = replace(self.fleet, rescales_running=self.fleet.rescales_running + 1)


def resolve(
    job: ScalableJob, decision: Step, record: PolicyRecord, context: RoundContext
) -> tuple[Decision, JobShape | None, PolicyRecord]:
    """The decision and shape as they are applied, and the new record; or a Hold with the reason."""
    applied = fit(decision, job)
    if not changes_of(job, applied):
        theirs = ", ".join(sorted(path for path in job.oncall if path.partition(".")[0] in _SCALED))
        if not theirs:
            return (
                _held(decision, "but rounded to what can be written it changes nothing", "shape"),
                None,
                record,
            )
        return _held(decision, f"but the oncall layer sets {theirs}", f"oncall: {theirs}"), None, record
    if short := context.short_of(job, applied):
        return _held(decision, f"but not enough {short} is left", f"capacity: {short}"), None, record
    advice_only = job.config.scaler.advice_only
    outcome = one_decision(
        decision, applied, job, record, context.fleet, advice_only=advice_only, now_ms=context.now_ms
    )
    if outcome.apply is None:
        last = outcome.outcomes[-1]
        bound = f"{last.outcome}: {last.reason.rpartition(': ')[2]}"
        return _held(decision, f"{last.outcome}: {last.reason}", bound), None, record
    return replace(decision, reason=outcome.apply.reason), applied, outcome.record


def _held(decision: Step, why: str, bound: str) -> Hold:
    return Hold(
        reason=f"{decision.reason}; {why}",
        bound=bound,
        formula=decision.formula,
        inputs=decision.inputs,
        learnt=decision.learnt,
    )


def edges_of(jobs: Iterable[ScalableJob]) -> list[JobEdge]:
    """Edges between these jobs: one writes a category that the other reads."""
    members = [*jobs]
    writers: dict[str, list[str]] = {}
    for job in members:
        for output in job.config.outputs:
            writers.setdefault(output.category, []).append(job.name)
    return [
        JobEdge(above=above, below=job.name)
        for job in members
        for source in job.config.inputs
        for above in writers.get(source.category, ())
        if above != job.name
    ]


def entry_of(job: ScalableJob, decision: Decision, applied: JobShape | None, now_ms: Millis) -> Entry:
    """The journal entry of a decision: reason, formula, inputs, bounds."""
    data = to_data(decision) | {"generation": settings_of(job.config.scaler).generation}
    done = "nothing" if isinstance(decision, Hold) else type(decision).__name__.lower()
    if applied is not None and isinstance(decision, Resize | Rebalance):
        data["applied"] = applied.to_data()
        done = decision.direction
    return Entry(
        at_ms=now_ms,
        actor=ACTOR,
        kind="scale",
        subject=job.name,
        decision=done,
        reason=decision.reason,
        data=data,
    )
