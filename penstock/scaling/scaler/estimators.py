"""Resource estimators: what cpu, memory, disk and network a job needs at an input rate (Turbine V-B). Pure.

Cpu by equations 2 and 3. State that is split over the tasks shrinks per task when there are more of them: by
key count for aggregations, as of the minute with most of them, for windows that close take theirs along; by
window, degree of matching and disorder for joins (below).
"""

from __future__ import annotations

from math import ceil, inf, isfinite, nan
from typing import NamedTuple

from penstock.core.clock import Millis
from penstock.jobs.config import JobConfig
from penstock.scaling.metrics.frames import Frame
from penstock.scaling.scaler.observation import (
    AvailableResources,
    DecisionSettings,
    Footprint,
    JobShape,
    JoinFacts,
    ScalerJobFacts,
    TaskResources,
    at_work,
    parallel,
    share_of_busiest,
)
from penstock.scaling.scaler.window import LoadWindow, optional

MB = 2**20


class JoinNeeds(NamedTuple):
    """What it will keep, and what pairs will take beyond what they take now."""

    state_mb: float
    pairs_mb: float  # of each task


def join_facts(config: JobConfig, created_ms: Millis) -> JoinFacts | None:
    """From a job's plan; None: it is no join, or says no window."""
    plan = config.computation
    if plan.get("operator") != "join":
        return None
    near, window = plan.get("within") or {}, plan.get("window") or {}
    waits_ms = [near.get("before_ms", 0), near.get("after_ms", 0), window.get("size_ms", 0)]
    if not max(waits_ms) > 0:
        return None
    return JoinFacts(
        window_s=max(waits_ms) / 1000,
        created_ms=created_ms,
        batch_rows_max=config.batch_rows_max,
        trigger_s=max(config.trigger_ms, 1000) / 1000,
    )


def join_state_mb(input_rate: float, kept_s: float, record_bytes: float) -> float:
    """Proportional to what comes while a record is kept: its window, and for as long as the low is behind."""
    return input_rate * kept_s * record_bytes / MB


def join_pairs_mb(rows: float, match_degree: float, record_bytes: float) -> float:
    """The pairs that one batch makes: they are in memory together, and each has two records."""
    return rows * match_degree * 2 * record_bytes / MB


def estimate_join(
    window: LoadWindow, frame: Frame, join: JoinFacts, *, tasks: int, rate: float
) -> JoinNeeds | None:
    """What it needs at `rate` records per second; None: what it keeps cannot be told apart by records."""
    state_bytes = optional(frame.values, "state_bytes")
    kept_s = join.window_s + disorder_s(frame, window)
    records = records_kept(frame, join, kept_s, lag_s=window.lag_s)
    if records is None or not records > 0 or not state_bytes > 0:
        return None
    record_bytes = state_bytes / records
    state_mb = max(state_bytes / MB, join_state_mb(rate, kept_s, record_bytes))
    match_degree = (
        optional(frame.values, "output_rate") / window.processed_rate if window.processed_rate > 0 else 0.0
    )
    if not match_degree > 0:
        return JoinNeeds(state_mb, 0.0)
    # A record meets more partners when more are kept.
    fuller = max(1.0, rate * kept_s / records)
    rows = min(float(join.batch_rows_max), rate * join.trigger_s / tasks)
    more = join_pairs_mb(rows, match_degree * (fuller - 1), record_bytes)
    return JoinNeeds(state_mb, more)


def disorder_s(frame: Frame, window: LoadWindow) -> float:
    """For how long records are kept because others may be late: the low is behind by this and by the lag."""
    behind = optional(frame.values, "watermark_lag_s")
    return max(0.0, behind - window.lag_s) if behind == behind else 0.0


