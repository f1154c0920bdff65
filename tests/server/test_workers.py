"""Server workers: the same answers as the control plane's own, what they pass on, streams, and deaths."""

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

import httpx
import psutil
import pytest

from penstock.app import ControlPlane
from penstock.client import Client
from penstock.db.tokens import ROLES
from penstock.fleet.messages import Heartbeat
from penstock.scaling.metrics.frames import JobLoad
from penstock.server.api import ControlProxy
from penstock.server.routes.status import FILES
from penstock.server.serving import Listening, bind
from penstock.server.workers import ApiProcesses, _end
from penstock.settings import Settings
from tests.builders import CODE, PACKAGE, a_body
from tests.waiting import LIMIT_S, join, until

PREFIX = "/api/v1"


class Worked:
    """A control plane without loops, its own port, and that of its workers."""

    def __init__(self, plane: ControlPlane, server: ApiProcesses) -> None:
        self.plane, self.server, self.behind = plane, server, server.control.port
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
    def another_worker(self, listener: socket.socket, control: int) -> Iterator[int]:
        """A worker for a control plane that should listen at this port."""
        ours = self.server._given
        self.server._given = replace(
            ours, listener=listener.fileno(), control=f"http://127.0.0.1:{control}", named=f":{control}"
        )
        try:
            child = self.server._spawn()
        finally:
            self.server._given = ours
        try:
            yield listener.getsockname()[1]
        finally:
            _end(child, 20)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def worked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worked]:
    is_server = request.param == "postgres"
    database = request.getfixturevalue("postgres").new_database() if is_server else ""
    with bind(Listening()) as listener, bind(Listening()) as control:
        plane = ControlPlane(Settings(folder=tmp_path_factory.mktemp("front"), database=database))
        server = ApiProcesses(plane, listener, control, Listening()).start()
        try:
            world = Worked(plane, server)
            for number in range(5):
                world.apply(f"demo.j{number}", labels={"team": f"t{number % 2}"})
            yield world
        finally:
            server.stop()
            plane.stop()


def test_the_dashboard_comes_through_it(worked: Worked):
    connection = http.client.HTTPConnection("127.0.0.1", worked.port, timeout=LIMIT_S)
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
def test_a_worker_answers_what_the_control_plane_answers(worked: Worked, path: str, role: str):
    assert worked.ask("GET", path, role=role) == worked.ask("GET", path, role=role, port=worked.behind)


def test_a_read_sees_every_write_that_was_answered(worked: Worked):
    for priority in range(30):
        body = {"changes": {"priority": priority}, "why": "a test"}
        status, headers, said = worked.ask("PATCH", "/jobs/demo.j2/layers/oncall", body=body)
        assert status == 200, said
        _, seen, job = worked.ask("GET", "/jobs/demo.j2")
        assert seen["etag"] == headers["etag"]
        assert json.loads(job)["config"]["priority"] == priority


def test_a_conflict_comes_back_with_its_headers(worked: Worked):
    body = {"changes": {"priority": 7}, "why": "a test"}
    status, headers, said = worked.ask(
        "PATCH", "/jobs/demo.j3/layers/oncall", body=body, headers={"If-Match": '"999"'}
    )
    assert status == 409 and headers["etag"].strip('"').isdigit()
    assert {"title", "detail", "fix"} <= json.loads(said).keys()


@pytest.mark.parametrize("body", [b'{"changes": {}, "changes": {}, "why": "x"}', b"[" * 500, b'{"a": 1e999}'])
@pytest.mark.parametrize("header", ["", "x", "0" * 32])
def test_a_bad_body_is_refused_whatever_the_caller_says_about_it(worked: Worked, body: bytes, header: str):
    """On both ports: only the front knows the word that spares a second look."""
    headers = {"Content-Type": "application/json"} | ({"X-Penstock-Front": header} if header else {})
    for port in (worked.port, worked.behind):
        status, _, said = worked.ask(
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
    worked: Worked, path: str, body: Any, role: str, headers: dict[str, str]
):
    before = worked.ask("GET", "/jobs/demo.j2")
    here, there = (
        worked.ask("PATCH", path, body=body, role=role, headers=headers, port=port)
        for port in (worked.port, worked.behind)
    )
    assert here == there and here[0] >= 400
    assert worked.ask("GET", "/jobs/demo.j2") == before


