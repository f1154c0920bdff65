"""Claims about what containers say over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.fleet.messages import Heartbeat, HeartbeatVerdict, ShardEntry, ShardState, TaskReport
from penstock.server.routes.containers import read_heartbeat
from tests.server.world import World, a_client

TASK = {"task_id": "demo.count/0", "job": "demo.count", "generation": 1, "shard": 3, "state": "running"}
BEAT: dict[str, Any] = {
    "container": "c1",
    "incarnation": "i1",
    "sequence": 1,
    "acked": [{"shard": 3, "epoch": 1, "state": "owned"}],
    "assignment_version": 0,
    "list_version": 0,
    "tasks": [{**TASK, "error": "", "restarts": 0, "metrics": {"busy": 0.5}}],
    "engine_ready": True,
    "host": "h",
    "pid": 7,
}


def register(world: World, name: str = "c1") -> None:
    body = {"incarnation": "i1", "folder_id": "f"}
    answer = world.ask("POST", f"/containers/{name}/register", role="container", json=body)
    assert (answer.status_code, answer.json()) == (200, {"container": name})


def beat(world: World, **changes: Any) -> Any:
    return world.ask("POST", "/containers/c1/beat", role="container", json={**BEAT, **changes})


def test_a_heartbeat_is_answered_and_kept(world: World):
    register(world)
    answer = beat(world)
    assert answer.status_code == 200
    assert (answer.json()["verdict"], answer.json()["sequence"]) == ("ok", 1)
    (row,) = world.ask("GET", "/status", role="reader").json()["containers"]
    assert (row["name"], row["ready"], row["tasks"], row["pid"]) == ("c1", True, 1, 7)
    assert world.ask("GET", "/jobs/demo.count").json()["tasks"][0]["metrics"] == {"busy": 0.5}


def test_the_client_and_the_route_speak_the_same(world: World):
    sent = Heartbeat(
        container="c1",
        incarnation="i1",
        sequence=4,
        acked=(ShardEntry(shard=1, epoch=2, state=ShardState.DROPPING),),
        tasks=(TaskReport(**TASK, error="half \ud800 a letter", metrics={"lag_s": 1, "busy": 0.25}),),  # type: ignore[arg-type]
        engine_ready=True,
    )
    with a_client(world, "container") as client:
        client.register("c1", "i1", "f")
        reply = client.beat(sent)
    assert (reply.verdict, reply.sequence) == (HeartbeatVerdict.OK, 4)
    ((name, report),) = world.plane.shard_manager.task_reports()
    assert (name, report.error, report.metrics) == ("c1", "half ? a letter", {"lag_s": 1, "busy": 0.25})


def test_what_a_heartbeat_leaves_out_has_its_default(world: World):
    register(world)
    body = {"container": "c1", "incarnation": "i1", "sequence": 1, "acked": [{"shard": 1, "epoch": 1}]}
    assert world.ask("POST", "/containers/c1/beat", role="container", json=body).json()["verdict"] == "ok"
    assert read_heartbeat(json.dumps(body).encode(), "application/json") == Heartbeat(
        container="c1", incarnation="i1", sequence=1, acked=(ShardEntry(shard=1, epoch=1),)
    )


def test_an_unknown_container_is_told_to_begin_anew(world: World):
    assert beat(world).json()["verdict"] == "reboot"


@pytest.mark.parametrize(
    "changes",
    [
        {"container": "c2"},
        {"container": None},
        {"container": ["c1"]},
        {"incarnation": 1},
        {"incarnation": "x" * 100_001},
        {"sequence": "1"},
        {"sequence": -1},
        {"sequence": 2**63},
        {"sequence": 1.5},
        {"sequence": True},
        {"acked": None},
        {"acked": "all"},
        {"acked": [1]},
        {"acked": [{}]},
        {"acked": [{"shard": 1, "epoch": 1, "state": "mine"}]},
        {"acked": [{"shard": 1, "epoch": 1, "state": "owned", "more": 1}]},
        {"tasks": {}},
        {"tasks": [[]]},
        {"tasks": [{**TASK, "generation": "1"}]},
        {"tasks": [{**TASK, "metrics": {"busy": "very"}}]},
        {"tasks": [{**TASK, "metrics": [1]}]},
        {"tasks": [{**TASK, "unknown": 1}]},
        {"tasks": [{key: value for key, value in TASK.items() if key != "job"}]},
        {"engine_ready": "yes"},
        {"pid": None},
        {"list_version": 10**30},
        {"unknown": 1},
    ],
)
def test_a_garbage_heartbeat_is_422_and_changes_nothing(shared: World, changes: dict[str, Any]):
    world = shared
    before = world.everything()
    answer = beat(world, **changes)
    assert answer.status_code == 422, answer.text
    problem = answer.json()
    assert problem["title"] and problem["detail"] and problem["fix"]
    assert world.everything() == before


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"1", b'"beat"', b"{}", b"\xff", b'{"tasks": NaN}'])
def test_a_heartbeat_that_is_none_is_422(shared: World, content: bytes):
    headers = {"Content-Type": "application/json"}
    answer = shared.ask("POST", "/containers/c1/beat", role="container", content=content, headers=headers)
    assert answer.status_code == 422


def test_numbers_that_json_does_not_have_never_come_in(world: World):
    register(world)
    text = '{"container": "c1", "incarnation": "i1", "sequence": 1, "tasks": [{"task_id": "a/0", "job": "a",'
    text += '"generation": 1, "shard": 1, "state": "running", "metrics": {"lag_s": Infinity}}]}'
    headers = {"Content-Type": "application/json"}
    answer = world.ask("POST", "/containers/c1/beat", content=text, headers=headers)
    assert answer.status_code == 422
    assert world.ask("GET", "/status").status_code == 200


def test_a_log_is_read_from_its_end_and_only_of_known_containers(world: World):
    log = world.folder / "containers" / "c1" / "engine.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"first\n" + b"x" * 600_000 + b"\nlast but one \xff\nlast\n")
    assert world.ask("GET", "/containers/c1/log").status_code == 404
    register(world)
    answer = world.ask("GET", "/containers/c1/log", role="oncall", params={"lines": 2})
    assert answer.json() == {"text": "last but one \ufffd\nlast"}
    assert "first" not in world.ask("GET", "/containers/c1/log", params={"lines": 10_000}).json()["text"]


def test_the_task_list_is_whole_or_what_changed(world: World):
    whole = world.ask("GET", "/tasks", role="container").json()
    assert whole["full"] is True
    part = world.ask("GET", "/tasks", role="container", params={"since": whole["version"]}).json()
    assert part["version"] == whole["version"]
