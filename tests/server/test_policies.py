"""Policies over HTTP on a real control plane: a straggler is excluded and its shard moves; looks, reasons, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.app import ControlPlane
from penstock.core.errors import NotFound, Refused
from penstock.fleet.messages import Heartbeat, ShardEntry, ShardState, TaskReport
from penstock.fleet.shard_load import shard_of
from penstock.scaling.metrics.frames import METRICS
from penstock.scaling.metrics.minutes import Minute
from penstock.scaling.policies.policy import ChangeLayer, ExcludeContainers, MoveTasks
from penstock.scaling.policies.service import TRIES
from penstock.settings import Settings
from tests.builders import ADMIN, a_process
from tests.server.test_fleet import settle
from tests.server.world import World, a_client, a_world
from tests.waiting import until

JOB = "demo.tick"
TASKS = 6
NAMES = ("c1", "c2", "c3")


class Boxes:
    """Containers that run nothing: they do as told at once, and report what a test says of tasks."""

    def __init__(self, plane: ControlPlane, *names: str) -> None:
        self.plane, self.names, self.sequence = plane, names, 0
        self.shards: dict[str, tuple[ShardEntry, ...]] = dict.fromkeys(names, ())
        self.slow = ""  # the container whose tasks are busy for nothing
        self.generation = 1
        for name in names:
            plane.register_container(name, f"{name}-1", folder_id=f"folder-{name}")

    def home(self, task: str) -> str:
        shard = shard_of(task, self.plane.settings.shards)
        return next((row.container or "" for row in self.plane.fleet.shards() if row.shard == shard), "")

    def beat(self) -> None:
        """One beat of each, with what it was told last as done; then a round of the Shard Manager."""
        self.sequence += 1
        for name in self.names:
            held = {entry.shard for entry in self.shards[name] if entry.state is ShardState.OWNED}
            beat = Heartbeat(
                container=name,
                incarnation=f"{name}-1",
                sequence=self.sequence,
                acked=self.shards[name],
                tasks=tuple(self.report(n, name) for n in range(TASKS) if self.shard(n) in held),
                engine_ready=True,
                list_version=self.plane.task_service.version(),
                host="here",
            )
            self.shards[name] = self.plane.on_heartbeat(beat).shards
        self.plane._tick_shards()

    def shard(self, index: int) -> int:
        return shard_of(f"{JOB}/{index}", self.plane.settings.shards)

    def report(self, index: int, container: str) -> TaskReport:
        is_slow = container == self.slow
        numbers = {
            "busy": 0.95 if is_slow else 0.3,
            "processed_rate": 80.0 if is_slow else 100.0,
            "lag_s": 500.0,
        }
        return TaskReport(
            task_id=f"{JOB}/{index}", job=JOB, generation=self.generation, shard=self.shard(index), state="running",
            metrics=numbers,
        )  # fmt: skip

    def until(self, condition: Callable[[], object]) -> None:
        until(condition, step=self.beat)

    def is_calm(self) -> bool:
        rows = self.plane.fleet.shards()
        return (
            all(row.container is not None and row.state is ShardState.OWNED for row in rows)
            and len({task.task_id for _, task in self.plane.fleet.task_reports(JOB)}) == TASKS
        )


def record(plane: ControlPlane, lag_s: float = 500.0, minutes: int = 10) -> None:
    """The newest minutes of the job: it lags."""
    last = plane.clock.now_ms() // 60_000 - 1
    for minute in range(last - minutes + 1, last + 1):
        values = np.full((1, len(METRICS)), np.nan)
        values[0, list(METRICS).index("lag_s")] = lag_s
        plane.metrics.put(Minute(minute=minute, jobs=(JOB,), values=values))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path / "plane") as world:
        config = {"config": a_process(JOB, task_count=TASKS), "why": "new"}
        assert world.ask("PUT", f"/jobs/{JOB}", json=config).status_code == 201
        settle(world)
        yield world


@pytest.fixture
def boxes(world: World) -> Boxes:
    boxes = Boxes(world.plane, *NAMES)
    boxes.generation = world.plane.task_service.task_counts()[JOB][0]
    boxes.until(boxes.is_calm)
    return boxes


def lone_home(boxes: Boxes) -> str:
    """Brings one task alone to a container, so that it is the only straggler; returns where."""
    shards = {boxes.shard(index) for index in range(TASKS)}
    assert len(shards) == TASKS, "each task has a shard of its own"
    for index in range(TASKS):
        target = "c3" if index == 0 else NAMES[index % 2]
        if boxes.home(f"{JOB}/{index}") != target:
            boxes.plane.shard_manager.move(boxes.shard(index), target, boxes.plane.clock.boot_ms())
    boxes.until(boxes.is_calm)
    return boxes.home(f"{JOB}/0")


def manage(world: World, **body: Any) -> dict[str, Any]:
    answer = world.ask("POST", f"/jobs/{JOB}/manage", json=body, role="oncall")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def outcomes(found: dict[str, Any]) -> dict[str, str]:
    return {said["policy"]: said["outcome"] for said in found["said"]}


def test_a_straggler_is_found_its_container_is_excluded_and_its_shard_moves(world: World, boxes: Boxes):
    """Plan: one task is slow where it is. A dry look says so, the loop does it, the shard goes elsewhere and stays
    there; the reason is in the job's decisions; readmitted, it may come back.
    """
    place = boxes.slow = lone_home(boxes)
    boxes.beat()
    record(world.plane)
    before = world.everything()
    dry = manage(world, dry_run=True)
    assert dry["change"]["outcome"] == "would be done" and dry["change"]["policy"] == "stragglers"
    assert world.everything()["tables"] == before["tables"], "a dry look leaves everything as it is"
    boxes.until(
        lambda: (
            world.plane.policies.tick() or world.plane.policies.exclusions.current(world.plane.clock.now_ms())
        )
    )
    homes = [f"{JOB}/{index}" for index in range(TASKS)]
    boxes.until(lambda: boxes.is_calm() and all(boxes.home(task) != place for task in homes))
    found = world.ask("GET", f"/jobs/{JOB}/decisions?limit=100", role="reader").json()
    kinds = {entry["kind"] for entry in found["decisions"]}
    assert {"policy", "exclusion", "placement", "layer"} <= kinds
    entry = next(entry for entry in found["decisions"] if entry["kind"] == "policy")
    said = {said["policy"]: said for said in entry["data"]["said"]}["stragglers"]
    assert (
        said["outcome"] == "applied"
        and said["inputs"]["container"] == place
        and said["inputs"]["lag_s"] == 500
    )
    reasons = [entry["reason"] for entry in found["decisions"] if entry["kind"] == "placement"]
    assert f"{JOB} is excluded from {place}" in reasons
    ids = [entry["id"] for entry in found["decisions"]]
    assert ids == sorted(ids, reverse=True)
    # Looked at again it waits to see whether that helped, and says so.
    again = manage(world, policy="stragglers")
    assert again["change"] is None and list(outcomes(again)) == ["stragglers"]
    with a_client(world, "oncall") as client:
        assert client.readmit_job(JOB, why="mended")["lifted"] == 1
        assert client.readmit_job(JOB, why="mended")["lifted"] == 0


def test_the_same_answer_is_told_once(world: World, boxes: Boxes):
    record(world.plane, lag_s=1.0)
    boxes.beat()
    policies = world.plane.policies
    boxes.until(lambda: policies.tick() or JOB in policies.service.last)
    heard = len(world.plane.journal.entries(JOB, kind="policy"))
    assert heard == 1
    for _ in range(3):
        policies.service._next_ms.clear()
        policies.service._looked.clear()
        policies.service.last.clear()
        boxes.until(lambda: policies.tick() or JOB in policies.service.last)
    assert len(world.plane.journal.entries(JOB, kind="policy")) == heard


def test_without_metrics_nothing_is_done_and_the_reason_is_told(world: World, boxes: Boxes):
    boxes.beat()
    found = manage(world)
    assert found["change"] is None and set(outcomes(found)) == {"stragglers", "doctor", "untriaged"}
    said = {said["policy"]: said for said in found["said"]}
    assert said["stragglers"]["outcome"] == "broken" and "metrics" in said["stragglers"]["reason"]


def test_a_task_that_does_not_report_keeps_policies_from_judging(world: World, boxes: Boxes):
    record(world.plane)
    boxes.beat()
    jobs = world.plane.policies.jobs
    jobs.names()
    assert not hasattr(jobs.facts(JOB, ("lag_s",), 5), "reason")
    boxes.generation += 1  # what they report is of no generation that runs
    boxes.beat()
    jobs.names()
    assert "0 of 6 tasks report" in jobs.facts(JOB, ("lag_s",), 5).reason  # type: ignore[union-attr]
    assert jobs.facts(JOB, (), 5, ("lag_s", "cpu")).frame.last("lag_s") == 500  # type: ignore[union-attr]


def test_a_switched_off_policy_is_named_and_a_wrong_name_is_refused(world: World, boxes: Boxes):
    changes = {"changes": {"policies.stragglers.enabled": False}, "why": "not here"}
    assert world.ask("PATCH", f"/jobs/{JOB}/layers/oncall", json=changes).status_code == 200
    settle(world)
    assert outcomes(manage(world, policy="stragglers")) == {"stragglers": "off"}
    wrong = world.ask("POST", f"/jobs/{JOB}/manage", json={"policy": "straglers"})
    assert wrong.status_code == 404 and "did you mean `stragglers`?" in wrong.text
    assert world.ask("POST", "/jobs/nobody/manage", json={}).status_code == 404
    assert world.ask("GET", "/jobs/nobody/decisions").status_code == 404
    assert world.ask("POST", f"/jobs/{JOB}/manage", json={"dry_run": "yes"}).status_code == 422
    assert world.ask("POST", f"/jobs/{JOB}/readmit", json={"why": ""}).status_code == 422


def test_a_job_that_does_not_run_is_not_looked_at(world: World):
    body = {"state": "stopped", "why": "enough"}
    assert world.ask("POST", f"/jobs/{JOB}/state", json=body).status_code == 200
    settle(world)
    answer = world.ask("POST", f"/jobs/{JOB}/manage", json={})
    assert answer.status_code == 403 and "does not run" in answer.text


def test_decisions_come_in_pages(world: World):
    every = world.ask("GET", f"/jobs/{JOB}/decisions").json()["decisions"]
    assert len(every) >= 2
    first = world.ask("GET", f"/jobs/{JOB}/decisions?limit=1").json()
    assert first["decisions"] == every[:1] and first["next"] == every[0]["id"]
    second = world.ask("GET", f"/jobs/{JOB}/decisions?limit=1&before={first['next']}").json()
    assert second["decisions"] == every[1:2]


def apply(world: World, action: Any, *, version: int | None = None) -> None:
    expected = world.version(JOB) if version is None else version
    world.plane.policies.jobs.apply(JOB, "a_policy", action, expected_version=expected, reason="a\ntest")


def test_what_policies_decide_is_carried_out_or_refused_with_a_reason(world: World, boxes: Boxes):
    place = boxes.home(f"{JOB}/0")
    apply(world, ChangeLayer(changes={"resources": {"cpu": 0.5}}, text="less"))
    assert world.plane.jobs.view(JOB).config.resources.cpu == 0.5
    with pytest.raises(Exception, match="changed by another writer"):
        apply(world, ChangeLayer(changes={"threads": 2}, text="more"), version=1)
    settle(world)
    apply(world, MoveTasks(tasks=(f"{JOB}/0",), text="away"))
    boxes.until(lambda: boxes.home(f"{JOB}/0") != place)
    with pytest.raises(Refused, match="no container runs"):
        apply(world, MoveTasks(tasks=(f"{JOB}/77",), text="away"))
    with pytest.raises(Refused, match="cannot leave"):
        apply(world, ExcludeContainers(containers=NAMES, tasks=(), text="away"))
    for name in NAMES[1:]:
        world.plane.shard_manager.cordon(name, world.plane.clock.boot_ms())
    on_first = [index for index in range(TASKS) if boxes.home(f"{JOB}/{index}") == "c1"]
    boxes.until(boxes.is_calm)
    if on_first:
        with pytest.raises(Refused, match="cannot leave"):
            apply(world, MoveTasks(tasks=(f"{JOB}/{on_first[0]}",), text="away"))


def test_rescales_under_way_count(world: World, boxes: Boxes):
    jobs = world.plane.policies.jobs
    jobs.names()
    assert jobs.fleet().rescales_running == 0 and jobs.fleet().rescales_max == 10
    apply(world, ChangeLayer(changes={"task_count": 3}, text="less"))
    assert jobs.fleet().rescales_running == 1, "before the syncer has seen it"
    jobs.names()
    assert jobs.fleet().rescales_running == 1


def test_what_people_set_and_advice_only_is_seen(world: World, boxes: Boxes):
    changes = {"changes": {"task_count": 6, "policies.all.advice_only": True}, "why": "mine"}
    assert world.ask("PATCH", f"/jobs/{JOB}/layers/oncall", json=changes).status_code == 200
    settle(world)
    boxes.generation = world.plane.task_service.task_counts()[JOB][0]
    place = boxes.slow = lone_home(boxes)
    boxes.beat()
    record(world.plane)
    jobs = world.plane.policies.jobs
    jobs.names()
    managed = jobs.job(JOB)
    assert managed is not None and managed.round_job.advice_only and "task_count" in managed.round_job.oncall
    assert managed.signals.busy == 0.95 and "all" not in managed.settings
    found = manage(world)
    assert outcomes(found)["stragglers"] == "advised" and place in str(found["said"])
    assert jobs.job("nobody") is None


def test_any_instance_looks_and_of_two_at_once_one_is_told(postgres, tmp_path: Path):
    """Plan: two control planes on one database; the standby looks; while it does, the other writes the record."""
    settings = Settings(folder=tmp_path, database=postgres.new_database())
    one, other = ControlPlane(settings), ControlPlane(settings)
    try:
        one.jobs.create(
            JOB, a_process(JOB, task_count=TASKS), birth="b", actor=ADMIN, reason="new", idempotency_key=None,
            now_ms=one.clock.now_ms(),
        )  # fmt: skip
        until(lambda: one.jobs.view(JOB).is_in_sync, step=one._sync)
        assert not other.is_syncing
        asked: dict[str, Any] = {"policy": None, "is_dry": False, "asked_by": "olga"}
        assert other.policies.manage(JOB, **asked)["change"] is None
        records = other.policies.service._records
        load = records.load
        record_, version = load(JOB)
        late = _Late(records, lambda: one.policies.manage(JOB, **asked))
        other.policies.service._records = late  # type: ignore[assignment]
        with pytest.raises(Refused, match="at the same time"):
            other.policies.manage(JOB, **asked)
        assert load(JOB)[1] == version + TRIES and record_.said, "only the other wrote"
        late.times = 1  # whoever loses once, looks at what the other wrote and decides again
        assert other.policies.manage(JOB, **asked)["change"] is None
        assert load(JOB)[1] == version + TRIES + 2
        with pytest.raises(NotFound):
            other.policies.manage(JOB, **{**asked, "policy": "nope"})
    finally:
        one.stop()
        other.stop()


class _Late:
    """Records that somebody else writes between a look's read and its write."""

    def __init__(self, kept: Any, meanwhile: Callable[[], object]) -> None:
        self._kept, self._meanwhile, self.times = kept, meanwhile, 100

    def load(self, job: str) -> Any:
        found = self._kept.load(job)
        if self.times > 0:
            self.times -= 1
            self._meanwhile()
        return found

    def save(self, job: str, record: Any, version: int) -> bool:
        return bool(self._kept.save(job, record, version))

    def save_all(self, kept: Any) -> Any:
        return self._kept.save_all(kept)
