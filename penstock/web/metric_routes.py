"""Routes about metrics: what a job did, minute by minute."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Response

from penstock.app import ControlPlane
from penstock.core.token_store import Caller
from penstock.resources.frames import METRICS, MINUTE_MS
from penstock.resources.retriever import MINUTES_MAX, history
from penstock.web import replies
from penstock.web.answers import answer
from penstock.web.bodies import Name
from penstock.web.guard import Guard
from penstock.web.pools import LONG
from penstock.web.replies import problems

Metrics = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=1000,
        pattern=r"^[a-z_]+(,[a-z_]+)*$",
        description="Names with commas between; none: all of which something is known.",
    ),
]
Minutes = Annotated[int, Query(ge=1, le=MINUTES_MAX, description="How many, up to the last that is over.")]


def add_metric_routes(router: APIRouter, plane: ControlPlane, guard: Guard) -> None:
    """What jobs did."""

    @router.get("/jobs/{name}/metrics", response_model=replies.JobMetrics, responses=problems(404))
    @LONG
    def get_job_metrics(
        name: Name,
        caller: Caller = guard.allow("job.read"),
        metrics: Metrics = None,
        minutes: Minutes = 60,
    ) -> Response:
        """What a job did in its last minutes, a number per metric and minute; null where it is unknown."""
        plane.jobs.view(name)  # who asks about nobody is told so
        return answer(metrics_of(plane, name, metrics.split(",") if metrics else None, minutes))


def metrics_of(plane: ControlPlane, job: str, metrics: list[str] | None, minutes: int) -> dict[str, Any]:
    """The numbers of one job as JSON."""
    found = history(
        plane.metrics,
        job,
        list(METRICS) if metrics is None else metrics,
        minutes,
        now_ms=plane.clock.now_ms(),
    )
    return {
        "job": job,
        "first_ms": found.first_minute * MINUTE_MS,
        "minutes": minutes,
        "metrics": {
            name: {
                "unit": METRICS[name].unit,
                "values": [None if value != value else round(value, 6) for value in points.tolist()],
            }
            for name, points in found.values.items()
            if metrics is not None or not np.isnan(points).all()
        },
    }
