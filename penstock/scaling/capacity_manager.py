"""The capacity manager (Turbine V-F): adds up a cluster, stops jobs if it is short, resumes them later.

It is off if a container declares no capacity, since the cluster is not limited then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from penstock.core.clock import Millis
from penstock.core.errors import PenstockError
from penstock.core.workers import Rest, no_rest
from penstock.fleet.container_store import ContainerRow, ContainerState
from penstock.fleet.messages import TaskReport
from penstock.fleet.shard_load import KINDS, measured_load, reserved_of
from penstock.fleet.shard_store import FleetView
from penstock.jobs.config import JobConfig
from penstock.jobs.job_reads import JobReads, JobView
from penstock.jobs.layer_writer import Actor
from penstock.jobs.layers import DEFAULT_LAYERS
from penstock.scaling.capacity import (
    Amount,
    BringBack,
    Claim,
    OutOfRoom,
    Stock,
    StopJob,
    decide_stops,
    take_stock,
)
from penstock.scaling.policies.policy import FLEET, Levels, RaiseAlert

LAYER = "scaler"  # the layer in which the capacity manager sets a job's `state`
PRECEDENCE = next(layer.precedence for layer in DEFAULT_LAYERS if layer.name == LAYER)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """Capacity and claims of a cluster at one moment."""

    total: Amount | None  # None: not limited, or no containers
    containers: int  # live ones that do not drain
    boundless: tuple[str, ...]  # those of them that declare no capacity
    claims: tuple[Claim, ...]
    views: Mapping[str, JobView]


def read_cluster_facts(views: Iterable[JobView], containers: Sequence[ContainerRow]) -> ClusterFacts:
    """Add up a cluster. One container without a declared capacity makes it unlimited."""
    live = _live(containers)
    lasting = _lasting(containers)
    boundless = tuple(row.name for row in lasting if not _is_bounded(row))
    reports: dict[str, list[TaskReport]] = {}
    for row in live:
        for task in row.tasks:
            reports.setdefault(task.job, []).append(task)
    known = {view.name: view for view in views}
    claims = (claim_of(view, reports.get(name, ())) for name, view in known.items())
    return ClusterFacts(
        total=_total(lasting) if lasting and not boundless else None,
        containers=len(lasting),
        boundless=boundless,
        claims=tuple(claim for claim in claims if claim is not None),
        views=known,
    )


def is_limited(containers: Sequence[ContainerRow]) -> bool:
    """Whether the cluster's capacity is limited."""
    lasting = _lasting(containers)
    return bool(lasting) and all(map(_is_bounded, lasting))


def _live(containers: Sequence[ContainerRow]) -> list[ContainerRow]:
    return [row for row in containers if row.state is ContainerState.LIVE and not row.known_dead]


def _lasting(containers: Sequence[ContainerRow]) -> list[ContainerRow]:
    # Tasks of a draining container need capacity elsewhere.
    return [row for row in _live(containers) if not row.draining]


def _is_bounded(row: ContainerRow) -> bool:
    return len(row.capacity) == len(KINDS)


def _total(rows: Sequence[ContainerRow]) -> dict[str, float]:
    """The total of each kind that any container declares."""
    sums = {kind: sum(row.capacity[place] for row in rows) for place, kind in enumerate(KINDS)}
    return {kind: most for kind, most in sums.items() if most > 0}


def claim_of(view: JobView, tasks: Sequence[TaskReport]) -> Claim | None:
    """A job's claim; None if it has none."""
    stopped = is_stopped_here(view)
    config = view.expected
    runs = view.running is not None and view.running.state == "running"
    if not stopped and not (config.state == "running" if config is not None else runs):
        return None  # a user stopped it
    wanted = _needs(config, config.task_count) if config is not None else {}
    if runs and not stopped:
        assert view.running is not None
        # While it changes either shape may run.
        there = _needs(view.running.config, len(set(view.running.mapping)))
        wanted = {kind: max(wanted.get(kind, 0.0), amount) for kind, amount in there.items()}
    chosen = config or (None if view.running is None else view.running.config)
    return Claim(
        job=view.name,
        reserved=wanted,
        used=_used(view, tasks),
        priority=0 if chosen is None else chosen.priority,
        # A state set in a layer above the scaler's cannot be overruled here.
        privileged=(chosen is not None and chosen.privileged) or _is_pinned(view),
        is_stopped=stopped,
    )


