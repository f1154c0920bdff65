"""Rebalancing: when and how partitions are assigned to other tasks (Algorithm 2, lines 3 and 4). Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from penstock.fleet.messages import TaskReport
from penstock.jobs.tasks import describe_moves
from penstock.scaling.scaler.observation import Inputs, Observation, PartitionLoads, Rebalance, mapping_of
from penstock.scaling.scaler.outcome import rebalance_that_did_not_help
from penstock.scaling.scaler.window import LoadWindow

# A smaller reduction of the busiest task's load is not worth a restart of the job.
GAIN_MIN = 0.15
# A mapping up to this factor worse than the best one is taken if it needs fewer moves. The difference must be
# below GAIN_MIN, or the next round would rebalance again: 1 - 1 / NEARLY < GAIN_MIN.
NEARLY = 1.15
# Loads are compared as integer parts of their sum, so that equal loads stay equal in any unit.
_PARTS = 10**9
_STEPS_MAX = 10_000

TaskMapping = tuple[int, ...]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BetterMapping:
    """Another mapping whose gain is worth a restart."""

    mapping: TaskMapping
    moved: tuple[int, ...]  # partitions that move to another task
    share_before: float  # the busiest task's share of the load
    share_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBetterMapping:
    """No mapping is better by enough. `hot`: the single partition that is the reason, if there is one."""

    reason: str
    share: float = 0.0  # the busiest task's share of the load
    share_best: float = 0.0  # its share with the best mapping found
    hot: int | None = None


def find_better_mapping(
    loads: Sequence[float], mapping: TaskMapping, *, gain_min: float = GAIN_MIN
) -> BetterMapping | NoBetterMapping:
    """A better mapping for the same number of tasks. Requires: each task has a partition now."""
    tasks = max(mapping, default=-1) + 1
    assert len(loads) == len(mapping) and set(mapping) == set(range(tasks)), "each task has a partition"
    total = sum(loads)
    if not all(isfinite(load) and load >= 0 for load in loads) or not isfinite(total):
        return NoBetterMapping(reason="the load of a partition is not known")
    if total <= 0:
        return NoBetterMapping(reason="no records arrive, and none wait")
    parts = np.array([round(load / total * _PARTS) for load in loads], np.int64)
    before = _busiest(parts, mapping, tasks)
    from_scratch = _last(_polished(parts, _longest_first(parts, tasks), tasks))
    path = [*_polished(parts, mapping, tasks)]
    best = min(_busiest(parts, from_scratch, tasks), _busiest(parts, path[-1], tasks))
    if best > (1 - gain_min) * before:
        return _kept(parts, before, best, tasks, gain_min)
    enough = min(NEARLY * best, (1 - gain_min) * before)
    found = next((one for one in path if _busiest(parts, one, tasks) <= enough), None)
    if found is None:
        found = _renamed(from_scratch, mapping, tasks)
    return BetterMapping(
        mapping=found,
        moved=tuple(p for p, (old, new) in enumerate(zip(mapping, found, strict=True)) if old != new),
        share_before=before / _PARTS,
        share_after=_busiest(parts, found, tasks) / _PARTS,
    )


def _kept(parts: Ints, before: int, best: int, tasks: int, gain_min: float) -> NoBetterMapping:
    share, share_best = before / _PARTS, best / _PARTS
    hot = int(parts.argmax())
    is_even = (1 - gain_min) * before * tasks <= _PARTS
    if int(parts[hot]) > (1 - gain_min) * before and not is_even:
        return NoBetterMapping(
            reason=f"partition {hot} alone has {int(parts[hot]) / _PARTS:.0%} of the load, "
            f"its task {share:.0%}: a hot key",
            share=share,
            share_best=share_best,
            hot=hot,
        )
    return NoBetterMapping(
        reason=f"the busiest task has {share:.0%} of the load, and {share_best:.0%} with the best mapping",
        share=share,
        share_best=share_best,
    )


def _loads(parts: Ints, mapping: Sequence[int], tasks: int) -> Ints:
    found = np.zeros(tasks, np.int64)
    np.add.at(found, np.asarray(mapping), parts)
    return found


def _busiest(parts: Ints, mapping: Sequence[int], tasks: int) -> int:
    return int(_loads(parts, mapping, tasks).max())


def _longest_first(parts: Ints, tasks: int) -> TaskMapping:
    """LPT: the largest partition first, each to the task with the least load; ties to the first task."""
    loads, mapping = [0] * tasks, [0] * len(parts)
    idle = set(range(tasks))
    order = np.argsort(-parts, kind="stable").tolist()
    for place, partition in enumerate(order):
        # The last partitions go to tasks that have none yet.
        candidates = idle if len(order) - place <= len(idle) else range(tasks)
        task = min(candidates, key=lambda each: (loads[each], each))
        mapping[partition] = task
        loads[task] += int(parts[partition])
        idle.discard(task)
    return tuple(mapping)


def _polished(parts: Ints, mapping: TaskMapping, tasks: int) -> Iterator[TaskMapping]:
    """The mapping, improved step by step by moves and exchanges that reduce a busiest task's load."""
    yield mapping
    for _ in range(_STEPS_MAX):
        better = _step(parts, mapping, tasks)
        if better is None:
            return
        mapping = better
        yield mapping


