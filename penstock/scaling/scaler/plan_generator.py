"""The plan generator: one decision from symptoms and estimates (Turbine V-B, V-D, V-E). Pure.

Three guarantees: a plan makes no healthy job unhealthy; a problem of unknown cause does not scale the job;
all resources are adjusted together. Steps up are immediate, vertical first; steps down are in `shrink.py`.
"""

from __future__ import annotations

from math import inf

from penstock.jobs.tasks import describe_moves
from penstock.scaling.metrics.frames import Frame
from penstock.scaling.scaler.estimators import estimate_needs, task_resources
from penstock.scaling.scaler.growth import (
    bound_of_tasks,
    fits,
    fitting_step,
    grown,
    task_range,
    tasks_for_memory,
    with_memory_floor,
)
from penstock.scaling.scaler.load import (
    FORMULA,
    SATURATED,
    Load,
    inputs_of,
    is_imbalanced,
    rate_after_change,
    useful_part,
    wanted_parallel,
)
from penstock.scaling.scaler.observation import (
    Decision,
    Hold,
    JobShape,
    Observation,
    Rebalance,
    Resize,
    Untriaged,
    align,
    mapping_of,
    parallel,
    share_of_busiest,
)
from penstock.scaling.scaler.outcome import ups_that_did_not_help
from penstock.scaling.scaler.rebalance import plan_rebalance
from penstock.scaling.scaler.shrink import plan_down
from penstock.scaling.scaler.window import LoadWindow, optional

NOTHING = "nothing is processed although records wait"
# A job that lags after an update gets at least this factor at once, which mostly helps (V-D).
UPDATE_STEP = 1.5
UP_FORMULA = "(X/target + (B + X*restart_s)/t) / P, at least (X + (B + X*restart_s)/t) / (up_at*P)"


def plan(observation: Observation, frame: Frame, window: LoadWindow, load: Load) -> Decision:
    """The decision about a job from its last minutes."""
    job = observation.job
    fewest, most = task_range(job)
    n = job.shape.task_count
    if n > most:
        return _into_limits(observation, frame, window, load, max(fewest, align(most, job.partitions)))
    if n < fewest:
        needed = _by_symptoms(observation, frame, window, load)
        if isinstance(needed, Resize) and needed.direction == "up" and needed.task_count >= fewest:
            return needed  # in one step: going to the minimum first would be another restart
        return _into_limits(observation, frame, window, load, fewest)
    return _by_symptoms(observation, frame, window, load)


def _by_symptoms(observation: Observation, frame: Frame, window: LoadWindow, load: Load) -> Decision:
    settings = observation.settings
    if load.is_lagging:
        return _lagging(observation, frame, window, load)
    if window.oom > 0:
        return _more_memory(observation, frame, window, load)
    if load.used > settings.up_at:
        if window.is_stuck:
            return Hold(
                reason=f"{NOTHING}: more tasks would wait as well",
                bound="nothing processed",
                formula=FORMULA,
                inputs=inputs_of(observation, window, load),
            )
        if load.is_at_least:
            return Hold(
                reason=f"{window.busy_mean:.0%} busy, and it keeps up: its lag is {window.lag_s:.0f} s and "
                f"does not grow; one thread processes at least {load.thread_rate:.3g} records/s",
                bound="keeps up",
                formula=FORMULA,
                inputs=inputs_of(observation, window, load),
            )
        if not window.is_filling and _used_on_average(window, load) <= settings.up_at:
            return Hold(
                reason=f"{load.used:.0%} used by the newest minutes' input, "
                f"{_used_on_average(window, load):.0%} by the mean of {window.minutes} min, and it keeps up",
                bound="no lag",
                formula=FORMULA,
                inputs=inputs_of(observation, window, load),
            )
        if is_imbalanced(window, settings.imbalance_at) and window.busy_mean <= settings.up_at:
            return Hold(
                reason=f"{load.used:.0%} used, but only few tasks are busy: "
                f"{window.busy_mean:.0%} on average, the busiest {window.busy:.0%}",
                bound="imbalance",
                formula=FORMULA,
                inputs={**inputs_of(observation, window, load), "lag_spread": window.lag_spread},
            )
        return _up(observation, frame, window, load, why=f"{load.used:.0%} used")
    if _is_near_limit(observation, frame):
        return _more_memory(observation, frame, window, load)
    return plan_down(observation, frame, window, load)


