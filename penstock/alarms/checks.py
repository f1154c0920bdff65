"""The control plane's own alarm conditions: jobs, plans, tasks, shards, containers, loops.

Conditions are levels: a single event such as a fail-over counts for some minutes. Pure: facts in, alerts out.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from penstock.alarms.decide import Alarm
from penstock.core.clock import Millis
from penstock.fleet.messages import TaskReport
from penstock.scaling.policies.balance import Starved, describe_starved
from penstock.scaling.policies.policy import FLEET, Levels, RaiseAlert

SOURCE = "control_plane"  # of all alarms made here
PLAN_SLOW_MS: Millis = 10 * 60_000
PLAN_STUCK_MS: Millis = 60 * 60_000
CRASHES_MIN = 5
LOOP_FAILURES_MIN = 5
EVENT_MS: Millis = 10 * 60_000  # how long a single event such as a fail-over is reported
FAILOVERS_MANY = 3
BEHIND_LOW = "behind_low"  # the metric, and the alarm
PARTITIONS_REPORTED_MAX = 64
TEXT_MAX = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrouble:
    """A job that does not run as configured: quarantined, invalid, or still changing."""

    job: str
    state: str
    reason: str = ""
    since_ms: Millis | None = None
    step: str = ""
    attempts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTrouble:
    """A task that failed and restarts, or waits to restart."""

    job: str
    task_id: str
    container: str
    state: str
    restarts: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BehindTrouble:
    """A job that recently got unflagged records behind its low watermark; `totals` by metric name."""

    job: str
    totals: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTrouble:
    """A quarantined shard."""

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
    """A category of the bus whose maintenance failed in the last rounds."""

    name: str
    streak: int
    error: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEvent:
    """A journal entry of the Shard Manager or the State Syncer."""

    kind: str  # failover | alert
    subject: str
    decision: str
    reason: str
    at_ms: Millis


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The facts: everything that is wrong now or was recently."""

    jobs: tuple[JobTrouble, ...] = ()
    tasks: tuple[TaskTrouble, ...] = ()
    behind: tuple[BehindTrouble, ...] = ()
    starved: tuple[Starved, ...] = ()
    shards: tuple[ShardTrouble, ...] = ()
    loops: tuple[LoopTrouble, ...] = ()
    categories: tuple[CategoryTrouble, ...] = ()
    events: tuple[FleetEvent, ...] = ()


def decide_levels(observed: Observed, now_ms: Millis) -> Levels:
    """The current alerts of each job; alerts that concern no single job are filed under the fleet."""
    found: dict[str, list[RaiseAlert]] = {}
    for trouble in observed.jobs:
        alert = _of_job(trouble, now_ms)
        if alert is not None:
            found.setdefault(trouble.job, []).append(alert)
    for job, alert in _crash_loops(observed.tasks):
        found.setdefault(job, []).append(alert)
    for behind in observed.behind:
        found.setdefault(behind.job, []).append(_behind_low(behind))
    for starved in reversed(observed.starved):  # of several in one job the one that waits longest counts
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
    # Of several alerts with the same key the last one counts.
    return {job: tuple({alert.key: alert for alert in alerts}.values()) for job, alerts in found.items()}


def _of_job(trouble: JobTrouble, now_ms: Millis) -> RaiseAlert | None:
    job = shlex.quote(trouble.job)
    if trouble.state == "quarantined":
        return RaiseAlert(
            key="quarantined",
            severity="critical",
            text=_short(
                f"its last change failed and was given up; the previous config still runs: {trouble.reason}"
            ),
            what_to_do=f"penstock doctor {job}; any new change of the job ends the quarantine",
        )
    if trouble.state == "invalid":
        return RaiseAlert(
            key="invalid",
            severity="warning",
            text=_short(f"its layers merge to an invalid config: {trouble.reason}"),
            what_to_do=f"penstock config show {job} --layers",
        )
    age_ms = 0 if trouble.since_ms is None else now_ms - trouble.since_ms
    if trouble.state != "changing" or age_ms < PLAN_SLOW_MS:
        return None
    return RaiseAlert(
        key="plan_stuck",
        severity="critical" if age_ms >= PLAN_STUCK_MS else "warning",
        text=_short(
            f"a change has not finished for {age_ms // 60_000} min, it is at step `{trouble.step}`"
            + (f": {trouble.reason}" if trouble.reason else "")
        ),
        what_to_do=f"penstock job get {job}; penstock doctor {job}",
        evidence={"minutes": age_ms // 60_000, "step": trouble.step, "attempts": trouble.attempts},
    )


def _crash_loops(tasks: tuple[TaskTrouble, ...]) -> list[tuple[str, RaiseAlert]]:
    """One alarm per job, because its tasks usually fail for the same reason."""
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
        text=f"{total} records arrived behind its low watermark without a flag as late: their producer "
        "had promised that none would come; records of windows already closed are missing in the results",
        what_to_do=f"penstock watermark {shlex.quote(behind.job)} lists the producers of its inputs: an "
        "injector must not report a low above records that it still sends; weak productions may do so after "
        "a crash; recompute results that need these records with penstock backfill",
        evidence={BEHIND_LOW: total, **dict(named)},
    )


