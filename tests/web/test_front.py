"""The front process: the same answers as the control plane's own, whole bodies, streams, and deaths."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import io
import json
import os
import signal
import socket
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.app import ControlPlane
from penstock.core.token_store import ROLES
from penstock.resources.metrics import JobLoad
from penstock.settings import Settings
from penstock.web.dashboard import FILES
from penstock.web.forward import Forward
from penstock.web.front_process import FrontProcess, serve_behind_front
from penstock.web.server import Listening, bind
from tests.builders import CODE, PACKAGE, a_body
from tests.waiting import LIMIT_S, join, until

PREFIX = "/api/v1"


class Fronted:
    """A control plane without loops, its own port, and the front's."""

    def __init__(self, plane: ControlPlane, server: FrontProcess, behind: int) -> None:
        self.plane, self.server, self.behind = plane, server, behind
        self.port = int(server.url.rsplit(":", 1)[1])
        plane.packages.put(PACKAGE, CODE)
        now_ms = plane.clock.now_ms()
        roles = ROLES - {"container"}
        self.tokens = {role: plane.tokens.issue(f"a-{role}", role, now_ms=now_ms) for role in roles}
        self.tokens["container"] = plane.tokens.issue("c1", "container", now_ms=now_ms, container="c1")

    def ask(
        self,
        method: str,
        path: str,
        *,
        role: str = "admin",
        body: Any = None,
        headers: dict[str, str] | None = None,
        port: int = 0,
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=LIMIT_S)
        try:
            given = {"Authorization": f"Bearer {self.tokens.get(role, role)}", **(headers or {})}
            if isinstance(body, dict):
                body, given["Content-Type"] = json.dumps(body), "application/json"
            connection.request(method, PREFIX + path, body=body, headers=given)
            found = connection.getresponse()
            names = ("etag", "content-type", "www-authenticate", "retry-after", "location")
            kept = {name: value for name, value in found.getheaders() if name.lower() in names}
            return found.status, {name.lower(): value for name, value in kept.items()}, found.read()
        finally:
            connection.close()

    def apply(self, name: str, **changes: Any) -> None:
        body = {"config": a_body(name, **changes), "why": "a test"}
        status, _, said = self.ask("PUT", f"/jobs/{name}", body=body)
        assert status == 201, said

    @contextlib.contextmanager
    def another_front(self, listener: socket.socket, port: int) -> Iterator[int]:
        """A front for a control plane that should answer at `port`."""
        heard, bell = os.pipe()
        settings = replace(self.server._fronts[0].settings, listener=listener.fileno(), bell=bell, port=port)
        process = self.server._launch(settings)
        try:
            yield listener.getsockname()[1]
        finally:
            self.server._end(process, 20)
            os.close(heard)
            os.close(bell)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def fronted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    is_server = request.param == "postgres"
    database = request.getfixturevalue("postgres").new_database() if is_server else ""
    with bind(Listening()) as listener, bind(Listening()) as behind:
        plane = ControlPlane(Settings(folder=tmp_path_factory.mktemp("front"), database=database))
        server = serve_behind_front(plane, listener, behind, Listening()).start()
        try:
            world = Fronted(plane, server, behind.getsockname()[1])
            for number in range(5):
                world.apply(f"demo.j{number}", labels={"team": f"t{number % 2}"})
            yield world
        finally:
            server.stop()
            plane.stop()


def test_the_dashboard_comes_through_it(fronted: Fronted):
    connection = http.client.HTTPConnection("127.0.0.1", fronted.port, timeout=LIMIT_S)
    for path in FILES:
        connection.request("GET", path)
        found = connection.getresponse()
        assert found.status == 200 and found.getheader("content-security-policy"), path
        assert found.read()
    connection.close()


@pytest.mark.parametrize(
    "path",
    [
        "/jobs/demo.j1",
        "/jobs/demo.j9",
        "/jobs/demo.j1?x=1",
        "/jobs/..%2Fdemo",
        "/jobs",
        "/jobs?limit=2",
        "/jobs?limit=2&after=demo.j1",
        "/jobs?after=demo.j3",
        "/jobs?after=demo.j1&limit=2",
        "/jobs?limit=0",
        "/jobs?limit=9999",
        "/jobs?limit=2&limit=3",
        "/jobs?label=team%3Dt1",
        "/jobs?state=running",
        "/jobs/demo.j1/layers",
        "/jobs/demo.j1/history",
        "/health",
        "/nowhere",
    ],
)
@pytest.mark.parametrize("role", ["admin", "container", "nobody"])
def test_answers_what_the_control_plane_answers(fronted: Fronted, path: str, role: str):
    assert fronted.ask("GET", path, role=role) == fronted.ask("GET", path, role=role, port=fronted.behind)


