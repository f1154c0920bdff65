"""Claims about the scaler in a control plane: what it is told of jobs and containers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.app import REPORT_AGE_MAX_MS, ControlPlane
from penstock.fleet.messages import Heartbeat, TaskReport
from penstock.settings import Settings
from tests.builders import ADMIN, a_body

REPORT = TaskReport(task_id="a/0", job="a", generation=1, shard=0, state="running", metrics={"lag_s": 3.0})


@dataclass
class LateClock:
    at_ms: int

    def now_ms(self) -> int:
        return self.at_ms

    def boot_ms(self) -> int:
        return self.at_ms


def a_beat(name: str, *, capacity: tuple[float, ...] = (), tasks: tuple[TaskReport, ...] = ()) -> Heartbeat:
    return Heartbeat(
        container=name, incarnation="i", sequence=1, tasks=tasks, engine_ready=True, capacity=capacity
    )


def test_the_last_words_of_a_silent_container_are_no_load(tmp_path: Path):
    """Plan: a real control plane; a container reports, then the clock goes on without a beat."""
    plane = ControlPlane(Settings(folder=tmp_path))
    plane.register_container("c1", "i", folder_id="f")
    plane.on_heartbeat(a_beat("c1", tasks=(REPORT,)))
    assert plane.task_reports() == {"a": [REPORT]}
    (row,) = plane.shard_manager.containers()
    plane.clock = LateClock(row.seen_ms + REPORT_AGE_MAX_MS)  # type: ignore[assignment]
    assert plane.task_reports() == {"a": [REPORT]}
    plane.clock = LateClock(row.seen_ms + REPORT_AGE_MAX_MS + 1)  # type: ignore[assignment]
    assert plane.task_reports() == {}
    plane.stop()


def test_capacity_is_what_containers_say_or_without_limit(tmp_path: Path):
    plane = ControlPlane(Settings(folder=tmp_path))
    plane.register_container("c1", "i", folder_id="f")
    plane.on_heartbeat(a_beat("c1", capacity=(10.0, 8192.0, 0.0, 0.0)))
    found = plane._scaled.capacity()
    assert (found.container.cpu, found.container.memory_mb) == (10.0, 8192.0)
    assert found.remaining.cpu == pytest.approx(9.0) and found.remaining.disk_mb == float("inf")
    plane.register_container("c2", "i", folder_id="g")
    plane.on_heartbeat(a_beat("c2"))
    assert plane._scaled.capacity().container.cpu == float("inf")
    plane.stop()


def a_job(plane: ControlPlane, name: str, **changes: Any) -> None:
    body = a_body(name, resources={"cpu": 1.0, "memory_mb": 100}, **changes)
    asked = {"actor": ADMIN, "reason": "new", "idempotency_key": None, "now_ms": plane.clock.now_ms()}
    plane.jobs.create(name, body, birth="birth", **asked)


def test_the_scaler_is_told_what_the_capacity_manager_has_left(tmp_path: Path):
    """Plan: ten cores. What jobs are expected to get counts before it runs; when it is short, only privileged grow."""
    plane = ControlPlane(Settings(folder=tmp_path))
    plane.register_container("c1", "i", folder_id="f")
    plane.on_heartbeat(a_beat("c1", capacity=(10.0, 8192.0, 0.0, 0.0)))
    a_job(plane, "demo.a", task_count=2)
    found = plane._scaled.capacity()
    stock = plane.capacity.stock()
    assert stock is not None and found.remaining.cpu == stock.remaining["cpu"] == pytest.approx(7.0)
    assert not found.privileged_only
    version = plane.jobs.view("demo.a").expected_version
    plane._scaled.patch("demo.a", {"task_count": 8}, expected_version=version, reason="more")
    assert plane._scaled.capacity().remaining.cpu == pytest.approx(1.0), "it is claimed at once"
    a_job(plane, "demo.b", task_count=1)
    short = plane._scaled.capacity()
    assert short.privileged_only and short.remaining.cpu == pytest.approx(1.0), "the headroom is theirs"
    plane.stop()