def _starved(starved: Starved) -> RaiseAlert:
    job = shlex.quote(starved.by if starved.by and starved.by != starved.job else starved.job)
    return RaiseAlert(
        key="starved",
        severity="warning",
        text=_short(describe_starved(starved)),
        what_to_do=f"penstock doctor {job}; set isolation=process to give its tasks a process of their own",
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
        text=f"shard {shard.shard} runs nowhere: quarantined, {shard.blame} containers could not release it",
        what_to_do=f"penstock shard explain {shard.shard}; once fixed: "
        f"penstock shard release {shard.shard} --why …",
        evidence={"blame": shard.blame},
    )


def _of_loop(loop: LoopTrouble) -> RaiseAlert:
    return RaiseAlert(
        key=f"loop_{loop.name.replace(' ', '_')}_fails",
        severity="critical",
        text=_short(f"the last {loop.streak} rounds of the {loop.name} failed: {loop.error}"),
        what_to_do="see the log of the control plane",
        evidence={"streak": loop.streak},
    )


def _of_category(category: CategoryTrouble) -> RaiseAlert:
    return RaiseAlert(
        key=f"category_{category.name}_fails",
        severity="critical",
        text=_short(
            f"category {category.name} gets no marks and no cleanup, so its readers wait: "
            f"{category.error}: {category.why}"
        ),
        what_to_do="restore the named files from a backup, or move them away; other categories still work",
        evidence={"streak": category.streak},
    )


_FLEET_ALERTS: Mapping[str, str] = {
    "brake": "check the network between the control plane and its containers",
    "canary_late": "the control plane is overloaded: check what else runs on its machine",
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
        what_to_do="check whether the bus and the row store respond",
    )


def _failovers(events: tuple[FleetEvent, ...], now_ms: Millis) -> list[RaiseAlert]:
    """One alarm for all recent fail-overs, because a failed rack is one problem."""
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
    text = (
        f"{len(lost)} containers failed over in {EVENT_MS // 60_000} min, last {last.subject}: {last.reason}"
    )
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


_OF_PARTITION = f"{BEHIND_LOW}."  # the prefix of the metric of each partition


class BehindLow:
    """Detects records behind the low watermark. `stored_alarms` is called once, for the last known totals."""

    def __init__(self, stored_alarms: Callable[[], Iterable[Alarm]]) -> None:
        self._stored_alarms = stored_alarms
        self._totals: dict[str, dict[str, int]] | None = None  # by job and partition
        self._grown_ms: dict[str, Millis] = {}  # by job: when a total last changed

    def observe(self, reports: Iterable[TaskReport], now_ms: Millis) -> tuple[BehindTrouble, ...]:
        """Jobs whose totals changed within the last minutes."""
        if self._totals is None:
            self._totals = _totals_in(self._stored_alarms())
        for job, totals in _totals_of(reports).items():
            known = self._totals.setdefault(job, {})
            # A smaller total is that of a new state, which counts from 0.
            if any(count != known.get(name, 0) for name, count in totals.items()):
                self._grown_ms[job] = now_ms
            known.update(totals)
        self._grown_ms = {job: at for job, at in self._grown_ms.items() if abs(now_ms - at) < EVENT_MS}
        return tuple(BehindTrouble(job=job, totals=dict(self._totals[job])) for job in sorted(self._grown_ms))


def _totals_of(reports: Iterable[TaskReport]) -> dict[str, dict[str, int]]:
    """Totals by job and metric. If an old and a new owner report one partition, the larger total is newer."""
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
