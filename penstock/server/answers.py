"""HTTP responses: headers of replies, JSON that is encoded already, and problem+json for errors.

A route returns its reply model; FastAPI writes it, from the model alone.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any, get_type_hints

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from penstock.client.problems import status_of, to_problem
from penstock.core.errors import ConfigError, NotFound, PenstockError, Refused, UserError, VersionConflict

PROBLEM = "application/problem+json"
SHOWN_MAX = 5

log = structlog.get_logger(__name__)


def answer_problems(app: FastAPI) -> None:
    """Install the error handlers: every failed request is answered with problem+json."""
    app.exception_handler(PenstockError)(_on_error)
    app.exception_handler(RequestValidationError)(_on_invalid)
    app.exception_handler(HTTPException)(_on_http)
    app.exception_handler(Exception)(on_bug)


def set_version(response: Response, version: int) -> None:
    """Set the ETag of a route's response."""
    response.headers["ETag"] = f'"{version}"'


def set_created(response: Response, location: str = "") -> None:
    """Set status 201 for a route's response, and the URL of what was created."""
    response.status_code = 201
    if location:
        response.headers["Location"] = location


def encoded(body: bytes, *, version: int | None = None) -> Response:
    """A response of JSON that is encoded already, for the few routes that return no reply model."""
    response = Response(body, media_type="application/json")
    if version is not None:
        set_version(response, version)
    return response


def problem_response(
    error: PenstockError, status: int | None = None, headers: dict[str, str] | None = None
) -> Response:
    """An error as a problem+json response."""
    problem = to_problem(error, status)
    found = dict(headers or {})
    if problem["status"] == 401:
        found["WWW-Authenticate"] = "Bearer"
    if problem["status"] in (429, 503):
        found["Retry-After"] = "1"
    if isinstance(error, VersionConflict):
        found["ETag"] = f'"{error.actual}"'
    content = json.dumps(problem, ensure_ascii=False).encode(errors="replace")
    return Response(content, status_code=problem["status"], media_type=PROBLEM, headers=found)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)
    if status_of(error) == 500:
        log.error("request failed", path=request.url.path, error=str(error))
    return problem_response(error)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fields = _fields_of(request.scope.get("endpoint"))
    reasons, hints = [], []
    for problem in error.errors()[:SHOWN_MAX]:
        place, message = _place(problem["loc"]), str(problem["msg"])
        if problem["type"] == "extra_forbidden":
            message = "there is no such field"
            near = difflib.get_close_matches(str(problem["loc"][-1]), fields, n=1)
            hints += [f"did you mean `{near[0]}`?" for _ in near]
        if problem["type"] == "json_invalid":
            place, message = "body", f"not JSON: {problem.get('ctx', {}).get('error', '')}"
        reasons.append(f"{place}: {message}")
    return problem_response(
        ConfigError(
            "the request is not valid",
            why="; ".join(reasons),
            fix=" ".join(hints) or "correct it; the API is described at /api/v1/openapi.json",
        )
    )


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return problem_response(
            NotFound(
                f"there is nothing at {request.url.path[:200]}",
                why="the API has no such route",
                fix="see /api/v1/openapi.json",
            )
        )
    if error.status_code == 405:
        allowed = ", ".join(_methods_of(request))
        refused = Refused(
            f"{request.method} is not allowed here", why=f"allowed: {allowed}", fix="use one of these methods"
        )
        return problem_response(refused, 405, {"Allow": allowed})
    # A body that is not UTF-8, or has a number too long to read.
    return problem_response(
        UserError("the request cannot be read", why=str(error.detail), fix="send JSON in UTF-8"),
        422 if error.status_code == 400 else error.status_code,
        headers,
    )


def _methods_of(request: Request) -> list[str]:
    """Every method of a path; the router itself reports only those of the first matching route."""
    routes = [route for route in request.app.routes if isinstance(route, APIRoute)]
    matching = [route for route in routes if route.path_regex.match(request.url.path)]
    return sorted({method for route in matching for method in route.methods or ()})


async def on_bug(request: Request, error: Exception) -> Response:
    """Answer an unexpected exception with 500. The traceback is in the server's log only."""
    log.error("bug in a request", path=request.url.path, error=type(error).__name__)
    return problem_response(
        PenstockError(
            "internal error in the control plane",
            why=f"{type(error).__name__} in {request.method} {request.url.path[:200]}: this is a bug",
            fix="report it with the server's log",
        ),
        500,
    )


def _fields_of(endpoint: Any) -> Sequence[str]:
    body = get_type_hints(endpoint).get("body") if endpoint is not None else None
    return list(body.model_fields) if isinstance(body, type) and issubclass(body, BaseModel) else []


def _place(location: Sequence[int | str]) -> str:
    # The first part is "body", "path", "query" or "header"; "body" is left out.
    parts = location[1:] if len(location) > 1 and location[0] == "body" else location
    return ".".join(str(part) for part in parts)