def _used_on_average(window: LoadWindow, load: Load) -> float:
    """The used share by the mean input of all minutes: the newest ones may be noise."""
    more = max(0.0, window.input_rate - window.input_mean) if load.input_rate <= window.input_rate else 0.0
    return load.used - more / load.capacity if load.capacity > 0 else load.used


def _into_limits(
    observation: Observation, frame: Frame, window: LoadWindow, load: Load, tasks: int
) -> Decision:
    job, settings = observation.job, observation.settings
    fewest, most = task_range(job)
    n = job.shape.task_count
    needs = estimate_needs(window, frame, job, observation.footprint, rate=load.input_rate)
    given = task_resources(
        needs, job, settings, task_count=tasks, threads=job.shape.task.threads, may_shrink=False
    )
    shape = JobShape(task_count=tasks, task=given)
    inputs = inputs_of(observation, window, load)
    if tasks > n and (short := fits(job, shape, observation.remaining)):
        return Hold(
            reason=f"below its minimum of {fewest} tasks, but not enough {short} is left",
            bound=short,
            inputs=inputs,
        )
    return Resize(
        shape=shape,
        direction="up" if tasks > n else "down",
        reason=f"{n} tasks are outside the limits of {fewest} to {most}",
        formula="limits",
        inputs=inputs,
        bounds=(bound_of_tasks(job),),
        rate_expected=min(load.input_rate, load.thread_rate * parallel(tasks, given.threads, job.partitions)),
    )


# --- symptoms


def _lagging(observation: Observation, frame: Frame, window: LoadWindow, load: Load) -> Decision:
    """Lag over the SLO: find the cause first (V-D). Only too few resources without skew mean a step up."""
    job, settings = observation.job, observation.settings
    inputs = inputs_of(observation, window, load)
    lag = f"lag {window.lag_s:.0f} s over the SLO of {job.slo_lag_s:g} s"
    if window.failures > 0 and window.oom <= 0:
        return Untriaged(
            reason=f"{lag}: its tasks failed {window.failures:g} times in {window.minutes} min",
            ruled_out=("out of memory",),
            formula=FORMULA,
            inputs=inputs,
        )
    if window.is_stuck:
        if window.oom > 0:
            return _more_memory(observation, frame, window, load)
        return Untriaged(
            reason=f"{lag}: {NOTHING}. It waits for something, or one batch takes longer than a minute",
            ruled_out=("out of memory", "failing tasks"),
            formula=FORMULA,
            inputs=inputs,
        )
    if is_imbalanced(window, settings.imbalance_at):
        rebalance = plan_rebalance(observation, window, _uneven(window, lag), inputs)
        if isinstance(rebalance, Rebalance):
            return rebalance
        # P is a mean over all tasks: if most are idle, one hot task makes all look slow.
        if min(load.used, window.busy_mean) <= settings.up_at and window.oom <= 0:
            enough = f"too few resources: tasks are {window.busy_mean:.0%} busy on average"
            return Untriaged(
                reason=f"{lag}, caused by few tasks with skewed input, which more tasks would not help",
                ruled_out=(enough, rebalance),
                formula=FORMULA,
                inputs={**inputs, "lag_spread": window.lag_spread, "busy": window.busy},
            )
    if load.used > settings.up_at:
        drained_s = _drained_s(window, load)
        if drained_s <= job.restart_s:
            return Hold(
                reason=f"{lag}, but it drains in {drained_s:.0f} s; a restart takes {job.restart_s:.0f} s",
                bound="restart cost",
                formula="B / (P*k*n - X)",
                inputs=inputs,
            )
        return _up(observation, frame, window, load, why=lag)
    if window.oom > 0:
        return _more_memory(observation, frame, window, load)
    return _enough_but_lagging(observation, frame, window, load, lag)


def _uneven(window: LoadWindow, lag: str) -> str:
    return (
        f"{lag}: its tasks' lag differs by {window.lag_spread:.0%}, "
        f"the busiest is {window.busy:.0%} busy of {window.busy_mean:.0%} on average"
    )


