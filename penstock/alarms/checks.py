"""What is wrong now that no policy has to look for: jobs, plans, tasks, shards, containers, loops.

Levels, not edges: what happened once (a fail-over) counts as wrong for a while. Pure: facts in, alerts out.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from penstock.alarms.decide import Alarm
from penstock.core.clock import Millis
from penstock.fleet.messages import TaskReport
from penstock.scaling.policies.balance import Starved, told
from penstock.scaling.policies.policy import FLEET, Levels, RaiseAlert

SOURCE = "control_plane"  # of all alarms made here
PLAN_SLOW_MS: Millis = 10 * 60_000
PLAN_STUCK_MS: Millis = 60 * 60_000
CRASHES_MIN = 5
LOOP_FAILURES_MIN = 5
EVENT_MS: Millis = 10 * 60_000  # for so long after it happened a fail-over is told of
FAILOVERS_MANY = 3
BEHIND_LOW = "behind_low"  # the metric, and the alarm
PARTITIONS_REPORTED_MAX = 64
TEXT_MAX = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrouble:
    """A job that does not run as it should: quarantined, invalid, or still changing."""

    job: str
    state: str
    reason: str = ""
    since_ms: Millis | None = None
    step: str = ""
    attempts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTrouble:
    """A task that failed and is started again, or waits for it."""

    job: str
    task_id: str
    container: str
    state: str
    restarts: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BehindTrouble:
    """A job that lately got records behind its low watermark without a flag; `totals` as tasks name them."""

    job: str
    totals: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTrouble:
    """A shard that nobody may have, because containers that had it died."""

    shard: int
    blame: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTrouble:
    """A loop of the control plane whose last rounds failed."""

    name: str
    streak: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryTrouble:
    """A category of the bus for which the last rounds of the control plane could do nothing."""

    name: str
    streak: int
    error: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEvent:
    """Something the Shard Manager or the State Syncer told the journal."""

    kind: str  # failover | alert
    subject: str
    decision: str
    reason: str
    at_ms: Millis


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that is wrong, or was lately, as far as it was looked at."""

    jobs: tuple[JobTrouble, ...] = ()
    tasks: tuple[TaskTrouble, ...] = ()
    behind: tuple[BehindTrouble, ...] = ()
    starved: tuple[Starved, ...] = ()
    shards: tuple[ShardTrouble, ...] = ()
    loops: tuple[LoopTrouble, ...] = ()
    categories: tuple[CategoryTrouble, ...] = ()
    events: tuple[FleetEvent, ...] = ()


def decide_levels(observed: Observed, now_ms: Millis) -> Levels:
    """What is wrong with each job now; what is no single job's is the fleet's."""
    found: dict[str, list[RaiseAlert]] = {}
    for trouble in observed.jobs:
        alert = _of_job(trouble, now_ms)
        if alert is not None:
            found.setdefault(trouble.job, []).append(alert)
    for job, alert in _crash_loops(observed.tasks):
        found.setdefault(job, []).append(alert)
    for behind in observed.behind:
        found.setdefault(behind.job, []).append(_behind_low(behind))
    for starved in reversed(observed.starved):  # of those of one job the one that waits longest counts
        found.setdefault(starved.job, []).append(_starved(starved))
    fleet = [
        *(_of_shard(shard) for shard in observed.shards),
        *(_of_loop(loop) for loop in observed.loops if loop.streak >= LOOP_FAILURES_MIN),
        *(_of_category(one) for one in observed.categories if one.streak >= LOOP_FAILURES_MIN),
    ]
    for event in observed.events:
        if 0 <= now_ms - event.at_ms < EVENT_MS:
            if event.decision == "job.stuck":
                found.setdefault(event.subject, []).append(_stuck_call(event))
            elif event.kind == "alert" and event.subject in _FLEET_ALERTS:
                fleet.append(_of_alert(event))
    fleet += _failovers(observed.events, now_ms)
    if fleet:
        found.setdefault(FLEET, []).extend(fleet)
    # One trouble has one key; of several with the same key the last one heard counts.
    return {job: tuple({alert.key: alert for alert in alerts}.values()) for job, alerts in found.items()}


