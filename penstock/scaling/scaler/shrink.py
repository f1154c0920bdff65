"""Scaling down: when, and how far (Turbine V-B guarantee 1, V-C). Pure.

A job goes down only after a smaller shape has been enough for some time, to the largest need in that time,
never while a backlog drains or lag grows, and only if the saving is worth a restart.
"""

from __future__ import annotations

from math import floor, inf

import numpy as np

from penstock.scaling.metrics.frames import Frame, Points
from penstock.scaling.scaler.estimators import Needs, estimate_needs, fullest_minute, task_resources
from penstock.scaling.scaler.growth import fits, task_range, tasks_for_memory
from penstock.scaling.scaler.load import (
    FORMULA,
    Load,
    dearest_rate,
    inputs_of,
    rate_after_change,
    wanted_parallel,
)
from penstock.scaling.scaler.observation import (
    Decision,
    DecisionSettings,
    Hold,
    Inputs,
    JobShape,
    Observation,
    Resize,
    ScalerJobFacts,
    TaskResources,
    parallel,
    tasks_for,
    threads_for,
)
from penstock.scaling.scaler.outcome import down_that_broke
from penstock.scaling.scaler.window import LoadWindow, optional

DOWN_FORMULA = "max over the time of (X/target + (B + X*restart_s)/t) / P, at least 2*B/slo_lag_s / P"


def plan_down(
    observation: Observation,
    frame: Frame,
    window: LoadWindow,
    load: Load,
    *,
    input_floor: float = 0.0,
    key_floor: float = 0.0,
    dearest: float = inf,
) -> Decision:
    """A smaller shape, or why not. The floors are an input rate and a key count that it must carry as well.

    `dearest`: the lowest rate of a thread at a similar input, if the caller knows it.
    """
    job, settings = observation.job, observation.settings
    inputs = inputs_of(observation, window, load)
    # The need of the whole time is at least the current one: if that saves nothing, stop here.
    least = load.input_rate / (settings.target * load.thread_rate) if load.thread_rate > 0 else 0.0
    # In whole threads; `_size` rounds values that are slightly above a whole number.
    most = floor(job.shape.task_count * job.shape.task.threads * (1 - settings.saving_min))
    may_save = least <= most + 1e-6
    if may_save:
        may_save = _saves_threads(job, settings, *_size(observation, window, load, load.input_rate))
    if not may_save and not _may_save_resources(observation, frame):
        return Hold(reason=f"{load.used:.0%} used", bound="dead band", formula=FORMULA, inputs=inputs)
    held = _why_not_now(observation, window)
    if held is not None:
        return Hold(reason=held[0], bound=held[1], formula=FORMULA, inputs=inputs)
    past = _look_back(observation, frame, window)
    if isinstance(past, str):
        return Hold(
            reason=f"{load.used:.0%} used; {past}", bound="down_after_min", formula=FORMULA, inputs=inputs
        )
    input_max, needs, keys = max(past[0], input_floor), past[1], past[2]
    if keys > 0 and key_floor > keys:
        needs = needs._replace(memory_split_mb=needs.memory_split_mb * key_floor / keys)
    inputs = {**inputs, "X max": input_max, "minutes": settings.down_after_min}
    load, inputs = _at_its_dearest(observation, frame, load, inputs, dearest)
    tasks, threads = _size(observation, window, load, max(input_max, load.input_rate))
    for_memory = tasks_for_memory(needs, job, settings, tasks)
    if for_memory is None or for_memory > job.shape.task_count:
        for_memory = job.shape.task_count
    bounds = ("memory per task",) if for_memory > tasks else ()
    tasks = for_memory
    given = task_resources(needs, job, settings, task_count=tasks, threads=threads, may_shrink=True)
    shape = JobShape(task_count=tasks, task=given)
    if not _saves_threads(job, settings, tasks, threads):
        if not _saves_resources(job, settings, shape):
            return Hold(
                reason=f"{load.used:.0%} used; {input_max:.3g} records/s in {settings.down_after_min} min",
                bound="largest need of the time",
                formula=DOWN_FORMULA,
                inputs=inputs,
            )
        shape = JobShape(task_count=job.shape.task_count, task=_same_threads(observation, needs))
    return _checked(observation, window, load, shape, input_max, bounds, inputs)


