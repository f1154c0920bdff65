"""Claims about containers, shards and tasks over HTTP: what is seen, what may be asked, who may ask it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.container.process_runner import RotatedFile, log_file
from penstock.core.errors import ConfigError, NotFound, Refused
from penstock.fleet.messages import Heartbeat, HeartbeatReply, ShardState, TaskReport
from penstock.fleet.shard_load import SHARD_COUNT, shard_of
from penstock.server.routes import fleet as fleet_routes
from tests.builders import a_process
from tests.server.world import World, a_client, a_world
from tests.waiting import until

JOB = "demo.tick"


class Box:
    """A container over the API, without processes: says what it is told to say."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.sequence, self.order = world, name, 0, 0
        self.reply: HeartbeatReply | None = None
        with a_client(world, container=name) as client:
            client.register(name, f"{name}-1", f"folder-{name}")

    def beat(self, *tasks: str, **values: Any) -> HeartbeatReply:
        self.sequence += 1
        reports = tuple(
            TaskReport(task_id=task, job=task.rpartition("/")[0], generation=1, shard=0, state="running")
            for task in tasks
        )
        acked = self.reply.shards if self.reply is not None else ()
        beat = Heartbeat(
            container=self.name,
            incarnation=f"{self.name}-1",
            sequence=self.sequence,
            tasks=reports,
            acked=acked,
            order=self.order,
            engine_ready=True,
            host="here",
            **values,
        )
        with a_client(self.world, container=self.name) as client:
            self.reply = client.beat(beat)
        return self.reply


