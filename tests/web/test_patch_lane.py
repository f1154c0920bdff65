"""Claims about changes of paths that take the short way: the same answers and the same rows as by the ordinary one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.web import layer_routes, patch_lane
from tests.web.world import JOB, World

SHORT, ORDINARY = "application/json", "application/json; charset=utf-8"
LAYER = f"/jobs/{JOB}/layers/oncall"
GOOD = {"changes": {"priority": 3}, "why": "a test"}


def ask(world: World, kind: str, body: Any, path: str = LAYER, role: str = "oncall", **headers: str) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return world.ask("PATCH", path, role=role, content=content, headers={"Content-Type": kind, **headers})


def test_a_change_takes_the_short_way(world: World, monkeypatch: pytest.MonkeyPatch):
    world.submit()
    monkeypatch.setattr(layer_routes, "write_patch", None)  # what the ordinary way would call
    answer = ask(world, SHORT, GOOD, **{"Idempotency-Key": "k1", "If-Match": f'"{world.version()}"'})
    assert answer.status_code == 200
    assert answer.json() == {"version": world.version()}
    assert answer.headers["ETag"] == f'"{world.version()}"'
    assert world.plane.jobs.view(JOB).config["priority"] == 3
    again = ask(world, SHORT, GOOD, **{"Idempotency-Key": "k1", "If-Match": f'"{world.version() - 1}"'})
    assert (again.status_code, again.json()) == (200, answer.json())


@pytest.mark.parametrize(
    ("body", "path", "role", "headers"),
    [
        ({"changes": {"priority": "x"}, "why": "a test"}, LAYER, "oncall", {}),
        ({"changes": {"priorty": 1}, "why": "a test"}, LAYER, "oncall", {}),
        ({"changes": {"priority": 1}}, LAYER, "oncall", {}),
        ({"changes": [], "why": "a test"}, LAYER, "oncall", {}),
        ({**GOOD, "more": 1}, LAYER, "oncall", {}),
        (b'{"changes": {"priority": NaN}, "why": "a test"}', LAYER, "oncall", {}),
        (b'{"changes": {"priority": 1}, "why": "cut', LAYER, "oncall", {}),
        (b"", LAYER, "oncall", {}),
        (b"null", LAYER, "oncall", {}),
        (b"\xff", LAYER, "oncall", {}),
        (GOOD, "/jobs/demo.nobody/layers/oncall", "oncall", {}),
        (GOOD, f"/jobs/{JOB}/layers/none", "oncall", {}),
        (GOOD, f"/jobs/{JOB}/layers/scaler", "oncall", {}),
        (GOOD, LAYER, "reader", {}),
        (GOOD, LAYER, "container", {}),
        (GOOD, LAYER, "oncall", {"If-Match": '"0"'}),
        (GOOD, LAYER, "oncall", {"If-Match": 'W/"1"'}),
        (GOOD, LAYER, "oncall", {"Idempotency-Key": "a b"}),
        (GOOD, LAYER, "oncall", {"Idempotency-Key": "k" * 201}),
        (GOOD, LAYER + "?dry=1", "oncall", {}),
    ],
)
def test_what_is_wrong_is_told_alike_on_both_ways(
    shared: World, body: Any, path: str, role: str, headers: dict[str, str]
):
    before = shared.everything()
    short = ask(shared, SHORT, body, path, role, **headers)
    ordinary = ask(shared, ORDINARY, body, path, role, **headers)
    assert short.status_code == ordinary.status_code >= 400
    assert short.json() == ordinary.json()
    assert short.headers.get("ETag") == ordinary.headers.get("ETag")
    assert short.headers["Content-Type"] == ordinary.headers["Content-Type"]
    assert shared.everything() == before


def test_nobody_writes_without_a_token(world: World):
    world.submit()
    before = world.everything()
    for headers in ({}, {"Authorization": "Bearer nonsense"}, {"Authorization": "Basic x"}):
        answer = world.ask("PATCH", LAYER, role=None, json=GOOD, headers=headers)
        assert answer.status_code == 401
    assert world.everything() == before


def test_both_ways_write_the_same(world: World):
    world.submit()
    for kind, priority in ((SHORT, 4), (ORDINARY, 5)):
        assert ask(world, kind, {"changes": {"priority": priority}, "why": "a test"}).status_code == 200
    short, ordinary = world.plane.jobs.history(JOB, layer="oncall", limit=2)[::-1]
    assert (short.actor, short.reason, short.body["priority"]) == (ordinary.actor, ordinary.reason, 4)
    assert ordinary.body["priority"] == 5 and ordinary.version == short.version + 1


def test_a_bug_is_answered_as_one(world: World, monkeypatch: pytest.MonkeyPatch):
    world.submit()

    def fail(*given: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(patch_lane, "write_patches", fail)
    answer = ask(world, SHORT, GOOD)
    assert (answer.status_code, answer.headers["Content-Type"]) == (500, "application/problem+json")
