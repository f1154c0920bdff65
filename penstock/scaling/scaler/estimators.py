"""Resource estimators: what cpu, memory, disk and network a job needs at an input rate (Turbine V-B). Pure.

Cpu follows equations 2 and 3. State is split over the tasks, so more tasks have less state each. Its size is
estimated by key count for aggregations (from the minute with most keys, since closing windows delete theirs),
and by window, degree of matching and disorder for joins.
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
    """A join's future state, and the additional memory for pairs."""

    state_mb: float
    pairs_mb: float  # of each task


def join_facts(config: JobConfig, created_ms: Millis) -> JoinFacts | None:
    """A join's parameters from a job's plan; None if it is no join or has no window."""
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
    """Proportional to the records that arrive while one is stored: its window plus the watermark's delay."""
    return input_rate * kept_s * record_bytes / MB


def join_pairs_mb(rows: float, match_degree: float, record_bytes: float) -> float:
    """Memory for the pairs of one batch, which are in memory together; each has two records."""
    return rows * match_degree * 2 * record_bytes / MB


def estimate_join(
    window: LoadWindow, frame: Frame, join: JoinFacts, *, tasks: int, rate: float
) -> JoinNeeds | None:
    """What a join needs at `rate` records per second; None if the size of its records is not known."""
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
    # With more stored records a record has more matches.
    fuller = max(1.0, rate * kept_s / records)
    rows = min(float(join.batch_rows_max), rate * join.trigger_s / tasks)
    more = join_pairs_mb(rows, match_degree * (fuller - 1), record_bytes)
    return JoinNeeds(state_mb, more)


def disorder_s(frame: Frame, window: LoadWindow) -> float:
    """How long records are stored for late ones: the low watermark's delay without the lag."""
    behind = optional(frame.values, "watermark_lag_s")
    return max(0.0, behind - window.lag_s) if behind == behind else 0.0


