"""The auto scaler in a control plane: what it needs of jobs, tasks and containers, and its one write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from penstock.core.clock import Clock, Millis
from penstock.core.journal_store import JournalStore
from penstock.core.pace import Pace, Rest, no_rest
from penstock.core.sql_store import Database
from penstock.jobs.job_service import Actor, JobService
from penstock.jobs.job_view import JobView
from penstock.resources.auto_scaler import AutoScaler
from penstock.resources.capacity import Stock
from penstock.resources.metric_store import MetricStore
from penstock.resources.policies.ports import AlertSink
from penstock.resources.policies.records import flat
from penstock.resources.policies.round import FleetState
from penstock.resources.policy_store import PolicyRecordStore
from penstock.resources.scaler.observe import Capacity, ScalableJob
from penstock.resources.scaler.shapes import KINDS, Room
from penstock.resources.scaler.turn import ACTOR
from penstock.resources.scaler_minutes import ScalerMinutes
from penstock.tasks.container_store import ContainerRow
from penstock.tasks.fleet_view import FleetView
from penstock.tasks.messages import PROFILES, TaskReport
from penstock.tasks.task_service import TaskService

STALE_MS: Millis = 10_000  # what a container said longer ago is no load
SCALER = Actor(name=ACTOR, role="scaler")
UNSCALED = ("process", "spark")  # of these nobody knows a lag


class Patch(Protocol):
    """How a layer is written."""

    def __call__(
        self,
        job: str,
        layer: str,
        changes: Mapping[str, Any],
        *,
        expected_version: int | None,
        actor: Actor,
        reason: str,
        idempotency_key: str | None,
    ) -> int:
        """Change one layer of one job; returns the job's new version."""


class JobsOfPlane:
    """The `JobLayer` of the auto scaler."""

    def __init__(
        self,
        jobs: JobService,
        tasks: TaskService,
        fleet: FleetView,
        patch: Patch,
        clock: Callable[[], Clock],
        *,
        stock: Callable[[], Stock | None],
        rest: Rest = no_rest,
    ) -> None:
        """`stock`: what the capacity manager says of the cluster now."""
        self._jobs, self._tasks, self._fleet, self._patch = jobs, tasks, fleet, patch
        self._clock, self._stock, self._rest = clock, stock, rest
        self.fleet_state: Callable[[], FleetState] = FleetState  # whoever runs the policies knows better

    def task_counts(self) -> Mapping[str, tuple[int, int]]:
        """By job that has tasks: its generation, and how many they are."""
        return self._tasks.task_counts()

    def task_reports(self) -> dict[str, list[TaskReport]]:
        """What tasks say now, by job: the last words of a container that fell silent are no load."""
        found: dict[str, list[TaskReport]] = {}
        heard_ms = self._clock().now_ms() - STALE_MS
        for row in self._fleet.containers():
            for task in row.tasks if row.may_run and row.seen_ms >= heard_ms else ():
                found.setdefault(task.job, []).append(task)
        return found

    def scalable_jobs(self, names: Sequence[str]) -> tuple[ScalableJob, ...]:
        """Those of these jobs that run and have a lag."""
        slices = Pace(self._rest).slices(names)
        views = [view for some in slices for view in self._jobs.views_of(some).values()]
        return tuple(found for view in views if (found := _scalable(view)) is not None)

    def capacity(self) -> Capacity:
        """What the smallest container has, and what is left of all; no limit where one does not say."""
        rows = [row for row in self._fleet.containers() if row.may_run and not row.draining]
        if not rows or not all(row.capacity for row in rows):
            return Capacity()
        stock = self._stock()  # it adds up all jobs
        return Capacity() if stock is None else _capacity(rows, stock)

    def fleet(self) -> FleetState:
        """What the whole fleet allows now."""
        return self.fleet_state()

    def patch(self, job: str, changes: Mapping[str, Any], *, expected_version: int, reason: str) -> None:
        """The scaler's one write."""
        self._patch(
            job,
            "scaler",
            flat(changes),  # by path: what the layer says of other resources stays
            expected_version=expected_version,
            actor=SCALER,
            reason=reason,
            idempotency_key=None,
        )


def build_scaler(
    database: Database,
    journal: JournalStore,
    metrics: MetricStore,
    jobs: JobsOfPlane,
    alarms: AlertSink,
    *,
    profile: str,
    rest: Rest = no_rest,
) -> AutoScaler:
    """The auto scaler on a control plane's store."""
    return AutoScaler(
        jobs,
        ScalerMinutes(metrics),
        PolicyRecordStore(database, journal),
        journal,
        alarms,
        heartbeat_ms=PROFILES[profile].heartbeat_ms,
        rest=rest,
    )


def _scalable(view: JobView) -> ScalableJob | None:
    running = view.running
    if running is None or running.state != "running" or running.config["kind"] in UNSCALED:
        return None
    layers = {row.layer: row for row in view.layers}
    oncall = layers["oncall"].body if "oncall" in layers else {}
    made = layers.get("provisioner")
    updated_ms = made.at_ms if made is not None and made.at_ms > view.created_ms else None
    return ScalableJob(
        name=view.name,
        birth=view.birth,
        pipeline=view.pipeline,
        expected_version=view.expected_version,
        generation=running.generation,
        task_count=len(set(running.mapping)),
        mapping=running.mapping,
        is_settled=view.is_in_sync and not running.is_held,
        config=running.config,
        layer=layers["scaler"].body if "scaler" in layers else {},
        oncall=frozenset(flat(oncall)),
        created_ms=view.created_ms,
        changed_ms=running.updated_ms,
        updated_ms=updated_ms,
    )


def _capacity(rows: Sequence[ContainerRow], stock: Stock) -> Capacity:
    amounts = [dict(zip(KINDS, row.capacity, strict=False)) for row in rows]
    capacity = Capacity(
        container=Room(**{kind: min(amount[kind] for amount in amounts) for kind in stock.total}),
        remaining=Room(**stock.remaining),
    )
    if not stock.short_of:
        return capacity
    # Short: what is kept for failures is for privileged jobs, and for nobody else.
    rest = {kind: max(0.0, most - stock.reserved[kind]) for kind, most in stock.total.items()}
    return replace(capacity, remaining=Room(**rest), privileged_only=True)