def _enough_but_lagging(
    observation: Observation, frame: Frame, window: LoadWindow, load: Load, lag: str
) -> Decision:
    inputs = inputs_of(observation, window, load)
    t = observation.settings.recovery_s
    falls = -min(window.lag_growth, window.lag_step)
    if falls > 0 and window.lag_records <= falls * t:
        return Hold(
            reason=f"{lag}, and it drains in {window.lag_records / falls:.0f} s",
            bound="draining",
            formula=FORMULA,
            inputs=inputs,
        )
    if window.lag_s_min <= observation.job.slo_lag_s:
        return Hold(
            reason=f"{lag}, for less than {window.minutes} min and with enough resources: it should drain",
            bound="window_min",
            formula=FORMULA,
            inputs=inputs,
        )
    if load.is_updated and window.processed_rate > 0:
        return _up(observation, frame, window, load, why=f"{lag} since an update", after_update=True)
    ruled_out = [_enough(load)]
    if window.lag_spread == window.lag_spread or window.busy == window.busy:
        ruled_out.append("imbalanced input")
    ruled_out += ["out of memory", "failing tasks", "a recent update"]
    measured = load.measured_rate
    if measured is not None and measured < observation.settings.slower_at * load.thread_rate:
        cause = (
            f"a thread processes {measured / load.thread_rate:.0%} of its former rate: "
            "a dependency, a host or a bug"
        )
    elif window.busy_mean >= SATURATED:
        cause = "its threads are always busy, and the lag does not fall"
    else:
        cause = f"its threads are only {window.busy_mean:.0%} busy: it waits for something"
    return Untriaged(reason=f"{lag}, but {cause}", ruled_out=tuple(ruled_out), formula=FORMULA, inputs=inputs)


def _enough(load: Load) -> str:
    return f"too few resources: {load.used:.0%} used"


def _drained_s(window: LoadWindow, load: Load) -> float:
    spare = load.capacity - load.input_rate
    return window.lag_records / spare if spare > 0 else inf


# --- more


def _up(
    observation: Observation,
    frame: Frame,
    window: LoadWindow,
    load: Load,
    *,
    why: str,
    after_update: bool = False,
) -> Decision:
    job, settings = observation.job, observation.settings
    inputs = inputs_of(observation, window, load)
    rate = useful_part(observation, rate_after_change(observation, load.input_rate, window.lag_records))
    wanted = wanted_parallel(rate, load)
    if load.is_updated and load.is_lagging:
        wanted = max(wanted, load.parallel * UPDATE_STEP)
    tasks, threads, bounds = grown(job, settings, wanted)
    if parallel(tasks, threads, job.partitions) <= load.parallel:
        held = bounds or ((f"{observation.demand.bottleneck} below",) if observation.demand else ("shape",))
        return Hold(
            reason=f"{why}, but the job is at its limit: {', '.join(held)}",
            bound=held[-1],
            formula=UP_FORMULA,
            inputs=inputs,
        )
    if observation.remaining.privileged_only and not job.is_privileged:
        return Hold(
            reason=f"{why}, but capacity is short and privileged jobs come first",
            bound="capacity",
            formula=UP_FORMULA,
            inputs=inputs,
        )
    tried = ups_that_did_not_help(observation, window)
    if tried is not None and parallel(tasks, threads, job.partitions) >= tried.parallel_before:
        return Untriaged(
            reason=f"{why}, but {tried.after.task_count} tasks of {tried.after.task.threads} threads "
            "were tried and did not help",
            ruled_out=("more resources",),
            formula=UP_FORMULA,
            inputs=inputs,
        )
    needs = estimate_needs(window, frame, job, observation.footprint, rate=load.input_rate)
    for_memory = tasks_for_memory(needs, job, settings, tasks)
    if for_memory is not None and for_memory > tasks:
        tasks, bounds = for_memory, (*bounds, "memory per task")
    floor_mb = job.shape.task.memory_mb * settings.oom_factor if window.oom > 0 else 0.0
    shape, short = fitting_step(
        job, settings, needs, observation.remaining, tasks=tasks, threads=threads, memory_floor_mb=floor_mb
    )
    if shape is None:
        return Hold(
            reason=f"{why}, but not enough {short} is left for any step up",
            bound=f"capacity: {short}",
            formula=UP_FORMULA,
            inputs=inputs,
        )
    if short:
        bounds = (*bounds, f"capacity: {short}")
    limit = load.thread_rate * parallel(shape.task_count, shape.task.threads, job.partitions)
    how = " after an update" if after_update else ""
    return Resize(
        shape=shape,
        direction="up",
        reason=f"{why}: needs {rate:.3g} records/s{how}, one thread processes {load.thread_rate:.3g}; "
        + change(job.shape, shape),
        formula=UP_FORMULA,
        inputs={**inputs, "wanted k*n": wanted, "target": settings.target},
        bounds=bounds,
        rate_expected=min(limit, load.input_rate + window.lag_records / settings.recovery_s),
    )


