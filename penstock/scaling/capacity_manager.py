"""The capacity manager (Turbine V-F): what a cluster has left, who stops when it is short, who comes back.

It is off where a container declares no capacity: what is not limited is never short.
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

LAYER = "scaler"  # where the capacity manager says that a job is stopped
PRECEDENCE = next(layer.precedence for layer in DEFAULT_LAYERS if layer.name == LAYER)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """One look at a cluster."""

    total: Amount | None  # None: not limited, or nobody is there
    containers: int  # that live and do not drain
    boundless: tuple[str, ...]  # those of them that declare nothing
    claims: tuple[Claim, ...]
    views: Mapping[str, JobView]


def look_at_cluster(views: Iterable[JobView], containers: Sequence[ContainerRow]) -> ClusterFacts:
    """Add it up. One container without a declared capacity makes the cluster boundless."""
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
    """Whether there is anything to add up jobs for."""
    lasting = _lasting(containers)
    return bool(lasting) and all(map(_is_bounded, lasting))


def _live(containers: Sequence[ContainerRow]) -> list[ContainerRow]:
    return [row for row in containers if row.state is ContainerState.LIVE and not row.known_dead]


def _lasting(containers: Sequence[ContainerRow]) -> list[ContainerRow]:
    # What runs on one that drains has to find room elsewhere.
    return [row for row in _live(containers) if not row.draining]


def _is_bounded(row: ContainerRow) -> bool:
    return len(row.capacity) == len(KINDS)


def _total(rows: Sequence[ContainerRow]) -> dict[str, float]:
    """Of each kind that somebody has."""
    sums = {kind: sum(row.capacity[place] for row in rows) for place, kind in enumerate(KINDS)}
    return {kind: most for kind, most in sums.items() if most > 0}


def claim_of(view: JobView, tasks: Sequence[TaskReport]) -> Claim | None:
    """What a job has reserved, or would if it ran; None: it claims nothing."""
    stopped = is_stopped_here(view)
    config = view.expected
    runs = view.running is not None and view.running.state == "running"
    if not stopped and not (config.state == "running" if config is not None else runs):
        return None  # a person stopped it
    wanted = _needs(config, config.task_count) if config is not None else {}
    if runs and not stopped:
        assert view.running is not None
        # While it changes both shapes may be there in turn.
        there = _needs(view.running.config, len(set(view.running.mapping)))
        wanted = {kind: max(wanted.get(kind, 0.0), amount) for kind, amount in there.items()}
    chosen = config or (None if view.running is None else view.running.config)
    return Claim(
        job=view.name,
        reserved=wanted,
        used=_used(view, tasks),
        priority=0 if chosen is None else chosen.priority,
        # What somebody above the capacity manager said about its state holds.
        privileged=(chosen is not None and chosen.privileged) or _is_pinned(view),
        is_stopped=stopped,
    )


def is_stopped_here(view: JobView) -> bool:
    """Whether the capacity manager's word is what stops it."""
    said = next((row.body.get("state") for row in view.layers if row.layer == LAYER), None)
    is_stopped = view.expected is not None and view.expected.state == "stopped"
    return said == "stopped" and is_stopped and _would_run(view)


def _would_run(view: JobView) -> bool:
    others = [row for row in sorted(view.layers, key=lambda row: row.precedence) if row.layer != LAYER]
    said = [row.body["state"] for row in others if row.body.get("state") is not None]
    return not said or said[-1] == "running"


def _is_pinned(view: JobView) -> bool:
    return any(row.precedence > PRECEDENCE and row.body.get("state") is not None for row in view.layers)


def _needs(config: JobConfig, tasks: int) -> dict[str, float]:
    return {kind: amount * tasks for kind, amount in zip(KINDS, reserved_of(config), strict=True)}


def _used(view: JobView, tasks: Sequence[TaskReport]) -> dict[str, float] | None:
    """What its tasks were last seen using; None unless all of them said something."""
    running = view.running
    if running is None or len({task.task_id for task in tasks}) < len(set(running.mapping)):
        return None
    reserved, threads = reserved_of(running.config), running.config.threads
    loads = [measured_load(reserved, threads, task.metrics) for task in tasks]
    return {kind: sum(load[place] for load in loads) for place, kind in enumerate(KINDS)}


ACTOR = Actor(name="capacity", role="scaler")
SOURCE = "capacity"
# A container that restarts is soon back: its capacity must be missing for longer before anybody stops.
PATIENCE_MS: Millis = 120_000
IDLE_MS: Millis = 60_000  # so often all jobs are looked at where nothing is limited

log = structlog.get_logger(__name__)
Decision = StopJob | BringBack | OutOfRoom