def _step(parts: Ints, mapping: TaskMapping, tasks: int) -> TaskMapping | None:
    """The move or exchange that is best for a busiest task and its partner; None if none helps."""
    loads, owners = _loads(parts, mapping, tasks), np.asarray(mapping)
    most = int(loads.max())
    for task in np.flatnonzero(loads == most).tolist():  # several tasks may be the busiest
        own, others = np.flatnonzero(owners == task), np.flatnonzero(owners != task)
        best: tuple[int, int, int, int] | None = None  # (load of the larger, is an exchange, partition, what)
        if len(own) > 1 and tasks > 1:
            least = min((each for each in range(tasks) if each != task), key=lambda each: int(loads[each]))
            after = np.maximum(most - parts[own], loads[least] + parts[own])
            place = int(after.argmin())
            best = (int(after[place]), 0, int(own[place]), least)
        if len(others):
            given = parts[own][:, None] - parts[others][None, :]
            pairs = np.maximum(most - given, loads[owners[others]][None, :] + given)
            row, column = np.unravel_index(int(pairs.argmin()), pairs.shape)
            exchange = (int(pairs[row, column]), 1, int(own[row]), int(others[column]))
            best = exchange if best is None else min(best, exchange)
        if best is not None and best[0] < most:
            changed = [*mapping]
            if best[1]:
                changed[best[2]], changed[best[3]] = changed[best[3]], changed[best[2]]
            else:
                changed[best[2]] = best[3]
            return tuple(changed)
    return None


def _last(path: Iterator[TaskMapping]) -> TaskMapping:
    *_, found = path
    return found


def _renamed(find_better_mapping: TaskMapping, mapping: TaskMapping, tasks: int) -> TaskMapping:
    """The same grouping with tasks renamed so that few partitions move."""
    common = Counter(zip(find_better_mapping, mapping, strict=True))
    names: dict[int, int] = {}
    for (new, old), _ in sorted(common.items(), key=lambda item: (-item[1], item[0])):
        if new not in names and old not in names.values():
            names[new] = old
    free = iter(sorted(set(range(tasks)) - set(names.values())))
    return tuple(
        names[new] if new in names else names.setdefault(new, next(free)) for new in find_better_mapping
    )


FORMULA = "X + B/t of each partition, the largest first to the task with least"
# A mapping is stored and journaled with one entry per partition, so their number is limited.
PARTITIONS_MAX = 1024
_RATE = re.compile(r"input_rate\.(\d{1,4})")


def loads_of(
    reports: Iterable[TaskReport], mapping: tuple[int, ...], *, generation: int
) -> PartitionLoads | None:
    """The load of each partition from task reports; None if it is missing for a partition."""
    rates: dict[int, float] = {}
    lags: dict[int, float] = {}
    for report in reports:
        if report.generation != generation or report.state != "running":
            continue
        index = int(report.task_id.rpartition("/")[2])
        for partition, rate in _rates(report.metrics).items():
            if partition < len(mapping) and mapping[partition] == index:
                rates[partition] = rate
                lags[partition] = report.metrics.get(f"lag_records.{partition}", 0.0)
    known = [(rates.get(partition, -1.0), lags.get(partition, 0.0)) for partition in range(len(mapping))]
    if not known or not all(0 <= rate < inf and 0 <= lag < inf for rate, lag in known):
        return None
    return PartitionLoads(rates=tuple(rate for rate, _ in known), lags=tuple(lag for _, lag in known))


def _rates(metrics: Mapping[str, float]) -> dict[int, float]:
    found = ((_RATE.fullmatch(name), value) for name, value in metrics.items())
    return {int(match[1]): value for match, value in found if match is not None}


def can_rebalance(partitions: int, task_count: int, loads: PartitionLoads | None) -> bool:
    """Whether rebalancing is possible: several tasks, more partitions than tasks, each with a known load."""
    return loads is not None and 1 < task_count < partitions <= PARTITIONS_MAX


def plan_rebalance(observation: Observation, window: LoadWindow, why: str, inputs: Inputs) -> Rebalance | str:
    """A mapping that clearly reduces the busiest task's load, or why there is none."""
    job, settings = observation.job, observation.settings
    loads = observation.by_partition
    if not job.can_rebalance or loads is None:
        return _why_not(observation)
    before = mapping_of(job.shape, job.partitions)
    if len(loads.rates) != len(before):
        return "rebalancing: the number of partitions is being changed"
    if rebalance_that_did_not_help(observation, window) is not None:
        return "rebalancing: it was tried and did not help"
    found = find_better_mapping(loads.within(settings.recovery_s), before)
    if isinstance(found, NoBetterMapping):
        return f"rebalancing: {found.reason}"
    needed = window.input_rate + window.lag_records / settings.recovery_s
    return Rebalance(
        mapping=found.mapping,
        reason=f"{why}; the busiest task has {found.share_before:.0%} of the load, {found.share_after:.0%} "
        f"after it: {describe_moves(before, found.mapping)}",
        formula=FORMULA,
        inputs={
            **inputs,
            "lag_spread": window.lag_spread,
            "busy": window.busy,
            "share_before": found.share_before,
            "share_after": found.share_after,
            "moved": len(found.moved),
        },
        # The busiest task limits the job: its load falls by this factor, so the job's rate can rise by it.
        rate_expected=min(needed, window.processed_rate * found.share_before / found.share_after),
    )


def _why_not(observation: Observation) -> str:
    job = observation.job
    if not 1 < job.shape.task_count < job.partitions:
        return f"rebalancing: {job.shape.task_count} tasks read {job.partitions} partitions"
    if job.partitions > PARTITIONS_MAX:
        return f"rebalancing: the job has more than {PARTITIONS_MAX} partitions"
    return "rebalancing: the load of each partition is not known"