def test_a_read_sees_every_write_that_was_answered(fronted: Fronted):
    for priority in range(30):
        body = {"changes": {"priority": priority}, "why": "a test"}
        status, headers, said = fronted.ask("PATCH", "/jobs/demo.j2/layers/oncall", body=body)
        assert status == 200, said
        _, seen, job = fronted.ask("GET", "/jobs/demo.j2")
        assert seen["etag"] == headers["etag"]
        assert json.loads(job)["config"]["priority"] == priority


def test_a_conflict_comes_back_with_its_headers(fronted: Fronted):
    body = {"changes": {"priority": 7}, "why": "a test"}
    status, headers, said = fronted.ask(
        "PATCH", "/jobs/demo.j3/layers/oncall", body=body, headers={"If-Match": '"999"'}
    )
    assert status == 409 and headers["etag"].strip('"').isdigit()
    assert {"title", "detail", "fix"} <= json.loads(said).keys()


@pytest.mark.parametrize("body", [b'{"changes": {}, "changes": {}, "why": "x"}', b"[" * 500, b'{"a": 1e999}'])
@pytest.mark.parametrize("header", ["", "x", "0" * 32])
def test_a_bad_body_is_refused_whatever_the_caller_says_about_it(fronted: Fronted, body: bytes, header: str):
    """On both ports: only the front knows the word that spares a second look."""
    headers = {"Content-Type": "application/json"} | ({"X-Penstock-Front": header} if header else {})
    for port in (fronted.port, fronted.behind):
        status, _, said = fronted.ask(
            "PATCH", "/jobs/demo.j2/layers/oncall", body=body, headers=headers, port=port
        )
        assert status in (400, 422), said


PATCH, OTHER_PATCH = "/jobs/demo.j2/layers/oncall", "/jobs/demo.j3/layers/oncall"
UNKNOWN_PACKAGE = {"name": "p", "version": "1", "hash": "0" * 64, "entry": "p"}


@pytest.mark.parametrize(
    ("path", "body", "role", "headers"),
    [
        (PATCH, {"changes": {"priority": "x"}, "why": "a test"}, "oncall", {}),
        (PATCH, {"changes": {"priorty": 1}, "why": "a test"}, "oncall", {}),
        (PATCH, {"changes": {"package": UNKNOWN_PACKAGE}, "why": "a test"}, "oncall", {}),
        (PATCH, {"changes": {"priority": 1}, "why": "a test"}, "reader", {}),
        (PATCH, {"changes": {"priority": 1}, "why": "a test"}, "nobody", {}),
        (PATCH, {"changes": {"priority": 1}, "why": "a test"}, "oncall", {"If-Match": '"0"'}),
        ("/jobs/demo.j9/layers/oncall", {"changes": {"priority": 1}, "why": "a test"}, "oncall", {}),
        ("/jobs/demo.j2/layers/scaler", {"changes": {"priority": 1}, "why": "a test"}, "oncall", {}),
    ],
)
def test_a_change_that_is_wrong_is_refused_as_by_the_control_plane(
    fronted: Fronted, path: str, body: Any, role: str, headers: dict[str, str]
):
    before = fronted.ask("GET", "/jobs/demo.j2")
    here, there = (
        fronted.ask("PATCH", path, body=body, role=role, headers=headers, port=port)
        for port in (fronted.port, fronted.behind)
    )
    assert here == there and here[0] >= 400
    assert fronted.ask("GET", "/jobs/demo.j2") == before


def test_a_change_wakes_the_state_syncer_whoever_took_it(fronted: Fronted, monkeypatch: pytest.MonkeyPatch):
    woken = threading.Event()
    monkeypatch.setattr(fronted.plane, "wake_syncer", woken.set)
    monkeypatch.setattr(fronted.server, "_wake_syncer", woken.set)
    assert fronted.ask("PATCH", PATCH, body={"changes": {"priority": 3}, "why": "a test"})[0] == 200
    assert woken.wait(LIMIT_S)