def _at_its_dearest(
    observation: Observation, frame: Frame, load: Load, inputs: Inputs, dearest: float
) -> tuple[Load, Inputs]:
    """The load with the lowest P at a similar input, from these minutes or from the caller."""
    minutes = observation.settings.down_after_min
    tail = {name: points[-minutes:] for name, points in frame.values.items()}
    seen = dearest_rate(tail, observation.job, load, input_rate=inputs["X max"])
    rate = min(dearest, inf if seen is None else seen)
    if not rate < load.thread_rate:
        return load, inputs
    return load._replace(thread_rate=rate, capacity=rate * load.parallel), {**inputs, "P dearest": rate}


def _checked(
    observation: Observation,
    window: LoadWindow,
    load: Load,
    shape: JobShape,
    input_max: float,
    bounds: tuple[str, ...],
    inputs: Inputs,
) -> Decision:
    """Guarantee 1, checked on the final shape: it carries the largest input of the time."""
    job, settings = observation.job, observation.settings
    slots = parallel(shape.task_count, shape.task.threads, job.partitions)
    carries = load.thread_rate * slots
    if input_max > settings.up_at * carries:
        return Hold(
            reason=f"{shape.task_count} tasks would be {input_max / carries:.0%} used",
            bound="no healthy job made unhealthy",
            formula=DOWN_FORMULA,
            inputs=inputs,
        )
    if short := fits(job, shape, observation.remaining):
        return Hold(
            reason=f"fewer tasks would need more {short} each, and not enough is left",
            bound=f"capacity: {short}",
            formula=DOWN_FORMULA,
            inputs=inputs,
        )
    broke = down_that_broke(observation, window, slots)
    if broke is not None:
        return Hold(
            reason=f"{broke.after.task_count} tasks broke the SLO at {broke.input_rate:.3g} records/s",
            bound="remembered outcome",
            formula=DOWN_FORMULA,
            inputs=inputs,
        )
    now = job.shape
    what = (
        f"{now.task_count} -> {shape.task_count} tasks of {shape.task.threads} threads"
        if slots < load.parallel
        else f"{now.task.cpu:g} -> {shape.task.cpu:g} cores, "
        f"{now.task.memory_mb:g} -> {shape.task.memory_mb:g} MB each"
    )
    return Resize(
        shape=shape,
        direction="down",
        reason=f"{input_max:.3g} records/s at most for {settings.down_after_min} min, "
        f"one thread processes {load.thread_rate:.3g}: {what}",
        formula=DOWN_FORMULA,
        inputs={**inputs, "k*n after": slots},
        bounds=bounds,
        rate_expected=min(load.input_rate, carries),
    )


# --- how much


def _size(observation: Observation, window: LoadWindow, load: Load, input_rate: float) -> tuple[int, int]:
    """Tasks and threads for an input rate: fewer tasks first, then fewer threads; not more than now."""
    job = observation.job
    n, k, partitions = job.shape.task_count, job.shape.task.threads, job.partitions
    # A smaller job needs longer for the unread records: that must stay well within the SLO.
    backlog = window.lag_records
    rate = max(rate_after_change(observation, input_rate, backlog), 2 * backlog / job.slo_lag_s)
    wanted = wanted_parallel(rate, load)
    fewest, _ = task_range(job)
    tasks = tasks_for(wanted, threads=k, partitions=partitions) if wanted < 1e18 else None
    if tasks is None or tasks >= n:
        tasks = n
    tasks = max(tasks, fewest)
    threads = threads_for(wanted, task_count=tasks, partitions=partitions) if wanted < 1e18 else None
    return tasks, k if threads is None or threads > k else max(1, threads)


def _saves_threads(job: ScalerJobFacts, settings: DecisionSettings, tasks: int, threads: int) -> bool:
    now = job.shape.task_count * job.shape.task.threads
    return tasks * threads <= now * (1 - settings.saving_min)


def _may_save_resources(observation: Observation, frame: Frame) -> bool:
    """Whether cpu or memory was clearly unused in the newest minute."""
    job, settings = observation.job, observation.settings
    task = job.shape.task
    keep = (1 - settings.resource_saving_min) / settings.headroom
    memory = optional(frame.values, "memory_task_mb")
    cores = optional(frame.values, "cpu")
    return memory < task.memory_mb * keep or cores < job.shape.task_count * task.cpu * keep


