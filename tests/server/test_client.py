"""Claims about the client: it repeats what may be repeated, with the same key, for a while, and says what is open."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from penstock.client import Client
from penstock.client.problems import to_problem
from penstock.core import errors
from penstock.core.errors import OutcomeUnknown, PenstockError, StoreUnavailable

Answer = httpx.Response | Exception


class Server:
    """Answers in turn, and remembers what was asked."""

    def __init__(self, *answers: Answer) -> None:
        self.answers, self.requests, self.pauses = list(answers), list[httpx.Request](), list[int]()

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def client(self, **kwargs: Any) -> Client:
        transport = httpx.MockTransport(self.handle)
        return Client("http://penstock", "pk_token", transport=transport, pause=self.pauses.append, **kwargs)


def good() -> httpx.Response:
    return httpx.Response(200, json={"version": 7, "jobs": [], "next": None})


def problem(error: PenstockError, **headers: str) -> httpx.Response:
    found = to_problem(error)
    return httpx.Response(found["status"], json=found, headers=headers)


def patch(client: Client) -> int:
    return client.patch_layer("a.b", "oncall", {"priority": 1}, why="x", key="the-key")


TROUBLE: dict[str, Callable[[], Answer]] = {
    "refused": lambda: httpx.ConnectError("refused"),
    "a timeout": lambda: httpx.ReadTimeout("slow"),
    "a broken connection": lambda: httpx.RemoteProtocolError("gone"),
    "the store is away": lambda: problem(StoreUnavailable("x", why="y", fix="z")),
    "the outcome is unknown": lambda: problem(OutcomeUnknown("x", why="y", fix="z")),
    "too many": lambda: httpx.Response(429, json={"title": "too many"}),
}


@pytest.mark.parametrize("trouble", TROUBLE.values(), ids=TROUBLE)
def test_trouble_of_a_moment_is_waited_out_with_the_same_key(trouble: Callable[[], Answer]):
    server = Server(trouble(), trouble(), good())
    assert patch(server.client()) == 7
    assert {request.headers["Idempotency-Key"] for request in server.requests} == {"the-key"}
    assert len({request.content for request in server.requests}) == 1
    assert server.pauses == [100, 200]
    server = Server(trouble(), good())
    assert server.client().jobs() == []


@pytest.mark.parametrize("trouble", TROUBLE.values(), ids=TROUBLE)
def test_it_does_not_try_for_ever(trouble: Callable[[], Answer]):
    server = Server(*(trouble() for _ in range(10)))
    with pytest.raises(PenstockError) as caught:
        patch(server.client())
    assert len(server.requests) == 4 and server.pauses == [100, 200, 400]
    assert caught.value.what


def test_a_later_try_that_does_not_arrive_leaves_the_outcome_of_an_earlier_one_open():
    server = Server(httpx.ReadTimeout("slow"), *(httpx.ConnectError("refused") for _ in range(3)))
    with pytest.raises(OutcomeUnknown):
        patch(server.client())


def test_the_server_says_how_long_to_wait_within_reason():
    server = Server(
        problem(StoreUnavailable("x"), **{"Retry-After": "3"}),
        problem(StoreUnavailable("x"), **{"Retry-After": "9999"}),
        problem(StoreUnavailable("x"), **{"Retry-After": "soon"}),
        good(),
    )
    assert patch(server.client()) == 7
    assert server.pauses == [3000, 10_000, 400]


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("x"),
        errors.NotFound("x"),
        errors.Refused("x"),
        errors.KeyReused("x"),
        errors.DiskFull("x"),
        errors.CorruptData("x"),
        errors.VersionConflict("x", expected=1, actual=2),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_clear_answer_is_not_asked_for_again(error: PenstockError):
    server = Server(problem(error))
    with pytest.raises(type(error)):
        patch(server.client())
    assert len(server.requests) == 1 and server.pauses == []


def test_what_containers_say_is_never_repeated_here():
    for call in (
        lambda client: client.register("c1", "i", "f"),
        lambda client: client.task_list(None),
        lambda client: client.package("h"),
    ):
        server = Server(httpx.ReadTimeout("slow"), good())
        with pytest.raises(StoreUnavailable):
            call(server.client())
        assert len(server.requests) == 1


def test_all_pages_are_one_list():
    pages = [
        httpx.Response(200, json={"jobs": [{"name": "a"}], "next": "a"}),
        httpx.Response(200, json={"jobs": [], "next": "b"}),
        httpx.Response(200, json={"jobs": [{"name": "c"}], "next": None}),
    ]
    server = Server(*pages)
    assert [job["name"] for job in server.client().jobs(labels={"team": "ads"}, state="paused")] == ["a", "c"]
    assert [request.url.params.get("after") for request in server.requests] == [None, "a", "b"]
    assert all(request.url.params.get_list("label") == ["team=ads"] for request in server.requests)


CALLS: list[tuple[str, str, Callable[[Client], Any]]] = [
    ("PUT", "/jobs/a.b", lambda c: c.apply_job("a.b", {}, why="w", key="k", expected_version=3)),
    ("PUT", "/jobs/a.b", lambda c: c.apply_job("a.b", {}, why="w", key="k", only_new=True)),
    ("DELETE", "/jobs/a.b", lambda c: c.remove_job("a.b", why="w", key="k")),
    ("POST", "/jobs/a.b/restore", lambda c: c.restore_job("a.b", why="w", key="k")),
    ("POST", "/jobs/a.b/state", lambda c: c.set_state("a.b", "paused", why="w", key="k")),
    (
        "PUT",
        "/jobs/a.b/layers/base",
        lambda c: c.put_layer("a.b", "base", {}, why="w", key="k", expected_version=3),
    ),
    ("DELETE", "/jobs/a.b/layers/base", lambda c: c.clear_layer("a.b", "base", why="w", key="k")),
    (
        "POST",
        "/jobs/a.b/layers/base/rollback",
        lambda c: c.rollback("a.b", "base", to_version=1, why="w", key="k"),
    ),
    ("POST", "/layers", lambda c: c.add_layer_kind("x", 5, ["admin"], why="w", key="k")),
    ("DELETE", "/tokens/ab", lambda c: c.revoke_token("ab", why="w", key="k")),
]


@pytest.mark.parametrize(("method", "path", "call"), CALLS, ids=[f"{m} {p}" for m, p, _ in CALLS])
def test_every_change_has_its_key_and_its_reason(method: str, path: str, call: Callable[[Client], Any]):
    server = Server(httpx.Response(200, json={"version": 1, "layers": [], "created": True}))
    call(server.client())
    (request,) = server.requests
    assert (request.method, request.url.path) == (method, f"/api/v1{path}")
    assert request.headers["Idempotency-Key"] == "k"
    said = json.loads(request.content or b"{}") | dict(request.url.params)
    assert said["why"] == "w"


@pytest.mark.parametrize(("version", "header"), [(None, None), (0, '"0"'), (12, '"12"')])
def test_a_version_becomes_an_etag(version: int | None, header: str | None):
    server = Server(good())
    server.client().patch_layer("a", "oncall", {}, why="w", key="k", expected_version=version)
    assert server.requests[0].headers.get("If-Match") == header
