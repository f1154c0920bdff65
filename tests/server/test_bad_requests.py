"""Claims about bad input over HTTP: refused by name, and every table is as it was. Also requests that break off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import a_body
from tests.server.served import Served, served
from tests.server.test_api import is_problem
from tests.server.world import JOB, World, tables_of
from tests.waiting import until

LAYER = f"/jobs/{JOB}/layers/oncall"
NEW = "/jobs/demo.new"


def changed(**changes: Any) -> dict[str, Any]:
    """A job's body with one thing wrong."""
    return {"config": a_body("demo.new") | changes, "why": "a test"}


def patch(changes: dict[str, Any], why: str = "a test") -> dict[str, Any]:
    return {"changes": changes, "why": why}


BIDI, CONTROL = "a\u202egpj.exe", "a\x1b[31mred"
# What is wrong: (method, path, body, headers, status, what the answer must name).
CASES: dict[str, tuple[str, str, Any, dict[str, str], int, str]] = {
    "an unknown field": ("PATCH", LAYER, patch({"tsk_count": 4}), {}, 422, "did you mean `task_count`?"),
    "an unknown field inside": ("PATCH", LAYER, patch({"slo.lag": 4}), {}, 422, "did you mean `slo.lag_s`?"),
    "an unknown field of a job": ("PUT", NEW, changed(ownr="me"), {}, 422, "did you mean `owner`?"),
    "an unknown part of a body": ("PUT", NEW, {"cnfig": {}, "why": "x"}, {}, 422, "did you mean `config`?"),
    "a text for a number": ("PATCH", LAYER, patch({"task_count": "many"}), {}, 422, "task_count"),
    "a number for a text": ("PATCH", LAYER, patch({"owner": 5}), {}, 422, "owner"),
    "a list for a map": ("PATCH", LAYER, patch({"labels": ["a"]}), {}, 422, "labels"),
    "a map for a number": ("PATCH", LAYER, patch({"task_count": {"a": 1}}), {}, 422, "task_count"),
    "no map at all": ("PUT", NEW, {"config": [1], "why": "x"}, {}, 422, "config"),
    "a number too small": ("PATCH", LAYER, patch({"task_count": 0}), {}, 422, "task_count"),
    "a number too large": ("PATCH", LAYER, patch({"batch_rows_max": 2**62}), {}, 422, "batch_rows_max"),
    "a name of 1 MiB": ("PUT", NEW, changed(name="x" * 2**20), {}, 413, "too large"),
    "a name of 60,000 letters": ("GET", "/jobs/" + "x" * 60_000, None, {}, 431, "headers"),
    "a name of 5000 letters": ("GET", "/jobs/" + "x" * 5000, None, {}, 422, "name"),
    "a climbing name": ("PUT", "/jobs/..%2f..%2fx", changed(), {}, 404, ""),
    "a name with SQL": ("PUT", "/jobs/x'%20OR%201=1--", changed(), {}, 422, "name"),
    "a name with a template": ("PUT", "/jobs/%7B%7B7*7%7D%7D", changed(), {}, 422, "name"),
    "a name with a NUL": ("PUT", "/jobs/a%00b", changed(), {}, 422, "name"),
    "a name with a line break": ("PUT", "/jobs/a%0d%0ab", changed(), {}, 422, "name"),
    "a name from right to left": ("PUT", "/jobs/a%E2%80%AEb", changed(), {}, 422, "name"),
    "another name inside": ("PUT", NEW, changed(name="demo.old"), {}, 422, "demo.old"),
    "a label from right to left": ("PATCH", LAYER, patch({"labels": {"team": BIDI}}), {}, 422, ""),
    "an owner with a control character": ("PATCH", LAYER, patch({"owner": CONTROL}), {}, 422, ""),
    "a reason with a control character": ("PATCH", LAYER, patch({"priority": 1}, CONTROL), {}, 422, "why"),
    "a reason from right to left": ("PATCH", LAYER, patch({"priority": 1}, BIDI), {}, 422, "why"),
    "a reason of two lines": ("PATCH", LAYER, patch({"priority": 1}, "a\nb"), {}, 422, "why"),
    "a reason too long": ("PATCH", LAYER, patch({"priority": 1}, "x" * 2001), {}, 422, "why"),
    "no reason": ("PATCH", LAYER, patch({"priority": 1}, " "), {}, 422, "reason"),
    "no reason to remove": ("DELETE", f"/jobs/{JOB}", None, {}, 422, "reason"),
    "an empty path": ("PATCH", LAYER, patch({"": 1}), {}, 422, ""),
    "a path with a hole": ("PATCH", LAYER, patch({"a..b": 1}), {}, 422, "a..b"),
    "a path through a value": ("PATCH", LAYER, patch({"task_count.x": 1}), {}, 422, "task_count"),
    "a stale version": ("PATCH", LAYER, patch({"priority": 1}), {"If-Match": '"0"'}, 409, "current version"),
    "a weak version": ("PATCH", LAYER, patch({"priority": 1}), {"If-Match": 'W/"1"'}, 422, "if-match"),
    "a version that is none": ("PATCH", LAYER, patch({"priority": 1}), {"If-Match": '"x"'}, 422, "if-match"),
    "an unknown layer": ("PATCH", f"/jobs/{JOB}/layers/nolayer", patch({"priority": 1}), {}, 404, "nolayer"),
    "an unknown job": (
        "PATCH",
        "/jobs/demo.nobody/layers/oncall",
        patch({"priority": 1}),
        {},
        404,
        "demo.nobody",
    ),
    "an empty key": ("PATCH", LAYER, patch({"priority": 1}), {"Idempotency-Key": ""}, 422, "idempotency-key"),
    "a long key": (
        "PATCH",
        LAYER,
        patch({"priority": 1}),
        {"Idempotency-Key": "k" * 201},
        422,
        "idempotency-key",
    ),
    "a key that is no word": (
        "PATCH",
        LAYER,
        patch({"priority": 1}),
        {"Idempotency-Key": "a b"},
        422,
        "idempotency-key",
    ),
    "a misspelt parameter": ("GET", "/jobs?lable=team=ads", None, {}, 422, "did you mean `label`?"),
    "a parameter twice": ("GET", "/jobs?limit=1&limit=2", None, {}, 422, "limit"),
    "too many headers": ("GET", "/jobs", None, {f"x-{n}": "1" for n in range(101)}, 431, "headers"),
    "a header too long": ("GET", "/jobs", None, {"x-long": "x" * 17_000}, 431, "headers"),
}


