"""Claims about the route for a job's metrics."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.scaling.metrics.frames import METRICS
from penstock.scaling.metrics.minutes import Minute
from tests.server.world import JOB, World


def record(world: World, *busy: float) -> int:
    """The newest minutes of the job, the last that is over at the end; returns that minute."""
    last = world.plane.clock.now_ms() // 60_000 - 1
    for offset, value in enumerate(busy):
        values = np.full((1, len(METRICS)), np.nan)
        values[0, list(METRICS).index("busy")] = value
        world.plane.metrics.put(Minute(minute=last - len(busy) + 1 + offset, jobs=(JOB,), values=values))
    return last


def test_minutes_come_with_units_and_what_is_unknown_is_null(world: World):
    world.submit()
    last = record(world, 0.5, float("nan"), 0.25)
    found = world.ask("GET", f"/jobs/{JOB}/metrics?minutes=4&metrics=busy,cpu", role="reader").json()
    assert found["job"] == JOB and found["minutes"] == 4
    # A minute may have ended between the two.
    shift = found["first_ms"] // 60_000 - (last - 3)
    assert shift in (0, 1)
    assert found["metrics"]["busy"]["values"] == [None, 0.5, None, 0.25, None][shift : shift + 4]
    assert found["metrics"]["cpu"]["values"] == [None] * 4
    assert found["metrics"]["busy"]["unit"] == METRICS["busy"].unit
    every = world.ask("GET", f"/jobs/{JOB}/metrics", role="reader").json()
    assert list(every["metrics"]) == ["busy"] and len(every["metrics"]["busy"]["values"]) == 60


def test_a_job_of_which_nothing_is_known_has_no_lines(world: World):
    world.submit()
    assert world.ask("GET", f"/jobs/{JOB}/metrics").json()["metrics"] == {}


@pytest.mark.parametrize(
    ("query", "status", "says"),
    [
        ("metrics=buzy", 422, "did you mean `busy`?"),
        ("metrics=busy,busy", 422, "twice"),
        ("metrics=BUSY", 422, "metrics"),
        ("metrics=,", 422, "metrics"),
        ("metrics=", 422, "metrics"),
        ("minutes=0", 422, "minutes"),
        ("minutes=20161", 422, "minutes"),
        ("minutes=x", 422, "minutes"),
        ("minuets=5", 422, "did you mean `minutes`?"),
    ],
)
def test_what_cannot_be_asked_is_refused(shared: World, query: str, status: int, says: str):
    answer = shared.ask("GET", f"/jobs/{JOB}/metrics?{query}")
    assert answer.status_code == status and says in answer.text


def test_nobody_has_no_metrics(shared: World):
    assert shared.ask("GET", "/jobs/nobody/metrics").status_code == 404