def is_stopped_here(view: JobView) -> bool:
    """Whether the capacity manager stopped the job."""
    state = next((row.body.get("state") for row in view.layers if row.layer == LAYER), None)
    is_stopped = view.expected is not None and view.expected.state == "stopped"
    return state == "stopped" and is_stopped and _would_run(view)


def _would_run(view: JobView) -> bool:
    others = [row for row in sorted(view.layers, key=lambda row: row.precedence) if row.layer != LAYER]
    states = [row.body["state"] for row in others if row.body.get("state") is not None]
    return not states or states[-1] == "running"


def _is_pinned(view: JobView) -> bool:
    return any(row.precedence > PRECEDENCE and row.body.get("state") is not None for row in view.layers)


def _needs(config: JobConfig, tasks: int) -> dict[str, float]:
    return {kind: amount * tasks for kind, amount in zip(KINDS, reserved_of(config), strict=True)}


def _used(view: JobView, tasks: Sequence[TaskReport]) -> dict[str, float] | None:
    """What its tasks used according to their last reports; None unless all of them reported."""
    running = view.running
    if running is None or len({task.task_id for task in tasks}) < len(set(running.mapping)):
        return None
    reserved, threads = reserved_of(running.config), running.config.threads
    loads = [measured_load(reserved, threads, task.metrics) for task in tasks]
    return {kind: sum(load[place] for load in loads) for place, kind in enumerate(KINDS)}


ACTOR = Actor(name="capacity", role="scaler")
SOURCE = "capacity"
# Capacity must be missing for this time before jobs are stopped: a restarting container returns sooner.
PATIENCE_MS: Millis = 120_000
IDLE_MS: Millis = 60_000  # interval at which jobs are added up while nothing is limited

log = structlog.get_logger(__name__)
Decision = StopJob | BringBack | OutOfRoom