def records_kept(frame: Frame, join: JoinFacts, kept_s: float, *, lag_s: float) -> float | None:
    """How many records arrived in the time for which they are stored; None if minutes are missing."""
    ingest, step_s = frame.values.get("ingest_rate"), frame.step_ms / 1000
    if ingest is None:
        return None
    unread = round(lag_s / step_s)  # unread records are not stored yet
    end = frame.first_minute + frame.minutes - unread
    steps = min(ceil(kept_s / step_s), end - join.created_ms // frame.step_ms)
    first = frame.minutes - unread - steps
    if steps < 1 or first < 0:
        return None
    rates = ingest[first : first + steps].tolist()
    # The minute in which a job is created is incomplete and may be missing.
    if steps > 1 and not isfinite(rates[0]) and join.created_ms // frame.step_ms == end - steps:
        rates = rates[1:]
    records = sum(rates) * step_s
    return records if isfinite(records) else None


BITS_PER_BYTE = 8
# Below this busy share a thread is too idle to measure its rate.
BUSY_MIN = 0.05
CPU_STEP, MEMORY_STEP_MB = 0.05, 16.0
# Smallest resources of a task, however little it uses.
CPU_MIN, MEMORY_MIN_MB = 0.1, 128.0


# --- cpu


def cpu_units(x: float, p: float, k: float, n: float) -> float:
    """Equation 2: the share of its threads that a job needs at input rate X."""
    capacity = p * k * n
    return x / capacity if capacity > 0 else inf


def cpu_units_with_backlog(x: float, b: float, t: float, p: float, k: float, n: float) -> float:
    """Equation 3: the same, with the backlog B processed within t."""
    return cpu_units(x + b / t, p, k, n)


def measured_thread_rate(window: LoadWindow, job: ScalerJobFacts) -> float | None:
    """P from the last minutes: records per second of a busy thread; None if the job is too idle."""
    if window.busy_mean < BUSY_MIN or window.processed_rate <= 0:
        return None
    shape = job.shape
    return window.processed_rate / (
        window.busy_mean * at_work(shape.task_count, shape.task.threads, job.partitions)
    )


# --- memory and disk


def aggregation_state_mb(key_count: float, key_bytes: float) -> float:
    """Proportional to the number of stored keys."""
    return key_count * key_bytes / MB


def fullest_minute(frame: Frame, minutes: int) -> tuple[float, float] | None:
    """(keys, bytes of state) of the recent minute with most keys; None if no minute has both."""
    keys, sizes = (frame.values.get(name) for name in ("key_count", "state_bytes"))
    if keys is None or sizes is None:
        return None
    pairs = zip(keys[-minutes:].tolist(), sizes[-minutes:].tolist(), strict=True)
    return max(((count, size) for count, size in pairs if 0 < count < inf and 0 <= size < inf), default=None)


class Needs(NamedTuple):
    """What a job needs at one input rate. NaN: not known, and the reserved amount stays."""

    cores: float  # all tasks together
    memory_fixed_mb: float  # of each task
    memory_split_mb: float  # all tasks together, split by their keys
    disk_mb: float  # all tasks together
    network_mbps: float  # all tasks together


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
    """Memory of each task, memory split over all tasks, and the growth factor of state."""
    measured = optional(frame.values, "memory_task_mb")
    state_mb = optional(frame.values, "state_bytes") / MB
    fullest = fullest_minute(frame, window.minutes) if job.state == "aggregation" else None
    if fullest is not None:
        # The measured memory with all these keys: what exceeds their state is the fixed part.
        keys, size = fullest
        state_mb = aggregation_state_mb(keys, size / keys)
        measured = _largest(frame, "memory_task_mb", window.minutes)
    if job.state == "none" or state_mb != state_mb:
        return measured, 0.0, 1.0
    split, state_growth, pairs_mb = state_mb, 1.0, 0.0
    if job.state == "join":
        # A join stores records, so its state follows the rate; records stored already stay for a window.
        state_growth = max(1.0, growth)
        split = state_mb * state_growth
        rate, tasks = growth * window.processed_rate, job.shape.task_count
        found = None if job.join is None else estimate_join(window, frame, job.join, tasks=tasks, rate=rate)
        if found is not None and state_mb > 0:
            split, pairs_mb = found
            state_growth = split / state_mb
    share = share_of_busiest(job.shape.task_count, job.partitions)
    known = footprint.memory_fixed_mb if footprint.memory_fixed_mb is not None else 0.0
    # Measured memory beyond a task's share of the state does not depend on the number of tasks.
    fixed = max(known, measured - state_mb * share) + pairs_mb if measured == measured else nan
    return fixed, split, state_growth


def _largest(frame: Frame, name: str, minutes: int) -> float:
    points = frame.values.get(name)
    known = () if points is None else [value for value in points[-minutes:].tolist() if 0 <= value < inf]
    return max(known, default=nan)


# --- per task


def vertical_limit(container: AvailableResources, settings: DecisionSettings) -> AvailableResources:
    """The largest size of a task: a fifth of a container, so that it can be moved (V-E)."""
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
    """The resources of each of `task_count` tasks, all adjusted together, as the busiest task needs them."""
    now = job.shape.task
    share = share_of_busiest(task_count, job.partitions)
    limit = vertical_limit(job.limits.container, settings)
    head = settings.headroom
    scaled_cpu = now.cpu * threads / now.threads
    cpu = _up(needs.cores * share * head, CPU_STEP, CPU_MIN)
    memory = _up(
        (needs.memory_fixed_mb + needs.memory_split_mb * share) * head, MEMORY_STEP_MB, MEMORY_MIN_MB
    )
    # With more tasks each has less state, so this memory may shrink while other resources grow.
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
    """The needed amount, or the current one if the need is not known or may not shrink. It is not above the
    limit, unless the current one is."""
    if needed != needed:
        return now
    chosen = needed if shrinks else max(needed, now)
    return min(chosen, max(limit, now))


def _up(amount: float, step: float, least: float = 1.0) -> float:
    """Round up to whole steps, so that small changes of an estimate change nothing."""
    if not amount < inf:
        return amount
    return max(least, ceil(round(amount / step, 6)) * step)


def capacity(shape: JobShape, partitions: int, thread_rate: float) -> float:
    """P * k * n: the records per second that the job can sustain."""
    return thread_rate * parallel(shape.task_count, shape.task.threads, partitions)
