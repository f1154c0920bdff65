"""From a decision to what is written, told and remembered of it, clamped. Pure."""

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
from penstock.jobs.tasks import FIELD
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
PRIORITY = 50  # below the straggler detector: more tasks do not mend a slow place
# Batches that end within their trigger can still become larger: busy time alone is no need below this.
BUSY_FULL = 0.95
MORE_THAN_BUSY = 0.1
# Cpu and memory alone are given back after so long: it restarts every task.
RESOURCES_AFTER_MIN = 60
# These follow a change that the journal has anyway.
NOT_JOURNALED = frozenset({"plan", "settle"})
_NUMBERS = re.compile(r"[-+]?\d[\d.,e+\-]*%?")


def temper(decision: Decision, observation: Observation) -> Decision:
    """What minutes alone cannot tell of tasks that work in batches, and of tasks that fail."""
    match decision:
        case Hold(bound="metrics"):
            return _failing(decision, observation)
        case Resize(direction="up"):
            return _before_lag(decision, observation)
        case Resize(direction="down"):
            return _resources_alone(decision, observation)
    return decision


def _failing(held: Hold, observation: Observation) -> Decision:
    """Tasks that fail so often that nothing is known of their rates: told, and never scaled."""
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
    """More before there is lag, where busy time is all there is to show for it."""
    inputs, job = decision.inputs, observation.job
    lag_s, used, busy = inputs.get("lag_s", 0.0), inputs.get("used", 0.0), inputs.get("busy_mean", 0.0)
    fewest = job.limits.task_count_min
    grows = _slots(decision.shape, job) > _slots(job.shape, job)
    if not grows or lag_s > job.slo_lag_s or job.shape.task_count < fewest or inputs.get("oom", 0) > 0:
        return decision
    if busy < BUSY_FULL and used < busy + MORE_THAN_BUSY:
        return Hold(
            reason=f"{busy:.0%} busy and without lag: its batches still fit between its triggers",
            bound="no lag",
            formula=decision.formula,
            inputs=inputs,
            learnt=decision.learnt,
        )
    last = observation.past[-1] if observation.past else None
    minutes = observation.now_ms // MINUTE_MS - last.at_minute if last is not None else None
    if last is not None and minutes is not None and 0 <= minutes < observation.settings.observe_min:
        return Hold(
            reason=f"{used:.0%} used, without lag; it was changed {minutes} min ago",
            bound="no lag",
            formula=decision.formula,
            inputs=inputs,
            learnt=decision.learnt,
        )
    return decision