class LayerPatcher(Protocol):
    """Writes a layer of a job: the method of the Job Service, or the control plane's."""

    def __call__(
        self,
        job: str,
        layer: str,
        changes: Mapping[str, Any],
        /,
        *,
        expected_version: int | None,
        actor: Actor,
        reason: str,
        idempotency_key: str | None,
    ) -> int:
        """Change one layer of one job; returns the job's new version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    facts: ClusterFacts
    stock: Stock | None  # None: not limited


class CapacityManager:
    """One cluster's capacity. It stops a job by `state` in the scaler layer, which oncall overrules."""

    def __init__(
        self,
        jobs: JobReads,
        fleet: FleetView,
        patch: LayerPatcher,
        patience_ms: Millis = PATIENCE_MS,
        *,
        rest: Rest = no_rest,
    ) -> None:
        """`rest` is called between slices of reading all jobs, so that other threads can run."""
        self._jobs, self._fleet, self._patch, self._patience_ms = jobs, fleet, patch, patience_ms
        self._rest = rest
        self._last: _Snapshot | None = None
        self._read_ms: Millis = 0
        self._since: dict[str, Millis] = {}  # since when capacity is short, and each job could come back
        self._out_of_room = ""

    # -- for the scaler ---------------------------------------------------------------------------------

    def stock(self) -> Stock | None:
        """The cluster's stock now, including writes a moment ago; None if it is not limited."""
        return self._take_snapshot(self._rest).stock

    # -- the round --------------------------------------------------------------------------------------

    def tick(self, now_ms: Millis) -> None:
        """Read, decide, act. A decision is carried out once it has held for `patience_ms`."""
        if self._is_idle(now_ms):
            return
        self._last, self._read_ms = self._take_snapshot(self._rest), now_ms
        decisions = self._decide(self._last.facts)
        self._out_of_room = next((item.reason for item in decisions if isinstance(item, OutOfRoom)), "")
        self._since = {key: self._since_ms(key, now_ms) for key in map(_due, decisions)}
        for item in decisions:
            if now_ms - self._since[_due(item)] >= self._patience_ms:
                self._carry_out(item, self._last.facts)

    def _is_idle(self, now_ms: Millis) -> bool:
        """Whether nothing is limited and no job is stopped, so that jobs are added up less often."""
        last = self._last
        if last is None or last.stock is not None or not 0 <= now_ms - self._read_ms < IDLE_MS:
            return False
        is_any_stopped = any(claim.is_stopped for claim in last.facts.claims)
        return not is_any_stopped and not is_limited(self._fleet.containers())

    def levels(self, now_ms: Millis) -> Levels:
        """Alerts about capacity as of the last round."""
        if self._last is None:
            return {}
        found: dict[str, tuple[RaiseAlert, ...]] = {}
        stock = self._last.stock
        fleet = []
        if self._out_of_room:
            fleet.append(
                RaiseAlert(
                    key="out_of_room",
                    severity="critical",
                    text=self._out_of_room,
                    what_to_do="add containers; see what is reserved: penstock capacity",
                )
            )
        if stock is not None and stock.short_of:
            kinds = ", ".join(stock.short_of)
            fleet.append(
                RaiseAlert(
                    key="capacity_short",
                    text=f"no {kinds} is left to reserve: jobs cannot scale up",
                    what_to_do="add containers, or let jobs reserve less: penstock capacity",
                    evidence={kind: round(stock.reserved[kind], 3) for kind in stock.short_of},
                )
            )
        if fleet:
            found[FLEET] = tuple(fleet)
        for claim in self._last.facts.claims:
            if claim.is_stopped:
                found[claim.job] = (_stopped(claim.job, self._last.facts),)
        return found

    def to_json(self) -> dict[str, Any]:
        """The cluster's capacity now, for the API; works on any instance."""
        snapshot = self._take_snapshot()
        facts, stock = snapshot.facts, snapshot.stock
        every = take_stock(dict.fromkeys(KINDS, 0.0), facts.claims)
        return {
            "is_limited": stock is not None,
            "containers": facts.containers,
            "boundless": list(facts.boundless),
            "kinds": [
                {
                    "kind": kind,
                    "total": None if stock is None else stock.total.get(kind),
                    "reserved": round(every.reserved[kind], 6),
                    "used": round(every.used[kind], 6),
                    "remaining": None if stock is None else _rounded(stock.remaining.get(kind)),
                }
                for kind in KINDS
            ],
            "short_of": [] if stock is None else list(stock.short_of),
            "jobs": len(facts.claims),
            "stopped": [
                {
                    "job": claim.job,
                    "priority": claim.priority,
                    "reason": _why(claim.job, facts),
                    "reserved": {kind: round(amount, 6) for kind, amount in claim.reserved.items()},
                }
                for claim in facts.claims
                if claim.is_stopped
            ],
        }

    def _take_snapshot(self, rest: Rest | None = None) -> _Snapshot:
        facts = read_cluster_facts(self._jobs.every_view(rest), self._fleet.containers())
        stock = None if facts.total is None else take_stock(facts.total, facts.claims)
        return _Snapshot(facts=facts, stock=stock)

    def _decide(self, facts: ClusterFacts) -> tuple[Decision, ...]:
        if facts.total is not None:
            return decide_stops(facts.total, facts.claims)
        if not facts.containers:
            return ()  # without containers nothing is known about the capacity
        reason = "the cluster is not limited any more"
        return tuple(BringBack(job=claim.job, reason=reason) for claim in facts.claims if claim.is_stopped)

    def _since_ms(self, key: str, now_ms: Millis) -> Millis:
        since_ms = self._since.get(key, now_ms)
        return since_ms if since_ms <= now_ms else now_ms  # the clock was set back

    def _carry_out(self, item: Decision, facts: ClusterFacts) -> None:
        if isinstance(item, OutOfRoom):
            return  # `levels` raises an alert
        view = facts.views[item.job]
        state = "stopped" if isinstance(item, StopJob) else None
        try:
            self._patch(
                item.job,
                LAYER,
                {"state": state},
                expected_version=view.expected_version,
                actor=ACTOR,
                reason=item.reason,
                idempotency_key=None,
            )
        except (
            PenstockError
        ) as error:  # the job was changed or removed meanwhile: the next round decides again
            log.warning("a decision about capacity was not written", job=item.job, error=error.what)
            return
        log.warning("capacity", job=item.job, state=state or "may run again", reason=item.reason)


def _due(item: Decision) -> str:
    """The key of a decision's patience: one for a shortage, one for each job that comes back."""
    return f"back {item.job}" if isinstance(item, BringBack) else "short"


def _why(job: str, facts: ClusterFacts) -> str:
    view = facts.views[job]
    assert is_stopped_here(view)
    found = view.provenance.get("state")
    return "" if found is None else found.reason


def _stopped(job: str, facts: ClusterFacts) -> RaiseAlert:
    return RaiseAlert(
        key="stopped_for_capacity",
        severity="critical",
        text=f"stopped so that others can run: {_why(job, facts)}",
        what_to_do="add containers, or wait: it is resumed when capacity is free; see penstock capacity",
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