def test_a_change_wakes_the_state_syncer_whoever_took_it(worked: Worked, monkeypatch: pytest.MonkeyPatch):
    woken = threading.Event()
    monkeypatch.setattr(worked.plane, "wake_syncer", woken.set)
    assert worked.ask("PATCH", PATCH, body={"changes": {"priority": 3}, "why": "a test"})[0] == 200
    assert woken.wait(LIMIT_S)


def test_changes_in_both_processes_at_once_are_all_there(worked: Worked):
    """Plan: four who write by turns to the front and to the control plane, each 15 times, into two jobs."""
    answers: list[tuple[str, int, bytes]] = []

    def write(number: int) -> None:
        for turn in range(15):
            path = (PATCH, OTHER_PATCH)[turn % 2]
            port = (worked.port, worked.behind)[(turn + number) // 2 % 2]
            body = {"changes": {"priority": number * 100 + turn}, "why": f"writer {number}"}
            status, headers, said = worked.ask("PATCH", path, body=body, port=port)
            answers.append((path, int(headers.get("etag", '"0"').strip('"')), said))
            assert status == 200, said

    before = {
        path: worked.plane.jobs.view(path.split("/")[2]).expected_version for path in (PATCH, OTHER_PATCH)
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


def test_a_worker_serves_jobs_without_its_control_plane_and_says_what_it_cannot(worked: Worked):
    with bind(Listening()) as listener, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        with worked.another_worker(listener, nobody.getsockname()[1]) as port:
            change = {"changes": {"priority": 9}, "why": "a test"}
            until(lambda: worked.ask("GET", "/jobs/demo.j2", port=port)[0] == 200, "its answer")
            assert worked.ask("PATCH", PATCH, body=change, port=port)[0] == 200
            status, headers, said = worked.ask("GET", "/status", port=port)
    assert (status, headers["retry-after"]) == (503, "1")
    assert json.loads(said)["title"] == "the control plane does not answer"
    assert worked.plane.jobs.view("demo.j2").config.priority == 9


def test_what_needs_the_lease_holder_is_passed_on_and_named(worked: Worked):
    for path in ("/status", "/containers", "/shards", "/capacity", "/tasks"):
        status, _, here = worked.ask("GET", path)
        assert (status, worked.ask("GET", path, port=worked.behind)[0]) == (200, 200), here
    with Client(worked.server.url, worked.tokens["container"], timeout_s=LIMIT_S) as client:
        client.register("c1", "i1", "f1")
        assert client._link._control == f"{worked.server.control.url}/api/v1"
        assert client.beat(Heartbeat(container="c1", incarnation="i1", sequence=1)).sequence == 1
        # Where it cannot be reached the API's own address serves as before.
        client._link._control = "http://127.0.0.1:1/api/v1"
        assert client.beat(Heartbeat(container="c1", incarnation="i1", sequence=2)).sequence == 2
        assert client._link._control == f"{worked.server.control.url}/api/v1"


def test_only_a_safe_address_of_the_lease_holder_is_used():
    with Client("https://penstock.test:7337", "pk_token") as client:
        for named in ("http://penstock.test:7338", "ftp://x", ":x", ":99999999", "", "nonsense"):
            client._link._note_control(named)
            assert client._link._control == "", named
        client._link._note_control(":7338")
        assert client._link._control == "https://penstock.test:7338/api/v1"
        client._link._note_control("https://other.test:1234/")
        assert client._link._control == "https://other.test:1234/api/v1"


def a_package(size: int) -> tuple[str, bytes]:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("code.py", "x = 1\n")
        archive.writestr("data.bin", os.urandom(size))
    return hashlib.sha256(packed.getvalue()).hexdigest(), packed.getvalue()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_arrives_whole(worked: Worked, chunked: bool):
    digest, packed = a_package(3_000_000)
    pieces = (packed[at : at + 50_000] for at in range(0, len(packed), 50_000))
    body = pieces if chunked else packed
    status, _, said = worked.ask("PUT", f"/packages/{digest}", role="developer", body=body)
    assert status in (200, 201), said
    assert worked.plane.packages.has(digest)


def test_a_large_body_of_a_stranger_is_refused_and_not_kept(worked: Worked):
    digest, packed = a_package(3_000_000)
    status, _, _ = worked.ask("PUT", f"/packages/{digest}", role="reader", body=packed)
    assert status == 403
    assert not worked.plane.packages.has(digest)


def test_events_come_through_from_whichever_worker(worked: Worked):
    connection = http.client.HTTPConnection("127.0.0.1", worked.port, timeout=LIMIT_S)
    connection.request(
        "GET", f"{PREFIX}/events", headers={"Authorization": f"Bearer {worked.tokens['admin']}"}
    )
    found = connection.getresponse()
    assert found.status == 200
    body = {"changes": {"priority": 77}, "why": "to be seen by a watcher"}
    assert worked.ask("PATCH", "/jobs/demo.j4/layers/oncall", body=body)[0] == 200
    lines = b""
    while b"to be seen by a watcher" not in lines:
        line = found.readline()
        assert line, lines
        lines += line
    found.close()
    connection.close()


def test_what_the_scaler_saw_is_told(worked: Worked):
    load = JobLoad(
        at_ms=1, task_count=1, input_rate=5.0, processed_rate=5.0, busy=0.5, lag_records=0.0, lag_s=0.0
    )
    worked.plane.scaler.loads["demo.j0"] = load

    def seen() -> Any:
        return json.loads(worked.ask("GET", "/jobs/demo.j0")[2])["load"]

    until(seen, "its load")
    assert seen()["input_rate"] == 5.0


def test_a_worker_that_dies_is_replaced(worked: Worked):
    pids = worked.server.pids
    assert len(pids) == worked.plane.settings.workers
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: len({*worked.server.pids} - {*pids}) == len(pids), "others in their places")
    assert worked.ask("GET", "/jobs/demo.j1")[0] == 200
    assert worked.ask("PATCH", PATCH, body={"changes": {"priority": 5}, "why": "a test"})[0] == 200
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_database_url_is_not_among_its_arguments(worked: Worked):
    command = " ".join(psutil.Process(worked.server.pids[0]).cmdline())
    assert "store.db" not in command and "penstock.server.workers" in command


def test_what_is_under_way_is_finished_when_a_worker_ends(worked: Worked):
    """Plan: SIGTERM to all workers while one has half a body; the rest of it comes then."""
    digest, packed = a_package(100_000)
    connection = http.client.HTTPConnection("127.0.0.1", worked.port, timeout=LIMIT_S)
    connection.putrequest("PUT", f"{PREFIX}/packages/{digest}")
    connection.putheader("Authorization", f"Bearer {worked.tokens['developer']}")
    connection.putheader("Content-Length", str(len(packed)))
    connection.endheaders(packed[:50_000])
    pids = worked.server.pids
    until(lambda: len({*worked.server.pids} - {*pids}) == 0, "them to run")
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    connection.send(packed[50_000:])
    found = connection.getresponse()
    assert found.status == 201, found.read()
    connection.close()
    until(lambda: not {*worked.server.pids} & {*pids}, "others in their places")


def test_they_end_with_the_control_plane(tmp_path: Path):
    with bind(Listening()) as listener, bind(Listening()) as control:
        plane = ControlPlane(Settings(folder=tmp_path))
        server = ApiProcesses(plane, listener, control, Listening()).start()
        world = Worked(plane, server)
        assert world.ask("GET", "/health")[0] == 200
        server._loop.stop()
        for running in [child.process for child in server._children]:
            assert running.stdin is not None
            running.stdin.write('{"half of a li')
            running.stdin.close()  # as the kernel does for one that was killed
            assert running.wait(LIMIT_S) == 0
        server.control.stop()
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
    """One request through `ControlProxy`, without a socket in front of it."""

    async def ask() -> tuple[int, dict[str, Any], bytes]:
        return await _ask_through(
            ControlProxy(f"http://127.0.0.1:{port}", trust=None, named=":1"), method, path
        )

    return asyncio.run(ask())


async def _ask_through(app: ControlProxy, method: str, path: str) -> tuple[int, dict[str, Any], bytes]:
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}
    sent: list[Any] = []

    bodies = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        return bodies.pop() if bodies else await asyncio.Event().wait()  # the caller stays

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
        ("PATCH", "the control plane did not report whether the request was carried out"),
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
        app = ControlProxy(f"http://127.0.0.1:{behind.port}", trust=None, named=":1")
        assert (await _ask_through(app, "GET", "/x"))[0] == 200
        return (await _ask_through(app, method, "/x"))[0]

    assert asyncio.run(twice("GET")) == 200
    assert len(behind.heard) == 2


def test_what_breaks_off_in_the_middle_has_no_end():
    """Whoever asked must see that the answer is not whole: the connection breaks off here too."""
    half = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"
    with pytest.raises(httpx.RemoteProtocolError):
        ask_through(Behind(half).port, "GET")
