"""One decision about one job, by the generation in its settings, from one observation. Pure.

`decide` never raises because of metrics. The history of 14 days is read only before a step down, so the
caller passes a function that reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, floor, inf

import numpy as np

from penstock.scaling.metrics.frames import Frame, NoFrame
from penstock.scaling.scaler.estimators import Needs, task_resources, vertical_limit
from penstock.scaling.scaler.growth import bound_of_tasks, fits, fitting_step, task_range, with_memory_floor
from penstock.scaling.scaler.load import (
    COST_MIN,
    STAGING_MIN,
    Load,
    adjust_rate,
    assess,
    bootstrap_rate,
    dearest_rate,
    inputs_of,
    is_imbalanced,
    known_thread_rate,
)
from penstock.scaling.scaler.observation import (
    Decision,
    Hold,
    Inputs,
    JobShape,
    Learnt,
    Observation,
    Rebalance,
    Resize,
    ScalingAction,
    Step,
    Untriaged,
    align,
)
from penstock.scaling.scaler.outcome import judge, record
from penstock.scaling.scaler.pattern import RECENT_MIN, History, analyse
from penstock.scaling.scaler.plan_generator import plan
from penstock.scaling.scaler.rebalance import plan_rebalance
from penstock.scaling.scaler.shrink import plan_down
from penstock.scaling.scaler.window import LoadWindow, optional, read_window, total

# Without estimates every reserved resource stays as it is.
NO_ESTIMATE = Needs(*[float("nan")] * 5)
TIME_LAGGED = "total lagged / processing rate"


def react(observation: Observation, frame: Frame, window: LoadWindow, load: Load) -> Decision:
    """Algorithm 2 for one job."""
    job, settings = observation.job, observation.settings
    inputs = {**inputs_of(observation, window, load), "time_lagged": window.time_lagged}
    # Equation 1 overstates the lag of a small input: the age of the oldest record must be over the SLO too.
    if window.time_lagged > job.slo_lag_s and load.is_lagging:
        lag = f"time_lagged {window.time_lagged:.0f} s over the SLO of {job.slo_lag_s:g} s"
        if is_imbalanced(window, settings.imbalance_at) and job.can_rebalance:
            rebalance = plan_rebalance(observation, window, f"{lag}, and its input is imbalanced", inputs)
            if isinstance(rebalance, Rebalance):
                return rebalance
        return _more_tasks(observation, inputs, lag)
    if window.oom > 0:
        return _more_memory(observation, window.oom, inputs)
    return _fewer(observation, frame, window, inputs)


def _more_tasks(observation: Observation, inputs: Inputs, lag: str) -> Decision:
    job, settings = observation.job, observation.settings
    n, k = job.shape.task_count, job.shape.task.threads
    _, most = task_range(job)
    tasks = min(most, max(n + 1, ceil(n * (1 + settings.reactive_step))))
    tasks = max(n, align(tasks, job.partitions))
    if tasks <= n < most:  # no number in between reduces the busiest task's partitions
        tasks = min(most, -(-job.partitions // max(1, -(-job.partitions // n) - 1)))
    if tasks <= n:
        return Hold(
            reason=f"{lag}, but the job is at its {bound_of_tasks(job)}",
            bound=bound_of_tasks(job),
            formula=TIME_LAGGED,
            inputs=inputs,
        )
    if observation.remaining.privileged_only and not job.is_privileged:
        return Hold(
            reason=f"{lag}, but capacity is short and privileged jobs come first",
            bound="capacity",
            formula=TIME_LAGGED,
            inputs=inputs,
        )
    shape, short = fitting_step(job, settings, NO_ESTIMATE, observation.remaining, tasks=tasks, threads=k)
    if shape is None:
        bound = f"capacity: {short}" if short else bound_of_tasks(job)
        return Hold(reason=f"{lag}, but limited by {bound}", bound=bound, formula=TIME_LAGGED, inputs=inputs)
    return Resize(
        shape=shape,
        direction="up",
        reason=f"{lag}: {n} -> {shape.task_count} tasks",
        formula=TIME_LAGGED,
        inputs=inputs,
        bounds=(f"capacity: {short}",) if short else (),
    )


def _more_memory(observation: Observation, oom: float, inputs: Inputs) -> Decision:
    job, settings = observation.job, observation.settings
    why = f"{oom:g} tasks ran out of memory"
    inputs = {**inputs, "oom": oom, "memory_mb reserved": job.shape.task.memory_mb}
    shape = with_memory_floor(job.shape, job, settings, job.shape.task.memory_mb * settings.oom_factor)
    if shape == job.shape:
        limit = vertical_limit(job.limits.container, settings).memory_mb
        return Untriaged(
            reason=f"{why}, and a task may not have more than {limit:.0f} MB",
            ruled_out=("more memory per task",),
            formula="reserved * oom_factor",
            inputs=inputs,
        )
    if short := fits(job, shape, observation.remaining):
        return Hold(
            reason=f"{why}, but not enough {short} is left", bound=f"capacity: {short}", inputs=inputs
        )
    return Resize(
        shape=shape,
        direction="up",
        reason=f"{why}: {job.shape.task.memory_mb:g} -> {shape.task.memory_mb:g} MB each",
        formula="reserved * oom_factor",
        inputs=inputs,
    )


def after_oom(observation: Observation, held: Hold) -> Decision:
    """More memory for tasks that run out of it so often that their rates have gaps: no rate is needed."""
    frame, job, settings = observation.frame, observation.job, observation.settings
    if held.bound != "metrics" or isinstance(frame, NoFrame):
        return held
    end_minute = frame.first_minute + frame.minutes
    age = observation.now_ms // frame.step_ms - (end_minute - 1)
    count = min(settings.window_min, end_minute - 1 - job.changed_minute, frame.minutes)
    fewest, most = task_range(job)
    is_same = optional(frame.values, "task_count") == job.shape.task_count
    if not 0 <= age <= settings.stale_min or count < 1 or not is_same:
        return held
    oom = total(frame.values, "oom", count)
    if oom <= 0 or not fewest <= job.shape.task_count <= most:
        return held
    return _more_memory(observation, oom, {"n": job.shape.task_count})


def _fewer(observation: Observation, frame: Frame, window: LoadWindow, inputs: Inputs) -> Decision:
    job, settings = observation.job, observation.settings
    n = job.shape.task_count
    fewest, most = task_range(job)
    if n <= fewest:
        return Hold(
            reason="within the SLO", bound=f"at least {fewest} tasks", formula=TIME_LAGGED, inputs=inputs
        )
    minutes = settings.reactive_quiet_min
    settled = window.end_minute - 1 - job.changed_minute - settings.settle_min
    if settled < minutes or frame.minutes < minutes:
        return Hold(
            reason=f"within the SLO for {min(settled, frame.minutes)} of {minutes} min",
            bound="reactive_quiet_min",
            formula=TIME_LAGGED,
            inputs=inputs,
        )
    if window.lag_grows:
        return Hold(reason="the lag grows", bound="lag grows", formula=TIME_LAGGED, inputs=inputs)
    lag_s = frame.values["lag_s"][-minutes:]
    oom = frame.values.get("oom")
    had_no_oom = oom is None or not np.nansum(oom[-minutes:]) > 0
    if not bool((lag_s <= job.slo_lag_s).all()) or not had_no_oom:  # NaN compares false
        return Hold(
            reason=f"lag, OOM or gaps within {minutes} min",
            bound="reactive_quiet_min",
            formula=TIME_LAGGED,
            inputs=inputs,
        )
    tasks = min(n - 1, floor(n * (1 - settings.saving_min)))
    tasks = min(most, max(fewest, align(tasks, job.partitions)))
    given = task_resources(
        NO_ESTIMATE, job, settings, task_count=tasks, threads=job.shape.task.threads, may_shrink=False
    )
    return Resize(
        shape=JobShape(task_count=tasks, task=given),
        direction="down",
        reason=f"no lag and no OOM for {minutes} min: {n} -> {tasks} tasks",
        formula=TIME_LAGGED,
        inputs=inputs,
    )


LookBack = Callable[[], History | NoFrame]


def decide(observation: Observation, look_back: LookBack | None = None) -> Decision:
    """The decision about a job now."""
    window = read_window(observation)
    frame = observation.frame
    if isinstance(window, Hold):
        return after_oom(observation, window)
    assert isinstance(frame, Frame)  # a window requires a frame
    load = assess(observation, window)
    generation = observation.settings.generation
    if generation == "reactive":
        return react(observation, frame, window, load)
    learnt, undo = judge(observation, window, load) if observation.past else (None, None)
    if undo is not None:
        return undo if generation == "preactive" else _without_rate(undo)
    if generation == "proactive":
        decision = plan(observation, frame, window, load)
    else:
        decision = _preactive(observation, frame, window, load, look_back)
    if learnt is None or learnt.judged is None:
        return decision
    rate = decision.learnt.thread_rate if decision.learnt.thread_rate is not None else learnt.thread_rate
    return replace(decision, learnt=replace(learnt, thread_rate=rate if generation == "preactive" else None))


def record_applied(decision: Step, applied: JobShape, observation: Observation) -> ScalingAction | None:
    """The action to store for a decision; `applied` is the shape after all limits."""
    window = read_window(observation)
    if isinstance(window, Hold):
        return None
    return record(decision, applied, observation, window, assess(observation, window))


def _without_rate(undo: Step) -> Step:
    return replace(undo, learnt=replace(undo.learnt, thread_rate=None))


def _preactive(
    observation: Observation, frame: Frame, window: LoadWindow, load: Load, look_back: LookBack | None
) -> Decision:
    """The plan, with P corrected, and smaller shapes checked against the history."""
    known = known_thread_rate(observation)
    if known is not None and not load.is_lagging and not window.lag_grows:
        adjusted = adjust_rate(
            p=known, x=window.processed_rate, slots=load.parallel, measured=load.measured_rate
        )
        if adjusted is not None:
            return Hold(
                reason=f"no lag at {window.processed_rate:.3g} records/s: one thread can do {adjusted:.3g}, "
                f"not {known:.3g}",
                bound="P adjusted",
                formula="n' = ceil(X/P) > n => P = X/n",
                inputs=inputs_of(observation, window, load),
                learnt=Learnt(thread_rate=adjusted),
            )
    decision = plan(observation, frame, window, load)
    if isinstance(decision, Resize) and decision.direction == "down":
        return _held_against_past(observation, frame, window, load, decision, look_back)
    if known is None and isinstance(decision, Hold) and not load.is_lagging:
        return _bootstrapped(observation, frame, window, decision)
    return decision


def _bootstrapped(observation: Observation, frame: Frame, window: LoadWindow, decision: Hold) -> Hold:
    """The staging period: the first P comes from enough minutes with one shape."""
    job, settings = observation.job, observation.settings
    begin = max(job.changed_minute, job.updated_minute if job.updated_minute is not None else 0)
    settled = window.end_minute - 1 - begin - settings.settle_min
    if settled < STAGING_MIN:
        return decision
    rate = bootstrap_rate(frame, job, minutes=settled)
    if rate is None:
        return decision
    return Hold(
        reason=decision.reason,
        bound=decision.bound,
        formula=decision.formula,
        inputs=decision.inputs,
        learnt=Learnt(thread_rate=rate),
    )


def _held_against_past(
    observation: Observation,
    frame: Frame,
    window: LoadWindow,
    load: Load,
    decision: Resize,
    look_back: LookBack | None,
) -> Decision:
    history = look_back() if look_back is not None else None
    if history is None or isinstance(history, NoFrame):
        why = "not available" if history is None else history.reason
        return replace(decision, bounds=(*decision.bounds, f"history off: {why}"))
    settings = observation.settings
    seen: dict[str, float] = {}
    dearest = dearest_rate(
        history.last_day, observation.job, load, input_rate=decision.inputs.get("X max", window.input_rate)
    )
    if dearest is not None:
        seen["P dearest"] = dearest
        again = plan_down(observation, frame, window, load, dearest=dearest)
        if not isinstance(again, Resize):
            return Hold(
                reason=f"{decision.task_count} tasks would be enough now, but within the last day one thread "
                f"processed only {dearest:.3g} records/s for {COST_MIN} min at a similar input rate",
                bound="cost",
                formula=decision.formula,
                inputs={**decision.inputs, **seen},
            )
        held = ("cost",) if again.shape != decision.shape else ()
        decision = replace(again, bounds=(*again.bounds, *held))
    pattern = analyse(
        history,
        frame.values["ingest_rate"][-RECENT_MIN:],
        end_minute=window.end_minute,
        settings=settings,
    )
    if pattern.off:
        return replace(decision, bounds=(*decision.bounds, f"history off: {pattern.off}"))
    # The shape must carry the expected peak of the next hours without a step up.
    again = plan_down(
        observation,
        frame,
        window,
        load,
        input_floor=pattern.input_peak * settings.target / settings.up_at,
        key_floor=pattern.key_peak,
        dearest=inf if dearest is None else dearest,
    )
    seen |= {
        "X peak ahead": pattern.input_peak,
        "days": float(pattern.days),
        "hours": settings.history_hours,
        "X usual": pattern.usual_rate,
    }
    if isinstance(again, Resize):
        bounds = tuple(dict.fromkeys((*decision.bounds, *again.bounds)))
        held = ("history",) if again.shape != decision.shape else ()
        return replace(again, bounds=(*bounds, *held), inputs={**again.inputs, **seen})
    return Hold(
        reason=f"{decision.task_count} tasks would be enough now, but not for the next "
        f"{settings.history_hours:g} h: on the {pattern.days} days before up to {pattern.input_peak:.3g} "
        "records/s arrived in these hours",
        bound="history",
        formula=decision.formula,
        inputs={**decision.inputs, **seen},
    )