def test_changes_in_both_processes_at_once_are_all_there(fronted: Fronted):
    """Plan: four who write by turns to the front and to the control plane, each 15 times, into two jobs."""
    answers: list[tuple[str, int, bytes]] = []

    def write(number: int) -> None:
        for turn in range(15):
            path = (PATCH, OTHER_PATCH)[turn % 2]
            port = (fronted.port, fronted.behind)[(turn + number) // 2 % 2]
            body = {"changes": {"priority": number * 100 + turn}, "why": f"writer {number}"}
            status, headers, said = fronted.ask("PATCH", path, body=body, port=port)
            answers.append((path, int(headers.get("etag", '"0"').strip('"')), said))
            assert status == 200, said

    before = {
        path: fronted.plane.jobs.view(path.split("/")[2]).expected_version for path in (PATCH, OTHER_PATCH)
    }
    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert len(answers) == 60
    for path in (PATCH, OTHER_PATCH):
        versions = sorted(version for asked, version, _ in answers if asked == path)
        assert versions == list(range(before[path] + 1, before[path] + len(versions) + 1))


def test_on_a_server_the_scribe_takes_changes(fronted: Fronted):
    """Plan: a front whose control plane hears nobody, on the same database."""
    with bind(Listening()) as listener, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        with fronted.another_front(listener, nobody.getsockname()[1]) as port:
            change = {"changes": {"priority": 9}, "why": "a test"}
            until(lambda: fronted.ask("GET", "/jobs/demo.j2", port=port)[0] == 200, "its answer")
            status, _, said = fronted.ask("PATCH", PATCH, body=change, port=port)
            whole = fronted.ask("DELETE", f"{PATCH}?why=a+test", port=port)
    assert whole[0] == 503
    if not fronted.plane.database.is_shared:
        assert (status, json.loads(said)["title"]) == (503, "the control plane does not answer")
    else:
        assert status == 200
        assert fronted.plane.jobs.view("demo.j2").config["priority"] == 9


def a_package(size: int) -> tuple[str, bytes]:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("code.py", "x = 1\n")
        archive.writestr("data.bin", os.urandom(size))
    return hashlib.sha256(packed.getvalue()).hexdigest(), packed.getvalue()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_arrives_whole(fronted: Fronted, chunked: bool):
    digest, packed = a_package(3_000_000)
    pieces = (packed[at : at + 50_000] for at in range(0, len(packed), 50_000))
    body = pieces if chunked else packed
    status, _, said = fronted.ask("PUT", f"/packages/{digest}", role="developer", body=body)
    assert status in (200, 201), said
    assert fronted.plane.packages.has(digest)


def test_a_large_body_of_a_stranger_is_refused_and_not_kept(fronted: Fronted):
    digest, packed = a_package(3_000_000)
    status, _, _ = fronted.ask("PUT", f"/packages/{digest}", role="reader", body=packed)
    assert status == 403
    assert not fronted.plane.packages.has(digest)


def test_events_come_through_and_a_watcher_that_leaves_is_gone(fronted: Fronted):
    hub = fronted.server._api._api.state.events
    connection = http.client.HTTPConnection("127.0.0.1", fronted.port, timeout=LIMIT_S)
    connection.request(
        "GET", f"{PREFIX}/events", headers={"Authorization": f"Bearer {fronted.tokens['admin']}"}
    )
    found = connection.getresponse()
    assert found.status == 200
    until(lambda: hub._watchers == 1, "the watcher")
    body = {"changes": {"priority": 77}, "why": "to be seen by a watcher"}
    assert fronted.ask("PATCH", "/jobs/demo.j4/layers/oncall", body=body)[0] == 200
    lines = b""
    while b"to be seen by a watcher" not in lines:
        line = found.readline()
        assert line, lines
        lines += line
    assert found.fp is not None
    found.close()
    connection.close()
    until(lambda: hub._watchers == 0, "it to be gone")


def test_what_the_scaler_saw_is_told(fronted: Fronted):
    load = JobLoad(
        at_ms=1, task_count=1, input_rate=5.0, processed_rate=5.0, busy=0.5, lag_records=0.0, lag_s=0.0
    )
    fronted.plane.scaler.loads["demo.j0"] = load

    def seen() -> Any:
        return json.loads(fronted.ask("GET", "/jobs/demo.j0")[2])["load"]

    until(seen, "its load")
    assert seen()["input_rate"] == 5.0


def test_a_front_or_scribe_that_dies_is_replaced(fronted: Fronted):
    pids = fronted.server.pids
    assert len(pids) == (2 if fronted.plane.database.is_shared else 1)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: len({*fronted.server.pids} - {*pids}) == len(pids), "others in their places")
    assert fronted.ask("GET", "/jobs/demo.j1")[0] == 200
    assert fronted.ask("PATCH", PATCH, body={"changes": {"priority": 5}, "why": "a test"})[0] == 200
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_database_url_is_not_among_its_arguments(fronted: Fronted):
    command = " ".join(psutil.Process(fronted.server.pids[0]).cmdline())
    assert "store.db" not in command and "penstock.web.front" in command