def records_kept(frame: Frame, join: JoinFacts, kept_s: float, *, lag_s: float) -> float | None:
    """How many records came in the time whose records are kept; None: not all of that time is known."""
    ingest, step_s = frame.values.get("ingest_rate"), frame.step_ms / 1000
    if ingest is None:
        return None
    unread = round(lag_s / step_s)  # what waits on the bus is not kept yet
    end = frame.first_minute + frame.minutes - unread
    steps = min(ceil(kept_s / step_s), end - join.created_ms // frame.step_ms)
    first = frame.minutes - unread - steps
    if steps < 1 or first < 0:
        return None
    rates = ingest[first : first + steps].tolist()
    # The minute in which a job is made is not whole and may be missing.
    if steps > 1 and not isfinite(rates[0]) and join.created_ms // frame.step_ms == end - steps:
        rates = rates[1:]
    records = sum(rates) * step_s
    return records if isfinite(records) else None


BITS_PER_BYTE = 8
# Below this a thread was too idle to tell what it can do.
BUSY_MIN = 0.05
CPU_STEP, MEMORY_STEP_MB = 0.05, 16.0
# No task is made smaller than this, however little it was seen using.
CPU_MIN, MEMORY_MIN_MB = 0.1, 128.0


# --- cpu


def cpu_units(x: float, p: float, k: float, n: float) -> float:
    """Equation 2: the share of its threads that a job needs for input rate X."""
    capacity = p * k * n
    return x / capacity if capacity > 0 else inf


def cpu_units_with_backlog(x: float, b: float, t: float, p: float, k: float, n: float) -> float:
    """Equation 3: the same, with the backlog B gone within t."""
    return cpu_units(x + b / t, p, k, n)


def measured_thread_rate(window: LoadWindow, job: ScalerJobFacts) -> float | None:
    """P as the last minutes show it: what a busy thread processes per second; None: too idle to tell."""
    if window.busy_mean < BUSY_MIN or window.processed_rate <= 0:
        return None
    shape = job.shape
    return window.processed_rate / (
        window.busy_mean * at_work(shape.task_count, shape.task.threads, job.partitions)
    )


# --- memory and disk


def aggregation_state_mb(key_count: float, key_bytes: float) -> float:
    """Proportional to the keys kept."""
    return key_count * key_bytes / MB


def fullest_minute(frame: Frame, minutes: int) -> tuple[float, float] | None:
    """(keys, bytes of state) of the minute with most keys among the last; None: no minute has both."""
    keys, sizes = (frame.values.get(name) for name in ("key_count", "state_bytes"))
    if keys is None or sizes is None:
        return None
    pairs = zip(keys[-minutes:].tolist(), sizes[-minutes:].tolist(), strict=True)
    return max(((count, size) for count, size in pairs if 0 < count < inf and 0 <= size < inf), default=None)


class Needs(NamedTuple):
    """What a job needs as a whole and per task, at one input rate. Unknown: NaN, and what it has stays."""

    cores: float  # all tasks together
    memory_fixed_mb: float  # of each task
    memory_split_mb: float  # of all, split by the keys each has
    disk_mb: float  # of all
    network_mbps: float  # of all


def estimate_needs(
    window: LoadWindow, frame: Frame, job: ScalerJobFacts, footprint: Footprint, *, rate: float
) -> Needs:
    """What the job needs at `rate` records per second."""
    values = frame.values
    processed = window.processed_rate
    growth = rate / processed if processed > 0 else 1.0
    memory_fixed, memory_split, state_growth = _memory(window, frame, job, footprint, growth)
    return Needs(
        optional(values, "cpu") * growth,
        memory_fixed,
        memory_split,
        optional(values, "disk_mb") * state_growth,
        optional(values, "network_mb_s") * BITS_PER_BYTE * growth,
    )


def _memory(
    window: LoadWindow, frame: Frame, job: ScalerJobFacts, footprint: Footprint, growth: float
) -> tuple[float, float, float]:
    """Memory of each task, memory split over them, and by how much state grows with the rate."""
    measured = optional(frame.values, "memory_task_mb")
    state_mb = optional(frame.values, "state_bytes") / MB
    fullest = fullest_minute(frame, window.minutes) if job.state == "aggregation" else None
    if fullest is not None:
        # Memory that was measured with all these keys, so that what is beyond them is found.
        keys, size = fullest
        state_mb = aggregation_state_mb(keys, size / keys)
        measured = _largest(frame, "memory_task_mb", window.minutes)
    if job.state == "none" or state_mb != state_mb:
        return measured, 0.0, 1.0
    split, state_growth, pairs_mb = state_mb, 1.0, 0.0
    if job.state == "join":
        # A join keeps records, so its state follows the rate; what is kept already stays for a window.
        state_growth = max(1.0, growth)
        split = state_mb * state_growth
        rate, tasks = growth * window.processed_rate, job.shape.task_count
        found = None if job.join is None else estimate_join(window, frame, job.join, tasks=tasks, rate=rate)
        if found is not None and state_mb > 0:
            split, pairs_mb = found
            state_growth = split / state_mb
    share = share_of_busiest(job.shape.task_count, job.partitions)
    known = footprint.memory_fixed_mb if footprint.memory_fixed_mb is not None else 0.0
    # What is measured beyond a task's part of the state is there however many tasks there are.
    fixed = max(known, measured - state_mb * share) + pairs_mb if measured == measured else nan
    return fixed, split, state_growth


def _largest(frame: Frame, name: str, minutes: int) -> float:
    points = frame.values.get(name)
    known = () if points is None else [value for value in points[-minutes:].tolist() if 0 <= value < inf]
    return max(known, default=nan)


# --- per task


def vertical_limit(container: AvailableResources, settings: DecisionSettings) -> AvailableResources:
    """How large a task may be: a fifth of a container, so that it can be moved (V-E)."""
    part = settings.vertical_share
    return AvailableResources(
        cpu=container.cpu * part,
        memory_mb=container.memory_mb * part,
        disk_mb=container.disk_mb * part,
        network_mbps=container.network_mbps * part,
    )


def task_resources(
    needs: Needs,
    job: ScalerJobFacts,
    settings: DecisionSettings,
    *,
    task_count: int,
    threads: int,
    may_shrink: bool,
) -> TaskResources:
    """What each of so many tasks gets: all resources together, each as its busiest task needs it."""
    now = job.shape.task
    share = share_of_busiest(task_count, job.partitions)
    limit = vertical_limit(job.limits.container, settings)
    head = settings.headroom
    scaled_cpu = now.cpu * threads / now.threads
    cpu = _up(needs.cores * share * head, CPU_STEP, CPU_MIN)
    memory = _up(
        (needs.memory_fixed_mb + needs.memory_split_mb * share) * head, MEMORY_STEP_MB, MEMORY_MIN_MB
    )
    # With more tasks each has less state: only memory that follows the state shrinks while others grow.
    memory_shrinks = may_shrink or needs.memory_split_mb > 0
    return TaskResources(
        threads=threads,
        cpu=_choose(cpu, scaled_cpu, limit.cpu, shrinks=may_shrink),
        memory_mb=_choose(memory, now.memory_mb, limit.memory_mb, shrinks=memory_shrinks),
        disk_mb=_choose(
            _up(needs.disk_mb * share * head, 1.0), now.disk_mb, limit.disk_mb, shrinks=may_shrink
        )
        if now.disk_mb > 0
        else 0.0,
        network_mbps=_choose(
            needs.network_mbps * share * head, now.network_mbps, limit.network_mbps, shrinks=may_shrink
        )
        if now.network_mbps > 0
        else 0.0,
    )


def _choose(needed: float, now: float, limit: float, *, shrinks: bool) -> float:
    """What is needed, or what there is where that is not known or may not shrink; never more than the limit
    unless it already has more."""
    if needed != needed:
        return now
    chosen = needed if shrinks else max(needed, now)
    return min(chosen, max(limit, now))


def _up(amount: float, step: float, least: float = 1.0) -> float:
    """Rounded up, so that small changes of an estimate change nothing."""
    if not amount < inf:
        return amount
    return max(least, ceil(round(amount / step, 6)) * step)


def capacity(shape: JobShape, partitions: int, thread_rate: float) -> float:
    """P * k * n, as the busiest thread has it: records per second that the job can sustain."""
    return thread_rate * parallel(shape.task_count, shape.task.threads, partitions)
