"""The reactive auto scaler: Algorithm 2, symptoms to actions without estimates (Turbine V-A). Pure.

Kept as the paper has it, so that the generations can be compared: it may take several steps, and it does not
know how much is too little. What every generation keeps holds here too: limits, I20, what is left.
"""

from __future__ import annotations

from math import ceil, floor

import numpy as np

from penstock.scaling.metrics.frames import Frame, NoFrame
from penstock.scaling.scaler.estimators import Needs, task_resources, vertical_limit
from penstock.scaling.scaler.growth import bound_of_tasks, fits, fitting_step, task_range, with_memory_floor
from penstock.scaling.scaler.load import Load, inputs_of, is_imbalanced
from penstock.scaling.scaler.observation import (
    Decision,
    Hold,
    Inputs,
    Observation,
    Rebalance,
    Resize,
    Shape,
    Untriaged,
    align,
)
from penstock.scaling.scaler.rebalance import plan_rebalance
from penstock.scaling.scaler.window import Window, optional, total

# Without estimates every resource stays as it is reserved.
NO_ESTIMATE = Needs(*[float("nan")] * 5)
TIME_LAGGED = "total lagged / processing rate"


def react(observation: Observation, frame: Frame, window: Window, load: Load) -> Decision:
    """Algorithm 2 for one job."""
    job, settings = observation.job, observation.settings
    inputs = {**inputs_of(observation, window, load), "time_lagged": window.time_lagged}
    # The bus knows how long the oldest record has waited: a trickle lags by equation 1 alone, and is in time.
    if window.time_lagged > job.slo_lag_s and load.is_lagging:
        lag = f"time_lagged {window.time_lagged:.0f} s over the SLO of {job.slo_lag_s:g} s"
        if is_imbalanced(window, settings.imbalance_at) and job.can_rebalance:
            dealt = plan_rebalance(observation, window, f"{lag}, and its input is imbalanced", inputs)
            if isinstance(dealt, Rebalance):
                return dealt
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
    if tasks <= n < most:  # no number in between makes the busiest task's part smaller
        tasks = min(most, -(-job.partitions // max(1, -(-job.partitions // n) - 1)))
    if tasks <= n:
        return Hold(
            reason=f"{lag}, but {bound_of_tasks(job)} is all there is",
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
        return Hold(reason=f"{lag}, but {bound} holds it", bound=bound, formula=TIME_LAGGED, inputs=inputs)
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
    why = f"{oom:g} tasks ended above their memory"
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
    """More memory for tasks that end above theirs so often that their rates have gaps: it needs no rate."""
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


def _fewer(observation: Observation, frame: Frame, window: Window, inputs: Inputs) -> Decision:
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
    quiet_of_oom = oom is None or not np.nansum(oom[-minutes:]) > 0
    if not bool((lag_s <= job.slo_lag_s).all()) or not quiet_of_oom:  # NaN is not known to be quiet
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
        shape=Shape(task_count=tasks, task=given),
        direction="down",
        reason=f"no lag and no OOM for {minutes} min: {n} -> {tasks} tasks",
        formula=TIME_LAGGED,
        inputs=inputs,
    )