@pytest.mark.parametrize(("method", "path", "body", "headers", "status", "named"), CASES.values(), ids=CASES)
def test_bad_input_is_refused_by_name_and_changes_nothing(
    shared: World, method: str, path: str, body: Any, headers: dict[str, str], status: int, named: str
):
    before = shared.everything()
    answer = shared.ask(method, path, json=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    problem = answer.json()
    assert problem["title"] and problem["detail"] and problem["fix"]
    assert named in answer.text, answer.text
    assert shared.everything() == before


def test_a_scaler_may_not_write_what_oncall_says(shared: World):
    before = shared.everything()
    answer = shared.ask("PATCH", LAYER, role="scaler", json=patch({"task_count": 9}))
    assert "oncall" in is_problem(answer, 403, "Refused")["title"]
    assert shared.everything() == before


def test_a_replayed_key_with_another_body_changes_nothing(world: World):
    headers = {"Idempotency-Key": "k1"}
    assert world.ask("PATCH", LAYER, json=patch({"priority": 1}), headers=headers).status_code == 200
    before = world.everything()
    for method, path, body in (
        ("PATCH", LAYER, patch({"priority": 2})),
        ("PUT", NEW, changed()),
        ("POST", f"/jobs/{JOB}/state", {"state": "paused", "why": "x"}),
        ("POST", "/tokens", {"name": "x", "role": "reader", "why": "x"}),
        ("POST", "/layers", {"name": "x", "precedence": 5, "writers": ["admin"], "why": "x"}),
    ):
        is_problem(world.ask(method, path, json=body, headers=headers), 422, "KeyReused")
    for path in (f"/jobs/{JOB}", LAYER):
        answer = world.ask("DELETE", path, params={"why": "x"}, headers=headers)
        is_problem(answer, 422, "KeyReused")
    assert world.everything() == before


# --- on the wire


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("wire") / "plane") as world:
        world.apply(JOB)
        yield world


def head(world: Served, method: str, path: str, *more: str) -> bytes:
    lines = [
        f"{method} /api/v1{path} HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {world.tokens['admin']}",
    ]
    return "\r\n".join([*lines, *more, "", ""]).encode()


@pytest.mark.parametrize("announced", ["Content-Length: 500", "Transfer-Encoding: chunked"])
def test_a_body_that_breaks_off_is_not_acted_on(wire: Served, announced: str):
    """Plan: announce more than is sent, where what is sent would be a whole request; then hang up."""
    before = tables_of(wire.plane.database)
    body = json.dumps(patch({"priority": 77})).encode()
    sent = body if "Length" in announced else b"%x\r\n%s\r\n" % (len(body), body)
    for cut in (0, 1, len(sent) // 2, len(sent)):
        with wire.connect() as connection:
            head_ = head(wire, "PATCH", LAYER, "Content-Type: application/json", announced)
            connection.sendall(head_ + sent[:cut])
    until(lambda: not wire.server._server.server_state.connections, "the server to hear of each end")
    assert tables_of(wire.plane.database) == before


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /api/v1/health HTTP/1.1\r\n\r\n",
        b"GET /api/v1/health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET /api/v1/health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"POST /api/v1/pipelines HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /api/v1/pipelines HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /api/v1/pipelines HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n",
        b"GET /api/v1/jobs/" + b"x" * 2**20 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_no_request_of_ours_is_answered_4xx_or_not_at_all(wire: Served, data: bytes):
    with wire.connect() as connection:
        connection.sendall(data)
        connection.settimeout(3)
        try:
            answer = connection.recv(4096)
        except (TimeoutError, ConnectionError):
            answer = b""
    assert not answer or b" 4" in answer.split(b"\r\n")[0], answer[:200]
    with wire.client("reader") as client:
        assert [job["name"] for job in client.jobs()] == [JOB]


def test_many_connections_that_say_nothing_keep_nobody_out(wire: Served):
    idle = [wire.connect() for _ in range(200)]
    try:
        with wire.client("reader") as client:
            assert client.job(JOB)["name"] == JOB
    finally:
        for connection in idle:
            connection.close()


def test_a_disk_of_the_store_is_not_named(wire: Served, tmp_path: Path):
    with wire.client("reader") as client:
        text = json.dumps([client.status(), client.job(JOB), client.journal()])
    assert "store.db" not in text and str(tmp_path.parent.parent) not in text