def unless_watched(decision: Step, observation: Observation, pending: ScalingAction | None) -> Decision:
    """More, unless the last step up is still watched and shows no gain: first it must be seen to help."""
    job = observation.job
    if isinstance(decision, Rebalance):
        return _unless_dealt(decision, observation, pending)
    window = read_window(observation)
    if (
        decision.direction != "up"
        or pending is None
        or pending.after != job.shape
        or isinstance(window, Hold)
    ):
        return decision
    minutes = observation.now_ms // MINUTE_MS - pending.at_minute
    quiet_min = observation.settings.judge_after_min + observation.settings.settle_min
    if pending.is_rebalance and 0 <= minutes < quiet_min and not window.lag_grows:
        return Hold(
            reason=f"{decision.reason}; but partitions were dealt anew {minutes} min ago, "
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


def _unless_dealt(decision: Rebalance, observation: Observation, pending: ScalingAction | None) -> Decision:
    """Partitions dealt anew, unless the last change is too young to tell what came of it."""
    settings = observation.settings
    minutes = None if pending is None else observation.now_ms // MINUTE_MS - pending.at_minute
    quiet_min = settings.judge_after_min + settings.settle_min
    if decision.direction == "undo" or minutes is None or not 0 <= minutes < quiet_min:
        return decision
    return Hold(
        reason=f"{decision.reason}; but it was changed {minutes} min ago, what came of it shows later",
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
        reason=f"less cpu or memory was enough for {minutes} of {RESOURCES_AFTER_MIN} min",
        bound="resources alone",
        formula=decision.formula,
        inputs=decision.inputs,
        learnt=decision.learnt,
    )


# --- what is written


def fit(decision: Step, job: ScalableJob) -> JobShape:
    """A shape as it can be written: whole megabytes, at least what isolation needs, a person keeps theirs."""
    now = job.shape
    if isinstance(decision, Rebalance):
        return now if FIELD in job.oncall else with_mapping(now, decision.mapping)
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
    # Who said which task reads what said how many tasks there are.
    is_theirs = "task_count" in job.oncall or FIELD in job.oncall
    task_count = now.task_count if is_theirs else shape.task_count
    return JobShape(
        task_count=task_count,
        task=TaskResources(threads=threads, **resources),
        # Another number of tasks is dealt evenly, unless it is one that was there before.
        mapping=now.mapping if task_count == now.task_count else shape.mapping,
    )


def _is_set(path: str, oncall: frozenset[str]) -> bool:
    return any(path == own or path.startswith(f"{own}.") for own in oncall)


def changes_of(job: ScalableJob, after: JobShape) -> dict[str, Any]:
    """What the scaler layer must say for it: only what differs. None takes a field back."""
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
    return changes | ({"resources": resources} if resources else {}) | _deal_of(job, after)


def _deal_of(job: ScalableJob, after: JobShape) -> dict[str, Any]:
    """A deal is for one number of tasks: with another, the layer says nothing of it."""
    if (after.task_count, after.mapping) == (job.shape.task_count, job.shape.mapping):
        return {}
    if after.mapping is not None:
        return {FIELD: [*after.mapping]}
    if FIELD in job.layer:
        return {FIELD: None}
    if after.task_count == job.shape.task_count:  # another layer says it: the even deal, said aloud
        return {FIELD: [*mapping_of(after, job.config.partitions)]}
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
    """The rule that all policies share, with the scaler as the one that wants something.

    What it did before and still watches does not hold it: it judges its own actions.
    """
    changes = changes_of(job, applied)
    text = change(job.shape, applied)
    why = decision.reason.removesuffix(text).rstrip(":; ")  # the action says what changes
    bounds = f"; held by {', '.join(decision.bounds)}" if decision.bounds else ""
    verdict = Verdict(
        policy=NAME,
        symptom=Symptom(name=decision.direction, text=f"{why}{bounds}"[:2000]),
        resolution=ChangeLayer(changes=changes, text=text),
    )
    settings = ControlSettings(
        advice_only=advice_only, cooldown_s=0, check_after_s=_watched_s(decision, job.shape, applied)
    )
    rival = Candidate(verdict=verdict, priority=PRIORITY, settings=settings)
    round_job = RoundJob(
        name=job.name, config=job.config, layer=job.layer, is_settled=job.is_settled, oncall=job.oncall
    )
    return decide_round([rival], round_job, without_own(record), fleet, now_ms=now_ms)


def _watched_s(decision: Step, before: JobShape, after: JobShape) -> float:
    grows = after.task_count * after.task.threads > before.task_count * before.task.threads
    is_soon = grows or isinstance(decision, Rebalance)
    return 0.0 if decision.direction == "undo" else 600.0 if is_soon else 3600.0


def without_own(record: PolicyRecord) -> PolicyRecord:
    """The record as if the scaler watched nothing."""
    if record.open is None or record.open.policy != NAME:
        return record
    return with_part(record, open=None)


def with_part(record: PolicyRecord, **news: Any) -> PolicyRecord:
    """The record with other parts."""
    return PolicyRecord(**({name: getattr(record, name) for name in PolicyRecord.__struct_fields__} | news))


def action_of(decision: Step, applied: JobShape, observation: Observation) -> ScalingAction:
    """What to remember of it. Without rates nothing was expected, and nothing is judged."""
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


# --- what is told


def key_of(decision: Decision) -> str:
    """Tells one reason from another, whatever its numbers."""
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
    """All that somebody has to look at now: levels, not events."""
    found = []
    if isinstance(decision, Untriaged):
        said = f": {errors[0]}" if errors else ""
        ruled_out = f"; ruled out: {', '.join(decision.ruled_out)}" if decision.ruled_out else ""
        found.append(
            RaiseAlert(
                key="not_scaled",
                text=f"{decision.reason}{said}{ruled_out}; it is not scaled"[:2000],
                what_to_do="see its errors: penstock task ls JOB; what the doctor says: penstock doctor JOB",
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
                    + "; it was taken back",
                )
            )
            break
    return tuple(found)


def _evidence(inputs: Mapping[str, float]) -> dict[str, float | int | str]:
    return {name: value for name, value in inputs.items() if abs(value) < 1e300}  # neither NaN nor infinite


ACTOR = "autoscaler"
_SCALED = ("task_count", "threads", "resources", "partition_tasks")


class RoundContext:
    """What the jobs of one round have between them."""

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
        """What is left after those that were first."""
        return Remaining(room=self.capacity.remaining, privileged_only=self.capacity.privileged_only)

    def short_of(self, job: ScalableJob, shape: JobShape) -> str:
        """Of which resource too little is left for a shape; "": of none."""
        for kind in KINDS:
            more = shape.total(kind) - job.shape.total(kind)
            if more > 0 and more > getattr(self.capacity.remaining, kind) + TINY:
                return kind
        return ""

    def spend(self, job: ScalableJob, shape: JobShape) -> None:
        """A job got a shape."""
        left = {
            kind: getattr(self.capacity.remaining, kind) - max(0.0, shape.total(kind) - job.shape.total(kind))
            for kind in KINDS
        }
        self.capacity = replace(self.capacity, remaining=AvailableResources(**left))
        if (shape.task_count, shape.mapping) != (job.task_count, job.shape.mapping):
            self.fleet = replace(self.fleet, rescales_running=self.fleet.rescales_running + 1)


def resolve(
    job: ScalableJob, decision: Step, record: PolicyRecord, turn: RoundContext
) -> tuple[Decision, JobShape | None, PolicyRecord]:
    """The decision as it can be carried out now and the record of it, or why it is not."""
    applied = fit(decision, job)
    if not changes_of(job, applied):
        theirs = ", ".join(sorted(path for path in job.oncall if path.partition(".")[0] in _SCALED))
        if not theirs:
            return _held(decision, "but as it can be written it is so already", "shape"), None, record
        return _held(decision, f"but oncall set {theirs}", f"oncall: {theirs}"), None, record
    if short := turn.short_of(job, applied):
        return _held(decision, f"but not enough {short} is left", f"capacity: {short}"), None, record
    advice_only = job.config.scaler.advice_only
    outcome = one_decision(
        decision, applied, job, record, turn.fleet, advice_only=advice_only, now_ms=turn.now_ms
    )
    if outcome.apply is None:
        said = outcome.outcomes[-1]
        bound = f"{said.outcome}: {said.reason.rpartition(': ')[2]}"
        return _held(decision, f"{said.outcome}: {said.reason}", bound), None, record
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
    """Which of these jobs feeds which: one writes what the other reads."""
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
    """A decision for the journal: inputs, formula, bounds, reason."""
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