class PatchLayer(Protocol):
    """The Job Service's one write that this needs."""

    def __call__(
        self,
        job: str,
        layer: str,
        changes: dict[str, Any],
        /,
        *,
        expected_version: int | None,
        actor: Actor,
        reason: str,
        idempotency_key: str | None,
    ) -> int:
        """Change one layer of one job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    facts: ClusterFacts
    stock: Stock | None  # None: not limited


class CapacityManager:
    """One cluster. What it decides it writes as `state` into the scaler layer, where oncall overrules it."""

    def __init__(
        self,
        jobs: JobReads,
        fleet: FleetView,
        patch: PatchLayer,
        patience_ms: Millis = PATIENCE_MS,
        *,
        rest: Rest = no_rest,
    ) -> None:
        """`rest` is called now and then in a look at all jobs, for whoever waits meanwhile."""
        self._jobs, self._fleet, self._patch, self._patience_ms = jobs, fleet, patch, patience_ms
        self._rest = rest
        self._last: _Look | None = None
        self._looked_ms: Millis = 0
        self._since: dict[str, Millis] = {}  # since when it is short, and since when each job may come back
        self._out_of_room = ""

    # -- for the scaler ---------------------------------------------------------------------------------

    def stock(self) -> Stock | None:
        """The cluster now, read afresh: what was written a moment ago is claimed. None: not limited."""
        return self._look(self._rest).stock

    # -- the round --------------------------------------------------------------------------------------

    def tick(self, now_ms: Millis) -> None:
        """Look, decide, act; a decision is carried out once it has been due for a while."""
        if self._is_idle(now_ms):
            return
        self._last, self._looked_ms = self._look(self._rest), now_ms
        decisions = self._decide(self._last.facts)
        self._out_of_room = next((item.reason for item in decisions if isinstance(item, OutOfRoom)), "")
        self._since = {key: self._since_ms(key, now_ms) for key in map(_due, decisions)}
        for item in decisions:
            if now_ms - self._since[_due(item)] >= self._patience_ms:
                self._carry_out(item, self._last.facts)

    def _is_idle(self, now_ms: Millis) -> bool:
        """Whether nothing is limited and nobody is stopped: then jobs need not be added up every time."""
        last = self._last
        if last is None or last.stock is not None or not 0 <= now_ms - self._looked_ms < IDLE_MS:
            return False
        is_any_stopped = any(claim.is_stopped for claim in last.facts.claims)
        return not is_any_stopped and not is_limited(self._fleet.containers())

    def levels(self, now_ms: Millis) -> Levels:
        """What is wrong with capacity, as of the last round."""
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
                    what_to_do="add containers; penstock capacity",
                )
            )
        if stock is not None and stock.short_of:
            kinds = ", ".join(stock.short_of)
            fleet.append(
                RaiseAlert(
                    key="capacity_short",
                    text=f"nothing may be given any more of {kinds}: jobs cannot grow",
                    what_to_do="add containers, or let jobs reserve less; penstock capacity",
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
        """The cluster now, read afresh: any instance may be asked."""
        look = self._look()
        facts, stock = look.facts, look.stock
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

    def _look(self, rest: Rest | None = None) -> _Look:
        facts = look_at_cluster(self._jobs.every_view(rest), self._fleet.containers())
        stock = None if facts.total is None else take_stock(facts.total, facts.claims)
        return _Look(facts=facts, stock=stock)

    def _decide(self, facts: ClusterFacts) -> tuple[Decision, ...]:
        if facts.total is not None:
            return decide_stops(facts.total, facts.claims)
        if not facts.containers:
            return ()  # nobody is there to run anything, which says nothing about room
        reason = "the cluster is not limited any more"
        return tuple(BringBack(job=claim.job, reason=reason) for claim in facts.claims if claim.is_stopped)

    def _since_ms(self, key: str, now_ms: Millis) -> Millis:
        since_ms = self._since.get(key, now_ms)
        return since_ms if since_ms <= now_ms else now_ms  # the clock was set back

    def _carry_out(self, item: Decision, facts: ClusterFacts) -> None:
        if isinstance(item, OutOfRoom):
            return  # an alarm tells of it
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
        except PenstockError as error:  # somebody wrote meanwhile, or removed it: the next round sees that
            log.warning("a decision about capacity was not written", job=item.job, error=error.what)
            return
        log.warning("capacity", job=item.job, state=state or "may run again", reason=item.reason)


def _due(item: Decision) -> str:
    """Whose patience counts: a shortage is one, whoever stops for it; each job comes back for itself."""
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
        what_to_do="penstock capacity; it comes back by itself when there is room",
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