def test_it_ends_with_the_control_plane(tmp_path: Path):
    with bind(Listening()) as listener, bind(Listening()) as behind:
        plane = ControlPlane(Settings(folder=tmp_path))
        server = serve_behind_front(plane, listener, behind, Listening()).start()
        world = Fronted(plane, server, behind.getsockname()[1])
        assert world.ask("GET", "/health")[0] == 200
        (running,) = [front.process for front in server._fronts]
        server._loop.stop()
        assert running is not None and running.stdin is not None
        running.stdin.write('{"half of a li')
        running.stdin.close()  # as the kernel does for one that was killed
        assert running.wait(LIMIT_S) == 0
        server._api.stop()
        plane.stop()


class Behind:
    """A server that does as a test tells it, one connection after another."""

    def __init__(self, *answers: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.heard = self._listener.getsockname()[1], list[bytes]()
        threading.Thread(target=self._serve, args=(answers,), daemon=True).start()

    def _serve(self, answers: tuple[bytes, ...]) -> None:
        for answer in answers:
            taken, _ = self._listener.accept()
            with taken:
                self.heard.append(taken.recv(65536))
                taken.sendall(answer)
        self._listener.close()


def ask_through(port: int, method: str, path: str = "/x") -> tuple[int, dict[str, Any], bytes]:
    """One request through `Forward`, without a socket in front of it."""

    async def ask() -> tuple[int, dict[str, Any], bytes]:
        app = Forward("127.0.0.1", port)
        try:
            return await _ask_through(app, method, path)
        finally:
            await app.close()

    return asyncio.run(ask())


async def _ask_through(app: Forward, method: str, path: str) -> tuple[int, dict[str, Any], bytes]:
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), body


def test_without_a_control_plane_it_says_so():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        status, _, body = ask_through(nobody.getsockname()[1], "GET")
    assert status == 503
    assert json.loads(body)["title"] == "the control plane does not answer"


@pytest.mark.parametrize(
    ("method", "title"),
    [
        ("GET", "the control plane did not answer"),
        ("PATCH", "the control plane did not say whether it has done this"),
    ],
)
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nconte", b"garbage\r\n\r\n"])
def test_a_control_plane_that_hangs_up(method: str, title: str, answer: bytes):
    status, headers, body = ask_through(Behind(answer).port, method)
    problem = json.loads(body)
    assert (status, problem["title"]) == (503, title)
    assert problem["detail"] and problem["fix"]
    assert headers[b"retry-after"] == b"1"


def test_a_kept_connection_that_was_closed_costs_a_reader_nothing_and_a_writer_an_honest_answer():
    """Plan: an answer that keeps the connection, which is then closed; the next request takes it."""
    good = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    behind = Behind(good, good)

    async def twice(method: str) -> int:
        app = Forward("127.0.0.1", behind.port)
        assert (await _ask_through(app, "GET", "/x"))[0] == 200
        status = (await _ask_through(app, method, "/x"))[0]
        await app.close()
        return status

    assert asyncio.run(twice("GET")) == 200
    assert len(behind.heard) == 2


def test_what_breaks_off_in_the_middle_has_no_end():
    half = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"
    status, headers, body = ask_through(Behind(half).port, "GET")
    assert (status, headers[b"content-length"], body) == (200, b"10", b"half")