def _of_job(trouble: JobTrouble, now_ms: Millis) -> RaiseAlert | None:
    job = shlex.quote(trouble.job)
    if trouble.state == "quarantined":
        return RaiseAlert(
            key="quarantined",
            severity="critical",
            text=_short(f"its last change was given up, and what ran before runs on: {trouble.reason}"),
            what_to_do=f"penstock doctor {job}; any new change of it lifts the quarantine",
        )
    if trouble.state == "invalid":
        return RaiseAlert(
            key="invalid",
            severity="warning",
            text=_short(f"its layers do not fit together: {trouble.reason}"),
            what_to_do=f"penstock config show {job} --layers",
        )
    age_ms = 0 if trouble.since_ms is None else now_ms - trouble.since_ms
    if trouble.state != "changing" or age_ms < PLAN_SLOW_MS:
        return None
    return RaiseAlert(
        key="plan_stuck",
        severity="critical" if age_ms >= PLAN_STUCK_MS else "warning",
        text=_short(
            f"a change has been under way for {age_ms // 60_000} min, at `{trouble.step}`"
            + (f": {trouble.reason}" if trouble.reason else "")
        ),
        what_to_do=f"penstock job get {job}; penstock doctor {job}",
        evidence={"minutes": age_ms // 60_000, "step": trouble.step, "attempts": trouble.attempts},
    )


def _crash_loops(tasks: tuple[TaskTrouble, ...]) -> list[tuple[str, RaiseAlert]]:
    """One alarm a job, however many of its tasks fail: they mostly fail alike."""
    looping: dict[str, list[TaskTrouble]] = {}
    for task in tasks:
        if task.restarts >= CRASHES_MIN and task.state != "running":
            looping.setdefault(task.job, []).append(task)
    found = []
    for job, failing in sorted(looping.items()):
        worst = max(failing, key=lambda task: (task.restarts, task.task_id))
        alert = RaiseAlert(
            key="crash_loop",
            severity="critical",
            text=_short(
                f"{worst.task_id} failed {worst.restarts} times in a row: {worst.error or 'no error known'}"
            ),
            what_to_do=f"penstock doctor {shlex.quote(job)}",
            evidence={"tasks": len(failing), "restarts": worst.restarts, "container": worst.container},
        )
        found.append((job, alert))
    return found


def _behind_low(behind: BehindTrouble) -> RaiseAlert:
    total = sum(behind.totals.values())
    named = sorted(behind.totals.items(), key=lambda item: (-item[1], item[0]))[:PARTITIONS_REPORTED_MAX]
    return RaiseAlert(
        key=BEHIND_LOW,
        severity="warning",
        text=f"records came behind its low watermark that nobody flagged as late, {total} in all: whoever "
        "sent them had promised that none would come; where a window was closed they are in no result",
        what_to_do=f"penstock watermark {shlex.quote(behind.job)} names who writes its inputs: an injector "
        "must not report a low above records that it still sends, weak productions may come so after a "
        "crash; results that must have them are computed again with penstock backfill",
        evidence={BEHIND_LOW: total, **dict(named)},
    )


def _starved(starved: Starved) -> RaiseAlert:
    job = shlex.quote(starved.by if starved.by and starved.by != starved.job else starved.job)
    return RaiseAlert(
        key="starved",
        severity="warning",
        text=_short(told(starved)),
        what_to_do=f"penstock doctor {job}; with isolation=process its tasks have a process of their own",
        evidence={
            "container": starved.container,
            "wait_s": round(starved.wait_s),
            "by": starved.by,
            "slots": round(starved.slots, 1),
        },
    )


def _of_shard(shard: ShardTrouble) -> RaiseAlert:
    return RaiseAlert(
        key=f"shard_{shard.shard}_quarantined",
        severity="critical",
        text=f"shard {shard.shard} cost {shard.blame} containers and runs nowhere",
        what_to_do=f"penstock shard explain {shard.shard}; once mended: "
        f"penstock shard release {shard.shard} --why …",
        evidence={"blame": shard.blame},
    )


def _of_loop(loop: LoopTrouble) -> RaiseAlert:
    return RaiseAlert(
        key=f"loop_{loop.name.replace(' ', '_')}_fails",
        severity="critical",
        text=_short(f"the last {loop.streak} rounds of the {loop.name} failed: {loop.error}"),
        what_to_do="look at the log of the control plane",
        evidence={"streak": loop.streak},
    )


def _of_category(category: CategoryTrouble) -> RaiseAlert:
    return RaiseAlert(
        key=f"category_{category.name}_fails",
        severity="critical",
        text=_short(
            f"category {category.name} gets no marks and is not cleaned, its readers wait: "
            f"{category.error}: {category.why}"
        ),
        what_to_do="restore what is named from a backup, or put it away; all other categories go on",
        evidence={"streak": category.streak},
    )


_FLEET_ALERTS: Mapping[str, str] = {
    "brake": "see whether the network between the control plane and its containers is well",
    "canary_late": "the control plane is too busy: see what else runs on its machine",
}


def _of_alert(event: FleetEvent) -> RaiseAlert:
    return RaiseAlert(
        key=event.subject,
        severity="critical",
        text=_short(event.reason),
        what_to_do=_FLEET_ALERTS[event.subject],
    )


def _stuck_call(event: FleetEvent) -> RaiseAlert:
    return RaiseAlert(
        key="call_stuck",
        severity="critical",
        text=_short(event.reason),
        what_to_do="see whether bus and row store answer",
    )


def _failovers(events: tuple[FleetEvent, ...], now_ms: Millis) -> list[RaiseAlert]:
    """One alarm for all of the last minutes: a rack that dies is one trouble."""
    lost = {
        event.subject: event
        for event in events
        if event.kind == "failover"
        and event.decision not in ("kept", "left")
        and 0 <= now_ms - event.at_ms < EVENT_MS
    }
    if not lost:
        return []
    last = max(lost.values(), key=lambda event: (event.at_ms, event.subject))
    text = f"{len(lost)} failed over in {EVENT_MS // 60_000} min, last {last.subject}: {last.reason}"
    return [
        RaiseAlert(
            key="failovers",
            severity="critical" if len(lost) >= FAILOVERS_MANY else "warning",
            text=_short(text),
            what_to_do="penstock container ls",
            evidence={"containers": ", ".join(sorted(lost))[:TEXT_MAX]},
        )
    ]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TEXT_MAX else line[: TEXT_MAX - 1] + "…"


_OF_PARTITION = f"{BEHIND_LOW}."  # so a report names the total of each partition that has one


class BehindLow:
    """What one control plane has seen of them. `told`: the alarms there are, asked once."""

    def __init__(self, told: Callable[[], Iterable[Alarm]]) -> None:
        self._told = told
        self._totals: dict[str, dict[str, int]] | None = None  # by job and partition
        self._grown_ms: dict[str, Millis] = {}  # by job: when a total last grew

    def observe(self, reports: Iterable[TaskReport], now_ms: Millis) -> tuple[BehindTrouble, ...]:
        """Jobs whose totals grew within the last minutes."""
        if self._totals is None:
            self._totals = _totals_in(self._told())
        for job, totals in _totals_of(reports).items():
            known = self._totals.setdefault(job, {})
            # Fewer than were known: a new state, which counts from the beginning.
            if any(count != known.get(name, 0) for name, count in totals.items()):
                self._grown_ms[job] = now_ms
            known.update(totals)
        self._grown_ms = {job: at for job, at in self._grown_ms.items() if abs(now_ms - at) < EVENT_MS}
        return tuple(BehindTrouble(job=job, totals=dict(self._totals[job])) for job in sorted(self._grown_ms))


def _totals_of(reports: Iterable[TaskReport]) -> dict[str, dict[str, int]]:
    """Of two that report one partition, an old owner and a new one, the larger total is the newer."""
    found: dict[str, dict[str, int]] = {}
    for report in reports:
        for name, total in report.metrics.items():
            if name.startswith(_OF_PARTITION):
                mine = found.setdefault(report.job, {})
                mine[name] = max(int(total), mine.get(name, 0))
    return found


def _totals_in(alarms: Iterable[Alarm]) -> dict[str, dict[str, int]]:
    return {alarm.job: _counts(alarm.evidence) for alarm in alarms if alarm.key == BEHIND_LOW}


def _counts(evidence: Mapping[str, float | int | str]) -> dict[str, int]:
    return {name: int(count) for name, count in evidence.items() if name.startswith(_OF_PARTITION)}
