"""Claims about replies: each route returns the model that it declares, so the two cannot drift apart."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest
from fastapi import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from penstock.server.api import PREFIX
from penstock.server.replies import Reply
from tests.server.test_access import BEAT
from tests.server.world import JOB, World

# Routes that return no reply model, each with the reason.
ENCODED = {
    "GET /jobs": "jobs are encoded once, when they change",
    "GET /jobs/{name}": "jobs are encoded once, when they change",
    "GET /status": "it has a line for each job, which are encoded once",
    "GET /tasks": "the tasks of a job are encoded once, when they change, for all containers",
    "POST /containers/{name}/beat": "200 a second in a fleet of 2,000 containers",
}
NOT_JSON = {
    "GET /events": "server-sent events",
    "GET /packages/{hash_}": "a file",
    "GET /jobs/{name}/states/export": "a stream of lines",
}
DESCRIPTION = "GET /openapi.json"  # the description of all others


def routes_of(world: World) -> dict[str, APIRoute]:
    """Every route by its method and path."""
    routes = [route for route in world.api.routes if isinstance(route, APIRoute)]
    return {
        f"{method} {route.path.removeprefix(PREFIX)}": route for route in routes for method in route.methods
    }


def returned_by(route: APIRoute) -> Any:
    return get_type_hints(inspect.unwrap(route.endpoint))["return"]


def test_every_route_returns_the_reply_that_it_describes(shared: World):
    routes = routes_of(shared)
    assert len(routes) > 70
    for name, route in routes.items():
        if name in {*ENCODED, *NOT_JSON, DESCRIPTION}:
            continue
        model = returned_by(route)
        assert isinstance(model, type) and issubclass(model, Reply), f"{name} returns {model}"
        assert route.response_model is model, f"{name} describes {route.response_model}"
        described = [said["model"] for said in route.responses.values() if "model" in said]
        assert set(described) <= {model}, f"{name} describes {described}"


def test_only_what_returns_no_reply_is_an_exception(shared: World):
    routes = routes_of(shared)
    for name in (*ENCODED, *NOT_JSON):
        assert returned_by(routes[name]) is Response, name
    assert all(routes[name].response_model is None for name in NOT_JSON)


@pytest.mark.parametrize("name", ENCODED)
def test_an_encoded_answer_is_the_reply_that_it_describes(world: World, name: str):
    registered = {"incarnation": "i1", "folder_id": "f"}
    assert world.ask("POST", "/containers/c1/register", role="container", json=registered).status_code == 200
    method, path = name.split()
    if method == "POST":
        answer = world.ask(method, path.replace("{name}", "c1"), role="container", json=BEAT)
    else:
        answer = world.ask(method, path.replace("{name}", JOB))
    assert answer.status_code == 200, answer.text
    model = routes_of(world)[name].response_model
    assert isinstance(model, type) and issubclass(model, BaseModel)
    model.model_validate_json(answer.content, strict=True)
