"""Claims about changes of single paths of a layer: what is answered, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.world import JOB, World

LAYER = f"/jobs/{JOB}/layers/oncall"
GOOD = {"changes": {"priority": 3}, "why": "a test"}


def ask(world: World, body: Any, path: str = LAYER, role: str = "oncall", **headers: str) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Content-Type": "application/json", **headers}
    return world.ask("PATCH", path, role=role, content=content, headers=given)


def test_a_repeat_gets_the_first_answer_and_changes_nothing(world: World):
    world.submit()
    answer = ask(world, GOOD, **{"Idempotency-Key": "k1", "If-Match": f'"{world.version()}"'})
    assert answer.status_code == 200
    assert answer.json() == {"version": world.version()}
    assert answer.headers["ETag"] == f'"{world.version()}"'
    assert world.plane.jobs.view(JOB).config.priority == 3
    again = ask(world, GOOD, **{"Idempotency-Key": "k1", "If-Match": f'"{world.version() - 1}"'})
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
def test_what_is_wrong_is_refused(shared: World, body: Any, path: str, role: str, headers: dict[str, str]):
    before = shared.everything()
    refused = ask(shared, body, path, role, **headers)
    assert refused.status_code >= 400
    assert {"title", "detail", "fix"} <= refused.json().keys()
    assert refused.headers["Content-Type"] == "application/problem+json"
    assert ("ETag" in refused.headers) == (refused.status_code == 409)
    assert shared.everything() == before


def test_nobody_writes_without_a_token(world: World):
    world.submit()
    before = world.everything()
    for headers in ({}, {"Authorization": "Bearer nonsense"}, {"Authorization": "Basic x"}):
        answer = world.ask("PATCH", LAYER, role=None, json=GOOD, headers=headers)
        assert answer.status_code == 401
    assert world.everything() == before


def test_a_charset_may_be_named(world: World):
    world.submit()
    named = {"Content-Type": "application/json; charset=utf-8"}
    assert ask(world, {"changes": {"priority": 5}, "why": "a test"}, **named).status_code == 200
    assert world.plane.jobs.view(JOB).config["priority"] == 5


def test_a_bug_is_answered_as_one(world: World, monkeypatch: pytest.MonkeyPatch):
    world.submit()

    def fail(*given: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(type(world.plane.jobs), "patch_layers", fail)
    answer = ask(world, GOOD)
    assert (answer.status_code, answer.headers["Content-Type"]) == (500, "application/problem+json")
