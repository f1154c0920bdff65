"""When and how partitions are dealt anew: Algorithm 2, lines 3 and 4, by what each of them brings. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import inf

from penstock.jobs.partition_tasks import tell_moves
from penstock.resources.scaler.deal import Kept, deal
from penstock.resources.scaler.observation import Inputs, Observation, PartitionLoads, Rebalance
from penstock.resources.scaler.outcome import rebalance_that_did_not_help
from penstock.resources.scaler.shapes import mapping_of
from penstock.resources.scaler.window import Window
from penstock.tasks.messages import TaskReport

FORMULA = "X + B/t of each partition, the largest first to the task with least"
# What is remembered and told of a deal has a place for each.
PARTITIONS_MAX = 1024
_RATE = re.compile(r"input_rate\.(\d{1,4})")


def loads_of(
    reports: Iterable[TaskReport], mapping: tuple[int, ...], *, generation: int
) -> PartitionLoads | None:
    """What each partition brings, as its task says; None: of one of them nobody says it."""
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
    """Whether partitions can be dealt anew: several tasks, more partitions, each of a known load."""
    return loads is not None and 1 < task_count < partitions <= PARTITIONS_MAX


def plan_rebalance(observation: Observation, window: Window, why: str, inputs: Inputs) -> Rebalance | str:
    """Another deal that makes the busiest task's part clearly smaller, or why there is none."""
    job, settings = observation.job, observation.settings
    loads = observation.by_partition
    if not job.can_rebalance or loads is None:
        return _why_not(observation)
    before = mapping_of(job.shape, job.partitions)
    if len(loads.rates) != len(before):
        return "partitions that can be dealt anew: they are being changed"
    if rebalance_that_did_not_help(observation, window) is not None:
        return "partitions dealt anew: it was tried and did not help"
    found = deal(loads.within(settings.recovery_s), before)
    if isinstance(found, Kept):
        return f"partitions dealt anew: {found.reason}"
    needed = window.input_rate + window.lag_records / settings.recovery_s
    return Rebalance(
        mapping=found.mapping,
        reason=f"{why}; the busiest task has {found.share_before:.0%} of the load, {found.share_after:.0%} "
        f"after it: {tell_moves(before, found.mapping)}",
        formula=FORMULA,
        inputs={
            **inputs,
            "lag_spread": window.lag_spread,
            "busy": window.busy,
            "share_before": found.share_before,
            "share_after": found.share_after,
            "moved": len(found.moved),
        },
        # The busiest task has so much less to do that the job can process so much more.
        rate_expected=min(needed, window.processed_rate * found.share_before / found.share_after),
    )


def _why_not(observation: Observation) -> str:
    job = observation.job
    if not 1 < job.shape.task_count < job.partitions:
        return (
            "partitions that can be dealt anew: "
            f"{job.shape.task_count} tasks read {job.partitions} partitions"
        )
    if job.partitions > PARTITIONS_MAX:
        return f"partitions that can be dealt anew: they are more than {PARTITIONS_MAX}"
    return "partitions that can be dealt anew: what each of them brings is not known"