def settle(world: World) -> None:
    """Rounds of the syncer, whose plans run beside it, until every job runs as expected."""
    until(
        lambda: all(view.is_in_sync for view in world.plane.jobs.every_view()),
        "the jobs to settle",
        step=world.plane._sync,
    )


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Two containers and a job of two processes; shards are placed."""
    with a_world(tmp_path / "plane") as world:
        config = {"config": a_process(JOB, task_count=2), "why": "new"}
        assert world.ask("PUT", f"/jobs/{JOB}", json=config).status_code == 201
        settle(world)
        yield world


@pytest.fixture
def boxes(world: World) -> list[Box]:
    found = [Box(world, "c1"), Box(world, "c2")]
    for box in found:
        box.beat()
    world.plane._tick_shards()
    for box in found:
        box.beat()
    return found


def shard_of_c1(world: World) -> int:
    return next(row.shard for row in world.plane.fleet.shards() if row.container == "c1")


def test_containers_are_listed_with_what_they_said(world: World, boxes: list[Box]):
    boxes[0].beat(f"{JOB}/0", capacity=(4.0, 8000.0, 0.0, 0.0), region="north")
    with a_client(world, "reader") as client:
        one, two = client.containers()
    fleet_routes.Containers(containers=[one, two])
    assert (one["name"], one["state"], one["tasks"], one["region"], one["host"]) == (
        "c1",
        "live",
        1,
        "north",
        "here",
    )
    assert one["capacity"] == {"cpu": 4.0, "memory_mb": 8000.0, "disk_mb": 0.0, "network_mbps": 0.0}
    assert one["shards"] + two["shards"] == SHARD_COUNT


def test_a_container_is_cordoned_drained_and_taken_back_with_who_and_why(world: World, boxes: list[Box]):
    with a_client(world, "oncall") as client:
        assert client.cordon("c1", why="a look")["cordoned"]
        row = client.drain("c1", why="new kernel")
        assert (row["cordoned"], row["draining"]) == (True, True)
        assert client.drain("c1", why="new kernel")["draining"], "a repeat is harmless"
        world.plane._tick_shards()
        row = client.uncordon("c1", why="it is back")
        assert (row["cordoned"], row["draining"]) == (False, False)
    said = [(entry.actor, entry.decision, entry.reason) for entry in world.plane.journal.entries("c1")]
    assert ("a-oncall", "cordoned", "a look") in said
    assert ("a-oncall", "draining", "new kernel") in said
    assert ("a-oncall", "uncordoned", "it is back") in said


def test_an_order_needs_a_reason(world: World, boxes: list[Box]):
    before = world.everything()
    with a_client(world) as client:
        for order in (
            lambda: client.drain("c1", why=""),
            lambda: client.uncordon("c1", why="  "),
            lambda: client.move_shard(1, "c1", why=""),
            lambda: client.release_shard(1, why=""),
        ):
            with pytest.raises(ConfigError, match="the reason is not valid"):
                order()
    assert world.everything() == before


def test_a_name_that_is_not_there_gets_a_suggestion(world: World, boxes: list[Box]):
    with a_client(world) as client:
        with pytest.raises(NotFound) as caught:
            client.drain("c11", why="x")
        assert caught.value.fix == "did you mean `c1`?" and "c1, c2" in caught.value.why
        with pytest.raises(NotFound, match="no container 'c9'"):
            client.shards(container="c9")
        with pytest.raises(NotFound, match="no container 'c9'"):
            client.tasks(container="c9")
        with pytest.raises(NotFound) as caught:
            client.tasks(job="demo.tack")
        assert caught.value.fix == f"did you mean `{JOB}`?"
        with pytest.raises(NotFound) as caught:
            client.restart_task(JOB, 7, why="x")
        assert "its tasks now: 0, 1" in caught.value.why
        with pytest.raises(NotFound, match="there is no shard 64"):
            client.shard(64)
        with pytest.raises(NotFound, match="there is no shard 64"):
            client.move_shard(64, "c1", why="x")
        with pytest.raises(NotFound, match="no container 'c9'"):
            client.move_shard(1, "c9", why="x")


def test_shards_are_listed_moved_and_explained(world: World, boxes: list[Box]):
    shard = shard_of_c1(world)
    with a_client(world, "oncall") as client:
        every = client.shards()
        assert [row["shard"] for row in every] == list(range(SHARD_COUNT))
        assert sum(row["tasks"] for row in every) == 2
        assert {row["container"] for row in client.shards(container="c2")} <= {"c2"}
        page = client.move_shard(shard, "c2", why="closer to its data")
        assert (page["container"], page["target"], page["state"]) == ("c1", "c2", "dropping")
        assert client.move_shard(shard, "c2", why="closer to its data")["epoch"] == page["epoch"]
        with pytest.raises(Refused, match="already moving"):
            client.move_shard(shard, "c1", why="no, back")
        boxes[0].beat()
        boxes[0].beat()
        page = client.shard(shard)
    assert (page["container"], page["target"]) == ("c2", None)
    fleet_routes.ShardPage(**page)
    last = page["history"][-1]
    assert (last["actor"], last["decision"], last["reason"]) == (
        "a-oncall",
        "c1 → c2",
        "closer to its data",
    )
    assert page["history"][0]["reason"] and page["outlook"]


def test_an_explanation_names_tasks_and_load(world: World, boxes: list[Box]):
    shard = shard_of(f"{JOB}/0", SHARD_COUNT)
    with a_client(world, "reader") as client:
        page = client.shard(shard)
    assert f"{JOB}/0" in page["task_ids"] and page["load"]["cpu"] == len(page["task_ids"])
    assert page["load"]["memory_mb"] == 512 * len(page["task_ids"])


def test_a_shard_can_be_released(world: World, boxes: list[Box]):
    with a_client(world, "oncall") as client:
        assert client.release_shard(3, why="mended")["blame"] == 0
        assert client.shard(3)["history"][-1]["decision"] == "released"


def test_tasks_are_listed_also_those_nobody_speaks_of(world: World, boxes: list[Box]):
    boxes[0].beat(f"{JOB}/0")
    with a_client(world, "reader") as client:
        one, two = client.tasks()
        assert (one["task_id"], one["container"], one["state"]) == (f"{JOB}/0", "c1", "running")
        owner = world.plane.fleet.shards()[shard_of(f"{JOB}/1", SHARD_COUNT)].container
        assert (two["task_id"], two["container"], two["state"]) == (f"{JOB}/1", owner, "unreported")
        fleet_routes.TaskReports(tasks=[one, two])
        assert client.tasks(job=JOB) == [one, two]
        assert [task["task_id"] for task in client.tasks(container="c1")][:1] == [f"{JOB}/0"]


def test_a_container_may_say_anything_of_its_tasks(world: World, boxes: list[Box]):
    boxes[0].beat("no-slash", "demo.tick/x", "a/b/c/99999999999999")
    with a_client(world, "reader") as client:
        assert {task["index"] for task in client.tasks()} == {-1, 0, 1}


def test_a_restart_is_told_to_the_container_until_it_is_done(world: World, boxes: list[Box]):
    boxes[1].beat(f"{JOB}/1")
    with a_client(world, "developer") as client:
        assert client.restart_task(JOB, 1, why="it hangs") == {"task_id": f"{JOB}/1", "container": "c2"}
        assert boxes[0].beat().restarts == ()
        (order,) = boxes[1].beat(f"{JOB}/1").restarts
        assert order.task_id == f"{JOB}/1"
        assert boxes[1].beat(f"{JOB}/1").restarts == (order,)
        boxes[1].order = order.number
        assert boxes[1].beat(f"{JOB}/1").restarts == ()
        with pytest.raises(Refused, match="no container runs"):
            client.restart_task(JOB, 0, why="it hangs")
    assert world.plane.journal.entries(f"{JOB}/1")[-1].actor == "a-developer"


def test_a_log_is_read_where_its_container_is_and_then_on(world: World, boxes: list[Box]):
    boxes[0].beat(f"{JOB}/0")
    folder = world.folder / "containers" / "c1"
    file = RotatedFile(log_file(folder, f"{JOB}/0"))
    file.write(b"one\ntwo\n")
    (folder / "folder_id").write_text("folder-c1\n")
    with a_client(world, "oncall") as client:
        found = client.task_log(JOB, 0, lines=1)
        assert (found["container"], found["text"]) == ("c1", "two\n")
        fleet_routes.TaskLog(**found)
        file.write(b"three\n")
        news = client.task_log(JOB, 0, after=found["place"])
        assert (news["text"], news["is_gap"]) == ("three\n", False)
        # A place on another container says nothing here: the end of this log, then.
        moved = client.task_log(JOB, 0, lines=1, after="c2:1:1")
        assert (moved["container"], moved["text"]) == ("c1", "three\n")
        with pytest.raises(ConfigError):
            client.task_log(JOB, 0, after="../../etc/passwd")
    file.close()


def test_a_log_that_is_elsewhere_is_said_to_be_elsewhere(world: World, boxes: list[Box]):
    boxes[0].beat(f"{JOB}/0")
    with a_client(world) as client:
        with pytest.raises(NotFound, match="cannot be reached") as caught:
            client.task_log(JOB, 0)
        assert "c1" in caught.value.why and "host here" in caught.value.why
        folder = world.folder / "containers" / "c1"
        folder.mkdir(parents=True)
        (folder / "folder_id").write_text("of an earlier container of that name")
        with pytest.raises(NotFound, match="cannot be reached"):
            client.task_log(JOB, 0)
        (folder / "folder_id").write_text("folder-c1")
        with pytest.raises(NotFound, match="has no log") as caught:
            client.task_log(JOB, 0)
        assert "penstock logs c1" in caught.value.fix


def test_a_draining_container_gives_its_shards_away(world: World, boxes: list[Box]):
    """Plan: drain c1, then rounds and beats until nothing is left on it."""
    with a_client(world, "oncall") as client:
        client.drain("c1", why="new kernel")

    def step() -> None:
        world.plane.shard_manager._balanced_ms = -(10**6)
        world.plane._tick_shards()
        for box in boxes:
            box.beat()

    def is_drained() -> bool:
        rows = world.plane.fleet.shards()
        return {(row.container, row.state) for row in rows} == {("c2", ShardState.OWNED)}

    until(is_drained, "c2 to have them all", step=step)


def test_what_a_container_must_know_to_join(world: World):
    with a_client(world, "container") as client:
        told = client.installation()
    fleet_routes.InstallationReply(**told)
    assert told["profile"] == "fast" and told["store"] == str(world.folder / "store.db")
    assert told["bus"] == f"embedded:{world.folder / 'bus'}"


def test_the_task_list_is_asked_for_with_the_version_that_is_known(world: World):
    with a_client(world, "container") as client:
        whole = client.task_list(None)
        assert whole is not None and whole["full"] and list(whole["jobs"]) == [JOB]
        assert client.task_list(whole["version"]) is None
        world.ask("PUT", "/jobs/demo.tock", json={"config": a_process("demo.tock"), "why": "new"})
        settle(world)
        news = client.task_list(whole["version"])
        assert news is not None and (news["full"], news["since"]) == (False, whole["version"])
        assert list(news["jobs"]) == ["demo.tock"] and news["version"] > whole["version"]
    answer = world.ask("GET", "/tasks", role="container")
    assert answer.headers["ETag"] == f'"{news["version"]}"'
    same = world.ask("GET", "/tasks", role="container", headers={"If-None-Match": answer.headers["ETag"]})
    assert (same.status_code, same.content, same.headers["ETag"]) == (304, b"", answer.headers["ETag"])
    other = world.ask("GET", "/tasks", role="container", headers={"If-None-Match": '"1"'})
    assert other.json() == answer.json() == world.plane.task_service.snapshot().to_json()
    assert world.ask("GET", "/tasks", headers={"If-None-Match": "*"}).status_code == 422


def test_a_host_says_that_its_container_is_dead_and_nobody_else_can(world: World, boxes: list[Box]):
    with a_client(world, "container") as client:
        assert not client.container_dead("c1", "folder-c2")
        assert "c1" in {row.container for row in world.plane.fleet.shards()}
        assert client.container_dead("c1", "folder-c1")
        assert {row.container for row in world.plane.fleet.shards()} == {"c2"}
        assert not client.container_dead("c1", "folder-c1"), "a repeat is harmless"
    with a_client(world, "reader") as client:
        assert [row["state"] for row in client.containers()] == ["dead", "live"]