def _saves_resources(job: ScalerJobFacts, settings: DecisionSettings, shape: JobShape) -> bool:
    keep = 1 - settings.resource_saving_min
    return any(0 < shape.total(kind) <= keep * job.shape.total(kind) for kind in ("cpu", "memory_mb"))


def _same_threads(observation: Observation, needs: Needs) -> TaskResources:
    job = observation.job
    return task_resources(
        needs,
        job,
        observation.settings,
        task_count=job.shape.task_count,
        threads=job.shape.task.threads,
        may_shrink=True,
    )


# --- when


def _why_not_now(observation: Observation, window: LoadWindow) -> tuple[str, str] | None:
    job = observation.job
    if window.oom > 0 or window.failures > 0:
        return "its tasks failed in the last minutes", "failures"
    if window.lag_grows:
        return f"the lag grows by {window.lag_growth:.3g} records/s", "lag grows"
    if window.lag_s > job.slo_lag_s / 2:
        return f"its lag of {window.lag_s:.0f} s must drain first", "draining"
    return None


def _look_back(
    observation: Observation, frame: Frame, window: LoadWindow
) -> tuple[float, Needs, float] | str:
    """The largest input of the time, the needs and keys then; or why these minutes cannot be used."""
    job, settings = observation.job, observation.settings
    minutes = settings.down_after_min
    settled = window.end_minute - 1 - job.changed_minute - settings.settle_min
    if settled < minutes or frame.minutes < minutes:
        return (
            f"a smaller shape has been enough for {min(settled, frame.minutes)} of the required {minutes} min"
        )
    tail = {name: points[-minutes:] for name, points in frame.values.items() if len(points) >= minutes}
    if not np.all(tail["task_count"] == job.shape.task_count):
        return f"the number of tasks changed within {minutes} min"
    ingest, lag_s, lag = tail["ingest_rate"], tail["lag_s"], tail["lag_records"]
    if not all(np.isfinite(points).all() and points.min() >= 0 for points in (ingest, lag_s, lag)):
        return f"metrics are missing within the last {minutes} min"
    if lag_s.max() > job.slo_lag_s / 2:
        return f"a backlog of {lag_s.max():.0f} s was drained within the last {minutes} min"
    if _largest(tail, "oom") > 0:
        return f"tasks ran out of memory within the last {minutes} min"
    input_max = float(_smoothed(ingest, min(settings.window_min, minutes)).max())
    if lag[-1] - lag[0] > 0.005 * 60 * minutes * input_max:
        return "the lag grew over the time"
    needs = estimate_needs(
        window, frame, job, observation.footprint, rate=max(input_max, window.processed_rate)
    )
    newest_memory, largest_memory = optional(frame.values, "memory_task_mb"), _largest(tail, "memory_task_mb")
    keys, keys_max = _keys_estimated(job, frame, window), _largest(tail, "key_count")
    state_growth = keys_max / keys if keys > 0 and keys_max > keys else 1.0
    needs = needs._replace(
        cores=max(needs.cores, _largest(tail, "cpu")) if needs.cores == needs.cores else needs.cores,
        memory_fixed_mb=needs.memory_fixed_mb + max(0.0, largest_memory - newest_memory)
        if newest_memory == newest_memory
        else needs.memory_fixed_mb,
        memory_split_mb=needs.memory_split_mb * state_growth,
    )
    return input_max, needs, max(keys, keys_max) if keys > 0 else 0.0


def _keys_estimated(job: ScalerJobFacts, frame: Frame, window: LoadWindow) -> float:
    """The key count that the memory estimate is based on; NaN or 0 if it uses none."""
    fullest = fullest_minute(frame, window.minutes) if job.state == "aggregation" else None
    return optional(frame.values, "key_count") if fullest is None else fullest[0]


def _largest(tail: dict[str, Points], name: str) -> float:
    points = tail.get(name)
    if points is None:
        return 0.0
    known = points[np.isfinite(points)]
    return float(known.max()) if len(known) else 0.0


def _smoothed(points: Points, width: int) -> Points:
    """Moving average over `width` minutes, as decisions use it."""
    sums = np.cumsum(np.concatenate(([0.0], points)))
    return np.asarray((sums[width:] - sums[:-width]) / width)
