"""Claims about who may call what: every route, every role."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute

from penstock.core.errors import Refused
from penstock.core.system_clock import SystemClock
from penstock.db.tokens import ROLES
from penstock.server.answers import PROBLEM
from penstock.server.api import OPEN_ROUTES, PREFIX
from penstock.server.security import ALL_USERS, VERBS, Guard, RateLimit, require
from tests.server.world import JOB, World

HASH = "0" * 64
BEAT = {"container": "c1", "incarnation": "i1", "sequence": 1}
CATEGORY = {"name": "queries", "partitions": 1, "columns": [["query", "string"]]}
LEND = {"home": "a", "to": "b", "url": "http://b:1", "token": "pk_x", "why": " "}

# Every route but /health: (method, path, verb, body).
ROUTES: list[tuple[str, str, str, Any]] = [
    ("GET", "/openapi.json", "schema.read", None),
    ("GET", "/status", "status.read", None),
    ("GET", "/journal", "journal.read", None),
    ("GET", "/audit", "audit.read", None),
    ("GET", "/events", "event.read", None),
    ("GET", "/jobs", "job.read", None),
    ("GET", "/jobs/{name}", "job.read", None),
    ("GET", "/jobs/{name}/metrics", "job.read", None),
    ("PUT", "/jobs/{name}", "job.apply", {"config": {}, "why": "x"}),
    ("DELETE", "/jobs/{name}", "job.remove", None),
    ("POST", "/jobs/{name}/restore", "job.remove", {"why": "x"}),
    ("POST", "/jobs/{name}/plan", "job.plan", {"config": {}}),
    ("POST", "/jobs/{name}/state", "job.state", {"state": "paused", "layer": "nolayer", "why": "x"}),
    ("GET", "/jobs/{name}/layers", "job.read", None),
    ("GET", "/jobs/{name}/history", "job.read", None),
    ("GET", "/jobs/{name}/diff", "job.read", None),
    ("GET", "/jobs/{name}/doctor", "job.read", None),
    ("GET", "/jobs/{name}/decisions", "job.read", None),
    ("POST", "/jobs/{name}/manage", "job.manage", {"dry_run": True}),
    ("POST", "/jobs/{name}/readmit", "job.manage", {"why": "x"}),
    ("PUT", "/jobs/{name}/layers/{layer}", "job.write", {"body": {}, "why": "x"}),
    ("PATCH", "/jobs/{name}/layers/{layer}", "job.write", {"changes": {"priority": 1}, "why": "x"}),
    ("DELETE", "/jobs/{name}/layers/{layer}", "job.write", None),
    ("POST", "/jobs/{name}/layers/{layer}/rollback", "job.write", {"to_version": 0, "why": "x"}),
    ("GET", "/layers", "layer.read", None),
    ("POST", "/layers", "layer.create", {"name": "base", "precedence": 0, "writers": ["admin"], "why": "x"}),
    ("GET", "/tokens", "token.read", None),
    ("POST", "/tokens", "token.write", {"name": "x", "role": "reader", "why": " "}),
    ("DELETE", "/tokens/{token_id}", "token.write", None),
    ("POST", "/pipelines/plan", "pipeline.plan", {"compiled": {}}),
    ("POST", "/pipelines", "pipeline.submit", {"compiled": {}, "why": "x"}),
    ("GET", "/categories", "category.read", None),
    ("GET", "/categories/{name}", "category.read", None),
    ("GET", "/watermarks", "category.read", None),
    ("GET", "/jobs/{name}/states", "state.read", None),
    ("GET", "/jobs/{name}/states/of", "state.read", None),
    ("GET", "/jobs/{name}/states/export", "state.read", None),
    ("GET", "/jobs/{name}/timers", "state.read", None),
    ("POST", "/categories", "category.create", CATEGORY),
    ("PUT", "/packages/{hash_}", "package.write", None),
    ("GET", "/packages/{hash_}", "package.read", None),
    ("POST", "/containers/{name}/register", "container.beat", {"incarnation": "i1", "folder_id": "f"}),
    ("POST", "/containers/{name}/beat", "container.beat", BEAT),
    ("GET", "/tasks", "task.read", None),
    ("GET", "/installation", "container.beat", None),
    ("POST", "/containers/{name}/dead", "container.beat", {"folder_id": "nobody's"}),
    ("GET", "/containers/{name}/log", "log.read", None),
    ("GET", "/containers", "container.read", None),
    ("POST", "/containers/{name}/drain", "container.write", {"why": "x"}),
    ("POST", "/containers/{name}/cordon", "container.write", {"why": "x"}),
    ("POST", "/containers/{name}/uncordon", "container.write", {"why": "x"}),
    ("GET", "/loans", "container.read", None),
    ("POST", "/containers/{name}/order", "container.beat", {}),
    ("POST", "/containers/{name}/order/answer", "container.beat", {"number": 0, "accepted": False}),
    ("POST", "/containers/{name}/lend", "container.lend", LEND),
    ("POST", "/containers/{name}/keep", "container.lend", {"version": 0, "why": " "}),
    ("POST", "/containers/{name}/expect", "container.lend", {"lender": "a", "why": " "}),
    ("POST", "/containers/{name}/forget", "container.lend", {"version": 0, "why": " "}),
    ("GET", "/shards", "shard.read", None),
    ("GET", "/shards/{shard}", "shard.read", None),
    ("POST", "/shards/{shard}/move", "shard.write", {"container": "c9", "why": "x"}),
    ("POST", "/shards/{shard}/release", "shard.write", {"why": "x"}),
    ("GET", "/tasks/reports", "task.read", None),
    ("GET", "/jobs/{name}/tasks/{index}/log", "log.read", None),
    ("POST", "/jobs/{name}/tasks/{index}/restart", "task.restart", {"why": "x"}),
    ("GET", "/alarms", "alarm.read", None),
    ("GET", "/alarms/{alarm_id}", "alarm.read", None),
    ("POST", "/alarms/{alarm_id}/acknowledge", "alarm.write", {"why": "x"}),
    ("GET", "/silences", "alarm.read", None),
    ("POST", "/silences", "alarm.write", {"job": "x", "for_s": 60, "why": " "}),
    ("DELETE", "/silences/{silence_id}", "alarm.write", None),
    ("POST", "/alarm-routes/test", "alarm.write", {"why": " "}),
    ("GET", "/capacity", "status.read", None),
]
every_route = pytest.mark.parametrize(
    ("method", "path", "verb", "body"), ROUTES, ids=[f"{method} {path}" for method, path, _, _ in ROUTES]
)


def filled(path: str) -> str:
    name = "c1" if path.startswith("/containers") else JOB
    filled = path.replace("{name}", name).replace("{layer}", "nolayer").replace("{hash_}", HASH)
    filled = filled.replace("{alarm_id}", HASH[:12]).replace("{silence_id}", HASH[:12])
    filled = filled.replace("{token_id}", HASH[:16]).replace("{shard}", "3").replace("{index}", "0")
    return filled + ("?wait_s=0" if filled == "/events" else "")


def test_the_table_above_has_every_route(shared: World):
    found = {
        (method, route["path"])
        for route in routes_of(shared.api)
        for method in route["methods"]
        if route["path"] not in OPEN_ROUTES
    }
    assert found == {(method, PREFIX + path) for method, path, _, _ in ROUTES}


def routes_of(app: Any) -> list[dict[str, Any]]:
    schema = app.openapi()
    found = [
        {"path": path, "methods": [method.upper() for method in operations]}
        for path, operations in schema["paths"].items()
    ]
    return [*found, {"path": f"{PREFIX}/openapi.json", "methods": ["GET"]}]  # it does not describe itself


def test_every_refusal_is_described_as_the_problem_that_it_is(shared: World):
    described = shared.ask("GET", "/openapi.json").json()
    assert set(described["components"]["schemas"]["ProblemReply"]["required"]) <= set(
        shared.ask("GET", "/jobs/none.none").json()
    )
    operations = [each for path in described["paths"].values() for each in path.values()]
    refusals = [said for each in operations for code, said in each["responses"].items() if code >= "4"]
    assert len(refusals) > len(operations)
    for said in refusals:
        assert said["content"] == {PROBLEM: {"schema": {"$ref": "#/components/schemas/ProblemReply"}}}


def test_health_is_open_and_says_nothing_else(shared: World):
    answer = shared.ask("GET", "/health", role=None)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@every_route
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer garbage", "Basic cm9vdDpyb290", "pk_no_scheme"]
)
def test_without_a_good_token_there_is_401(
    shared: World, header: str | None, method: str, path: str, verb: str, body: Any
):
    before = shared.everything()
    headers = {} if header is None else {"Authorization": header}
    answer = shared.ask(method, filled(path), role=None, json=body, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.headers["Content-Type"] == "application/problem+json"
    problem = answer.json()
    assert problem["title"] and problem["detail"] and problem["fix"]
    assert shared.everything() == before


def test_an_expired_token_is_no_token(world: World):
    plane = world.plane
    now_ms = plane.clock.now_ms()
    world.tokens["old"] = plane.tokens.issue("old", "admin", now_ms=now_ms - 1000, lifetime_ms=999)
    answer = world.ask("GET", "/status", role="old")
    assert answer.status_code == 401
    assert answer.json()["title"] == "this token has expired"


@every_route
@pytest.mark.parametrize("role", sorted(ROLES))
def test_a_role_may_do_what_the_table_says_and_nothing_else(
    shared: World, role: str, method: str, path: str, verb: str, body: Any
):
    answer = shared.ask(method, filled(path), role=role, json=body)
    if role in VERBS[verb]:
        # It came through: the others are the services' answers to names, bodies and versions that are not there.
        assert answer.status_code in (200, 201, 404, 422, 428) or _is_taken(answer), answer.text
    else:
        assert answer.status_code == 403
        assert verb in answer.json()["title"]


def _is_taken(answer: httpx.Response) -> bool:
    """Refused by the state of things, not for the role."""
    told = ("cannot be added with precedence", "does not run")
    return answer.status_code == 403 and any(words in answer.json()["title"] for words in told)


def test_every_verb_is_used_by_a_route_and_every_row_names_roles():
    assert {verb for _, _, verb, _ in ROUTES} == set(VERBS)
    assert all(roles <= ROLES and roles for roles in VERBS.values())


def test_nobody_but_containers_and_admins_beats_and_readers_only_read():
    assert VERBS["container.beat"] == {"container", "admin"}
    assert {verb for verb, roles in VERBS.items() if "reader" in roles} == {
        verb for verb, roles in VERBS.items() if roles >= ALL_USERS
    }
    assert all(verb.endswith(".read") for verb, roles in VERBS.items() if "reader" in roles)


@pytest.mark.parametrize("role", [*sorted(ROLES), "nobody", ""])
def test_a_verb_that_is_not_in_the_table_is_nobodys(role: str):
    with pytest.raises(Refused, match=r"may not job\.destroy"):
        require(role, "job.destroy")


def test_a_layer_is_written_only_by_its_roles(world: World):
    """Plan: with the verb job.write granted, the service still looks at the layer."""
    writers = {"base": {"admin"}, "provisioner": {"developer", "admin"}}
    writers |= {"scaler": {"scaler", "admin"}, "oncall": {"oncall", "admin"}}
    for layer, allowed in writers.items():
        for role in sorted(ROLES):
            before = world.version()
            body = {"changes": {"priority": 7}, "why": "a test"}
            answer = world.ask("PATCH", f"/jobs/{JOB}/layers/{layer}", role=role, json=body)
            assert answer.status_code == (200 if role in allowed else 403), (layer, role)
            assert world.version() == before + (role in allowed)


def test_a_guard_tells_a_route_without_a_verb(shared: World):
    guard = Guard(shared.plane.tokens, SystemClock(), RateLimit())
    router, app = APIRouter(), FastAPI()

    @router.get("/forgotten")
    def forgotten() -> None: ...

    @router.get("/guarded")
    def guarded(caller: object = guard.allow("job.read")) -> None: ...

    app.include_router(router)
    verbs = {route.path: guard.verb_of(route) for route in router.routes if isinstance(route, APIRoute)}
    assert verbs == {"/forgotten": None, "/guarded": "job.read"}
    with pytest.raises(AssertionError):
        guard.allow("job.destroy")
