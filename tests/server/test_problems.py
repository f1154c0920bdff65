"""Claims about errors on the wire: what one side raises, the other side catches."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock.client import Client
from penstock.client.problems import (
    KINDS,
    HeadersTooLarge,
    NeedsVersion,
    TooLarge,
    TooMany,
    Unauthorised,
    from_problem,
    status_of,
    to_problem,
)
from penstock.core import errors
from penstock.core.errors import PenstockError
from tests.server.world import World, a_client


def raised(kind: type[PenstockError]) -> PenstockError:
    if kind is errors.VersionConflict:
        return errors.VersionConflict("job 'a'", expected=3, actual=5)
    if kind is errors.NeedsConsent:
        return errors.NeedsConsent("demo", stops=["demo.a"], replaces="a/b.py", origin="c/d.py")
    if issubclass(kind, errors.ComputationFailed):
        return kind("what", why="why", fix="fix", job="a", key="k", offset=7)
    return kind("what [x]", why="why\nin two lines", fix="fix ü")


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_comes_through_the_api_and_the_client_as_itself(
    shared: World, monkeypatch: pytest.MonkeyPatch, kind: type[PenstockError]
):
    """Plan: make a service raise it, ask over the API with the real client, compare class and all parts."""
    error = raised(kind)

    def fail(since: int | None) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(shared.plane, "task_list", fail)
    with a_client(shared, "reader") as client, pytest.raises(PenstockError) as caught:
        client.task_list(None)
    assert type(caught.value) is kind
    assert vars(caught.value) == vars(error)
    assert str(caught.value) == str(error)


def test_the_kinds_are_all_there_are():
    def below(kind: type[PenstockError]) -> set[type[PenstockError]]:
        return {kind}.union(
            *(below(lower) for lower in kind.__subclasses__() if lower.__module__ == kind.__module__)
        )

    assert set(KINDS.values()) == below(PenstockError)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.ConfigError("x"), 422),
        (errors.NotFound("x"), 404),
        (errors.Refused("x"), 403),
        (errors.KeyReused("x"), 422),
        (errors.VersionConflict("x", expected=1, actual=2), 409),
        (errors.NeedsConsent("x", stops=["x.a"], replaces="", origin=""), 409),
        (errors.EnvironmentProblem("x"), 400),
        (errors.OutcomeUnknown("x"), 503),
        (errors.DiskFull("x"), 507),
        (errors.CorruptData("x"), 500),
        (Unauthorised("x"), 401),
        (TooLarge("x"), 413),
        (TooMany("x"), 429),
        (NeedsVersion("x"), 428),
        (HeadersTooLarge("x"), 431),
    ],
)
def test_every_kind_has_its_status(error: PenstockError, status: int):
    assert status_of(error) == status == to_problem(error)["status"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Unauthorised("x"), errors.Refused),
        (TooLarge("x"), errors.ConfigError),
        (TooMany("x"), errors.Refused),
    ],
)
def test_kinds_that_only_http_has_arrive_as_the_nearest_of_ours(
    error: PenstockError, kind: type[PenstockError]
):
    problem = to_problem(error)
    assert type(from_problem(problem, problem["status"])) is kind


@pytest.mark.parametrize(
    ("problem", "status", "kind"),
    [
        ({}, 400, errors.UserError),
        ({}, 401, errors.Refused),
        ({}, 502, errors.StoreUnavailable),
        ({"type": "urn:penstock:annotations"}, 500, errors.StoreUnavailable),
        ({"type": "urn:penstock:__name__"}, 500, errors.StoreUnavailable),
        ({"type": 5, "title": None, "detail": ["x"]}, 404, errors.UserError),
        ({"type": "urn:penstock:VersionConflict"}, 409, errors.UserError),
        (
            {"type": "urn:penstock:VersionConflict", "key": "a", "expected": "1", "actual": 2},
            409,
            errors.UserError,
        ),
    ],
)
def test_a_strange_problem_is_still_an_error_of_ours(
    problem: dict[str, Any], status: int, kind: type[PenstockError]
):
    error = from_problem(problem, status)
    assert type(error) is kind and error.what


def client_of(answer: httpx.Response | Exception) -> Client:
    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    transport = httpx.MockTransport(handle)
    return Client("http://penstock", "pk_token", transport=transport, pause=lambda ms: None)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (httpx.Response(200, text="<html>"), errors.StoreUnavailable),
        (httpx.Response(200, json=[1]), errors.StoreUnavailable),
        (httpx.Response(502, text="bad gateway"), errors.StoreUnavailable),
        (httpx.Response(404, json=["x"]), errors.StoreUnavailable),
        (httpx.Response(307, headers={"Location": "http://elsewhere"}), errors.StoreUnavailable),
        (httpx.ConnectError("refused"), errors.StoreUnavailable),
        (httpx.ConnectTimeout(""), errors.StoreUnavailable),
        (httpx.ReadTimeout("slow"), errors.StoreUnavailable),
    ],
)
def test_whatever_answers_a_question_the_client_raises_three_parts(
    answer: httpx.Response | Exception, kind: type[PenstockError]
):
    with pytest.raises(PenstockError) as caught:
        client_of(answer).status()
    assert type(caught.value) is kind
    assert caught.value.what and caught.value.why and caught.value.fix


def test_a_change_that_was_not_answered_may_have_been_made():
    with pytest.raises(errors.OutcomeUnknown):
        client_of(httpx.ReadTimeout("slow")).patch_layer("a", "oncall", {"priority": 1}, why="x", key="k")


@pytest.mark.parametrize("url", ["nonsense", "ftp://host", "http://host:port", "http://[::1"])
def test_what_is_no_url_is_said_so(url: str):
    with pytest.raises(errors.EnvironmentProblem) as caught:
        Client(url, "pk_token").status()
    assert url in caught.value.what and caught.value.fix


@pytest.mark.parametrize("token", ["", "two words", "new\nline", "ünicode"])
def test_what_is_no_token_is_not_sent(token: str):
    with pytest.raises(errors.Refused) as caught:
        Client("http://penstock", token)
    assert token == "" or token not in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"owner": "\udc80"}, {"slo.lag_s": float("nan")}, {"x": object()}, {"x": b"bytes"}]
)
def test_what_cannot_be_sent_is_said_so_before_it_is(changes: dict[str, Any]):
    client = client_of(AssertionError("was sent"))
    with pytest.raises(errors.ConfigError):
        client.patch_layer("a", "oncall", changes, why="x", key="k")


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_cannot_turn_a_path_into_another(name: str):
    with pytest.raises(errors.ConfigError):
        client_of(AssertionError("was sent")).job(name)


def test_names_are_quoted_on_their_way():
    seen: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path.decode())
        return httpx.Response(200, text=json.dumps({"name": "x"}))

    Client("http://penstock/", "pk_token", transport=httpx.MockTransport(handle)).job("a/../b?c#d%2f")
    assert seen == ["/api/v1/jobs/a%2F..%2Fb%3Fc%23d%252f"]
