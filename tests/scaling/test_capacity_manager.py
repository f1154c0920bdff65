"""The capacity manager on a real store: who stops when the cluster is short, who comes back, who is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.app import ControlPlane
from penstock.fleet.messages import Heartbeat, TaskReport
from penstock.scaling.capacity_manager import CapacityManager
from penstock.settings import Settings
from tests.builders import ADMIN, ONCALL, a_body
from tests.ready import ready_folder

PATIENCE_MS = 60_000
NOW = 1_790_000_000_000
World = tuple[ControlPlane, CapacityManager]


@pytest.fixture(params=["sqlite", "postgres"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A control plane without loops; rounds are run by hand."""
    shared = request.param == "postgres"
    database = request.getfixturevalue("postgres").new_database() if shared else ""
    plane = ControlPlane(Settings(folder=ready_folder(tmp_path), database=database))
    yield plane, CapacityManager(plane.jobs, plane.fleet, plane.patch_layer, PATIENCE_MS)
    plane.stop()


def a_container(plane: ControlPlane, name: str, *capacity: float, tasks: tuple[TaskReport, ...] = ()) -> None:
    plane.register_container(name, "life", folder_id=f"f-{name}")
    plane.on_heartbeat(
        Heartbeat(
            container=name, incarnation="life", sequence=1, capacity=capacity, tasks=tasks, engine_ready=True
        )
    )


def a_job(plane: ControlPlane, name: str, cpu: float, **changes: Any) -> None:
    body = a_body(name, resources={"cpu": cpu, "memory_mb": 100}, **changes)
    asked = {"actor": ADMIN, "reason": "new", "idempotency_key": None, "now_ms": NOW}
    plane.jobs.create(name, body, birth=f"birth-{name}", **asked)


def states(plane: ControlPlane) -> dict[str, str]:
    return {view.name: view.config.state for view in plane.jobs.every_view()}


def rounds(manager: CapacityManager, *, begin_ms: int = NOW) -> int:
    manager.tick(begin_ms)
    manager.tick(begin_ms + PATIENCE_MS)
    manager.tick(begin_ms + PATIENCE_MS + 1)
    return begin_ms + PATIENCE_MS + 1


def test_the_lowest_priority_stops_and_comes_back_with_its_reason(world: World):
    plane, manager = world
    a_container(plane, "c1", 4, 8192, 0, 0)
    a_job(plane, "demo.low", 3, priority=-5)
    a_job(plane, "demo.high", 3, priority=5)
    manager.tick(NOW)
    assert states(plane) == {"demo.low": "running", "demo.high": "running"}, "it may be over soon"
    now_ms = rounds(manager)
    assert states(plane) == {"demo.low": "stopped", "demo.high": "running"}
    decided = plane.jobs.view("demo.low").provenance["state"]
    assert (decided.layer, decided.actor) == ("scaler", "capacity") and "cpu" in decided.reason
    (stopped,) = manager.to_json()["stopped"]
    assert stopped["job"] == "demo.low" and stopped["reason"] == decided.reason
    assert [alert.key for alert in manager.levels(NOW)["demo.low"]] == ["stopped_for_capacity"]
    a_container(plane, "c2", 4, 8192, 0, 0)
    rounds(manager, begin_ms=now_ms)
    assert states(plane)["demo.low"] == "running" and manager.to_json()["stopped"] == []
    assert plane.jobs.audit(subject="demo.low")[0].actor == "capacity"


def test_each_job_waits_for_its_own_room(world: World):
    """Plan: a small job may come back at once, a large one only when a container joins later."""
    plane, manager = world
    a_container(plane, "c1", 4, 8192, 0, 0)
    a_job(plane, "demo.a_small", 0.1, priority=-9)
    a_job(plane, "demo.big", 3, priority=-9)
    a_job(plane, "demo.high", 3)
    now_ms = rounds(manager)
    assert states(plane)["demo.big"] == "stopped"
    manager.tick(now_ms + 1)
    a_container(plane, "c2", 9, 8192, 0, 0)
    manager.tick(now_ms + PATIENCE_MS)
    assert states(plane)["demo.big"] == "stopped"
    manager.tick(now_ms + 2 * PATIENCE_MS)
    assert set(states(plane).values()) == {"running"}


def test_a_container_without_capacity_makes_everything_boundless(world: World):
    plane, manager = world
    a_container(plane, "c1", 1, 1024, 0, 0)
    a_container(plane, "c2")
    a_job(plane, "demo.low", 30)
    rounds(manager)
    assert states(plane) == {"demo.low": "running"} and not manager.to_json()["is_limited"]
    assert manager.stock() is None