def _is_near_limit(observation: Observation, frame: Frame) -> bool:
    """Whether a task uses nearly all of the memory or disk it may use."""
    task, soft = observation.job.shape.task, observation.settings.memory_soft
    if optional(frame.values, "memory_task_mb") > soft * task.memory_mb:
        return True
    return task.disk_mb > 0 and _disk_of_busiest(observation, frame) > soft * task.disk_mb


def _disk_of_busiest(observation: Observation, frame: Frame) -> float:
    job = observation.job
    return optional(frame.values, "disk_mb") * share_of_busiest(job.shape.task_count, job.partitions)


def _more_memory(observation: Observation, frame: Frame, window: LoadWindow, load: Load) -> Decision:
    """More memory or disk per task; at the size limit of a task more tasks, if state is split."""
    job, settings = observation.job, observation.settings
    inputs = {
        **inputs_of(observation, window, load),
        "oom": window.oom,
        "memory_task_mb": optional(frame.values, "memory_task_mb"),
        "memory_mb reserved": job.shape.task.memory_mb,
    }
    killed = window.oom > 0
    why = f"{window.oom:g} tasks ran out of memory" if killed else "memory or disk is nearly full"
    needs = estimate_needs(window, frame, job, observation.footprint, rate=load.input_rate)
    n, k = job.shape.task_count, job.shape.task.threads
    factor = settings.oom_factor if killed else 1.0
    needs = needs._replace(memory_split_mb=needs.memory_split_mb * factor)
    tasks = tasks_for_memory(needs, job, settings, n)
    given = task_resources(needs, job, settings, task_count=tasks or n, threads=k, may_shrink=False)
    shape = JobShape(task_count=tasks or n, task=given)
    if killed and shape.task_count == n:
        shape = with_memory_floor(shape, job, settings, job.shape.task.memory_mb * factor)
    if shape.task_count == n and _is_no_larger(shape, job.shape):
        return Untriaged(
            reason=f"{why}, and a task may not be larger than "
            f"{settings.vertical_share:.0%} of a container ({job.shape.task.memory_mb:.0f} MB each now)",
            ruled_out=("more memory per task", "less state per task by more tasks"),
            formula="(fixed + state*share) * headroom",
            inputs=inputs,
        )
    if short := fits(job, shape, observation.remaining):
        return Hold(
            reason=f"{why}, but not enough {short} is left",
            bound=f"capacity: {short}",
            formula="(fixed + state*share) * headroom",
            inputs=inputs,
        )
    return Resize(
        shape=shape,
        direction="up",
        reason=f"{why}: " + change(job.shape, shape),
        formula="reserved * oom_factor" if killed else "(fixed + state*share) * headroom",
        inputs=inputs,
        bounds=("vertical limit",) if shape.task_count > n else (),
        rate_expected=min(load.input_rate, load.capacity),
    )


def _is_no_larger(shape: JobShape, than: JobShape) -> bool:
    return shape.task.memory_mb <= than.task.memory_mb and shape.task.disk_mb <= than.task.disk_mb


def change(before: JobShape, after: JobShape) -> str:
    """The difference of two shapes as text."""
    parts = []
    if before.task_count != after.task_count:
        parts.append(f"{before.task_count} -> {after.task_count} tasks")
    for name, unit in (
        ("threads", "threads"),
        ("cpu", "cores"),
        ("memory_mb", "MB"),
        ("disk_mb", "MB of disk"),
    ):
        old, new = getattr(before.task, name), getattr(after.task, name)
        if old != new:
            parts.append(f"{old:g} -> {new:g} {unit} each")
    if before.task_count == after.task_count and before.mapping != after.mapping:
        partitions = len(before.mapping or after.mapping or ())
        parts.append(describe_moves(mapping_of(before, partitions), mapping_of(after, partitions)))
    return ", ".join(parts) or "the same shape"
