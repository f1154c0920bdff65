"""What a cluster has and who claims how much of it, from what containers and jobs say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.jobs.job_view import JobView
from penstock.jobs.layers import DEFAULT_LAYERS
from penstock.resources.capacity import Amount, Claim
from penstock.tasks.container_store import ContainerRow, ContainerState
from penstock.tasks.messages import TaskReport
from penstock.tasks.shard_load import KINDS, reserved_load, seen_load

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
    config: Mapping[str, Any] | None = view.config if not view.problem else None
    runs = view.running is not None and view.running.state == "running"
    if not stopped and not (config["state"] == "running" if config is not None else runs):
        return None  # a person stopped it
    wanted = _needs(config, int(config["task_count"])) if config is not None else {}
    if runs and not stopped:
        assert view.running is not None
        # While it changes both shapes may be there in turn.
        there = _needs(view.running.config, len(set(view.running.mapping)))
        wanted = {kind: max(wanted.get(kind, 0.0), amount) for kind, amount in there.items()}
    chosen = config if config is not None else view.running.config if view.running is not None else {}
    return Claim(
        job=view.name,
        reserved=wanted,
        used=_used(view, tasks),
        priority=int(chosen.get("priority", 0)),
        # What somebody above the capacity manager said about its state holds.
        privileged=bool(chosen.get("privileged", False)) or _is_pinned(view),
        is_stopped=stopped,
    )


def is_stopped_here(view: JobView) -> bool:
    """Whether the capacity manager's word is what stops it."""
    said = next((row.body.get("state") for row in view.layers if row.layer == LAYER), None)
    return said == "stopped" and not view.problem and view.config["state"] == "stopped" and _would_run(view)


def _would_run(view: JobView) -> bool:
    others = [row for row in sorted(view.layers, key=lambda row: row.precedence) if row.layer != LAYER]
    said = [row.body["state"] for row in others if row.body.get("state") is not None]
    return not said or said[-1] == "running"


def _is_pinned(view: JobView) -> bool:
    return any(row.precedence > PRECEDENCE and row.body.get("state") is not None for row in view.layers)


def _needs(config: Mapping[str, Any], tasks: int) -> dict[str, float]:
    return {kind: amount * tasks for kind, amount in zip(KINDS, reserved_load(config), strict=True)}


def _used(view: JobView, tasks: Sequence[TaskReport]) -> dict[str, float] | None:
    """What its tasks were last seen using; None unless all of them said something."""
    running = view.running
    if running is None or len({task.task_id for task in tasks}) < len(set(running.mapping)):
        return None
    loads = [seen_load(running.config, task.metrics) for task in tasks]
    return {kind: sum(load[place] for load in loads) for place, kind in enumerate(KINDS)}