def test_without_containers_nothing_is_decided(world: World):
    plane, manager = world
    a_job(plane, "demo.low", 30)
    rounds(manager)
    assert states(plane) == {"demo.low": "running"}


@pytest.mark.parametrize("guard", ["privileged", "oncall"])
def test_privileged_jobs_and_those_oncall_speaks_for_are_never_stopped(world: World, guard: str):
    plane, manager = world
    a_container(plane, "c1", 1, 1024, 0, 0)
    a_job(plane, "demo.low", 3, privileged=guard == "privileged")
    if guard == "oncall":
        plane.jobs.patch_layer(
            "demo.low", "oncall", {"state": "running"}, actor=ONCALL, reason="x", idempotency_key=None, now_ms=NOW
        )  # fmt: skip
    rounds(manager)
    assert states(plane) == {"demo.low": "running"}
    assert "out_of_room" in [alert.key for alert in manager.levels(NOW)["fleet"]]


def test_oncall_brings_a_stopped_job_back_and_it_stays(world: World):
    plane, manager = world
    a_container(plane, "c1", 1, 1024, 0, 0)
    a_job(plane, "demo.low", 3)
    now_ms = rounds(manager)
    assert states(plane) == {"demo.low": "stopped"}
    plane.jobs.set_state(
        "demo.low", "running", actor=ONCALL, reason="needed", idempotency_key=None, now_ms=NOW
    )  # fmt: skip
    rounds(manager, begin_ms=now_ms)
    assert states(plane) == {"demo.low": "running"}


def test_what_a_person_stopped_claims_nothing_and_is_not_brought_back(world: World):
    plane, manager = world
    a_container(plane, "c1", 4, 8192, 0, 0)
    a_job(plane, "demo.off", 9, state="stopped")
    rounds(manager)
    assert states(plane) == {"demo.off": "stopped"} and manager.to_json()["jobs"] == 0


def test_what_is_left_is_for_the_scaler(world: World):
    plane, manager = world
    a_container(plane, "c1", 10, 1000, 0, 0)
    a_job(plane, "demo.a", 2, task_count=2)
    manager.tick(NOW)
    stock = manager.stock()
    assert stock is not None
    assert stock.remaining["cpu"] == pytest.approx(5.0) and stock.remaining["memory_mb"] == pytest.approx(700)
    assert "disk_mb" not in stock.remaining, "nobody declared any"
    assert plane.capacity.stock() == stock, "any instance may be asked before its first round"


def test_somebody_who_writes_meanwhile_is_not_overwritten(world: World):
    plane, manager = world
    a_container(plane, "c1", 1, 1024, 0, 0)
    a_job(plane, "demo.low", 3)
    write: Callable[..., int] = plane.patch_layer

    def interrupted(job: str, *args: Any, **kwargs: Any) -> int:
        write(
            job,
            "oncall",
            {"priority": 9},
            actor=ONCALL,
            reason="x",
            idempotency_key=None,
            expected_version=None,
        )
        return write(job, *args, **kwargs)

    other = CapacityManager(plane.jobs, plane.fleet, interrupted, 0)  # type: ignore[arg-type]
    other.tick(NOW)
    assert states(plane) == {"demo.low": "running"}
    rounds(manager)
    assert states(plane) == {"demo.low": "stopped"}, "the next round decides on what is there now"


def test_where_nothing_is_limited_jobs_are_added_up_once_a_minute_until_it_is(world: World):
    """Plan: no limit; then one that is too small for the job, which counts at once; then none again."""
    plane, manager = world
    a_container(plane, "c1")
    a_job(plane, "demo.one", 2.0)
    looks: list[int] = []
    manager._rest = lambda: looks.append(1)  # once per look at all jobs
    for second in (0, 1, 59, 60, 61):
        manager.tick(NOW + second * 1000)
    assert len(looks) == 2
    beat = partial(Heartbeat, container="c1", incarnation="life", engine_ready=True)
    plane.on_heartbeat(beat(sequence=2, capacity=(1.0, 1000.0, 1000.0, 1000.0)))
    now_ms = rounds(manager, begin_ms=NOW + 62_000)
    assert states(plane) == {"demo.one": "stopped"}
    plane.on_heartbeat(beat(sequence=3))
    for passed in (1, 2, PATIENCE_MS + 3):
        manager.tick(now_ms + passed)
    assert states(plane) == {"demo.one": "running"}, "whom it stopped comes back"
