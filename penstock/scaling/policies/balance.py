"""How a job's load is spread over its tasks: even, with stragglers, or skewed (StreamOps 5.2 and 5.3). Pure.

Stragglers and skewed tasks are both busier than their peers. A straggler processes no more records than they
do, so its host is slow; a skewed task processes more, so its keys are hot. A batch is counted when it ends:
for a busy task that has read nothing yet the arrival rate is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from penstock.fleet.messages import TaskReport
from penstock.scaling.policies.facts import TaskFacts

# Standard deviation over median absolute deviation of a normal distribution.
MAD_TO_SIGMA = 1.4826
TASKS_MIN = 3  # with two tasks it is not known which one is the outlier
# Smaller differences of the busy share are noise, however equal the other tasks are.
BUSY_SPREAD_MIN = 0.03
BUSY_RATIO_MIN = 1.25
RATE_SIMILAR = 1.2  # up to this factor a task's rate counts as equal to its peers'


@dataclass(frozen=True, slots=True, kw_only=True)
class Even:
    """No task is an outlier."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """Not known, with the reason."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OddTask:
    """An outlier: a task that is busier than its peers."""

    task: TaskFacts
    busy: float
    rate: float
    z: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Uneven:
    """Some tasks are busier: stragglers process no more records than their peers, skewed tasks do."""

    stragglers: tuple[OddTask, ...]
    skewed: tuple[OddTask, ...]
    busy_median: float
    rate_median: float  # of the others


def robust_z(values: Sequence[float], *, spread_min: float) -> list[float]:
    """Distance of each value from the median, in standard deviations estimated without the outliers."""
    middle = median(values)
    sigma = max(MAD_TO_SIGMA * median([abs(value - middle) for value in values]), spread_min)
    return [(value - middle) / sigma for value in values]


def judge_balance(tasks: Sequence[TaskFacts], *, z_min: float = 3.5) -> Even | Uneven | Unknown:
    """Compare a job's tasks by their busy share and their rate."""
    busy = [task.busy for task in tasks if task.busy is not None]
    rate = [task.rate for task in tasks if task.rate is not None]
    if len(busy) < len(tasks) or len(rate) < len(tasks) or any(task.state != "running" for task in tasks):
        return Unknown(reason=f"busy share or rate not reported: {', '.join(_unreported(tasks)[:5])}")
    if len(tasks) < TASKS_MIN:
        return Unknown(reason=f"{len(tasks)} tasks are too few to compare")
    # Plain lists: a job has few tasks, and to make arrays of them takes longer than to sort them.
    z, middle = robust_z(busy, spread_min=BUSY_SPREAD_MIN), median(busy)
    odd = [n for n in range(len(tasks)) if z[n] >= z_min and busy[n] >= BUSY_RATIO_MIN * middle]
    if not odd:
        return Even(reason=f"the busiest task is {max(z):.1f} deviations above the others")
    others = median([rate[n] for n in range(len(tasks)) if n not in odd])
    found = [OddTask(task=tasks[n], busy=busy[n], rate=_work(tasks[n], rate[n]), z=z[n]) for n in odd]
    found.sort(key=lambda each: (-each.z, each.task.task_id))
    return Uneven(
        stragglers=tuple(each for each in found if each.rate <= others * RATE_SIMILAR),
        skewed=tuple(each for each in found if each.rate > others * RATE_SIMILAR),
        busy_median=middle,
        rate_median=others,
    )


def _work(task: TaskFacts, rate: float) -> float:
    return task.arrival if rate == 0 and task.arrival is not None else rate


def _unreported(tasks: Sequence[TaskFacts]) -> list[str]:
    return sorted(
        task.task_id for task in tasks if task.state != "running" or task.busy is None or task.rate is None
    )


WAIT_S = 30.0  # longer than the normal wait for a slot in a busy container


@dataclass(frozen=True, slots=True, kw_only=True)
class Starved:
    """A task that waits for a slot, and the job that uses most of its container's slots."""

    job: str
    task_id: str
    container: str
    wait_s: float
    by: str  # "": no task reports a slot in use
    slots: float  # slots that `by` uses, recent average
    user_share: float  # share of them that runs its own code


def starved_tasks(reports: Iterable[tuple[str, TaskReport]]) -> tuple[Starved, ...]:
    """Starved tasks among these (container, report); the longest wait first."""
    known = list(reports)
    held: dict[str, dict[str, tuple[float, float]]] = {}
    for container, task in known:
        jobs = held.setdefault(container, {})
        slots, user = jobs.get(task.job, (0.0, 0.0))
        mine = task.metrics.get("slots_held", 0.0), task.metrics.get("slots_user", 0.0)
        jobs[task.job] = slots + mine[0], user + mine[1]
    found = []
    for container, task in known:
        wait_s = task.metrics.get("slot_wait_s", 0.0)
        if wait_s < WAIT_S:
            continue
        by, (slots, user) = max(held[container].items(), key=lambda item: (item[1][0], item[0]))
        found.append(
            Starved(
                job=task.job,
                task_id=task.task_id,
                container=container,
                wait_s=wait_s,
                by=by if slots > 0 else "",
                slots=slots,
                user_share=min(1.0, user / slots) if slots > 0 else 0.0,
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.wait_s, one.task_id)))


def describe_starved(starved: Starved) -> str:
    """One sentence: which task waits, and which job uses the slots."""
    start = f"{starved.task_id} has waited {starved.wait_s:.0f} s for a slot of {starved.container}"
    if not starved.by:
        return f"{start}; no task reports that it uses one"
    code = f", {starved.user_share:.0%} of it in its own code" if starved.user_share >= 0.5 else ""
    return f"{start}: {starved.by} uses {starved.slots:.1f} of its slots{code}"
