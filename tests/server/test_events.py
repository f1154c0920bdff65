"""Claims about the event stream: everything, once, in order; resumed, filtered, bounded, and ended in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.client import Client
from penstock.core.errors import Refused, StoreUnavailable
from penstock.server.events import POLL_S
from penstock.server.serving import Listening
from tests.builders import ONCALL
from tests.server.served import Served, served
from tests.waiting import LIMIT_S, join, until


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "plane", heartbeat_s=0.2, watchers_max=3) as world:
        world.apply()
        yield world


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One for all tests that are refused."""
    with served(tmp_path_factory.mktemp("events") / "plane") as world:
        yield world


LONG_S = 3600  # longer than any wait here: what comes before came for another reason


class Watcher:
    """Collects events in a thread of its own."""

    def __init__(self, events: Iterator[dict[str, Any]]) -> None:
        self.events: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self._source = events
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for event in self._source:
                self.events.append(event)
        except Exception as error:
            self.error = error

    def wait_for(self, count: int) -> None:
        until(lambda: len(self.events) == count, lambda: self.events)

    def join(self) -> None:
        join(self._thread, "the stream")


def begun(world: Served, count: int) -> None:
    """Wait until so many watch: whoever sees a stream begin sees all that is decided from then on."""
    until(lambda: world.hub._watchers == count, f"{count} watchers")


def reasons(watcher: Watcher) -> list[str]:
    return [event["reason"] for event in watcher.events]


def raw(world: Served, role: str = "reader") -> httpx.Client:
    headers = {"Authorization": f"Bearer {world.tokens[role]}"}
    return httpx.Client(base_url=f"{world.server.url}/api/v1", headers=headers, timeout=LIMIT_S)


def test_what_is_decided_arrives_at_once_and_in_order(world: Served):
    with world.client("reader") as client:
        watcher = Watcher(client.events(limit=3, wait_s=LONG_S))
        begun(world, 1)
        for priority in (1, 2, 3):
            world.patch(priority)
        watcher.join()  # long before its own end
    assert reasons(watcher) == ["p1", "p2", "p3"]
    ids = [event["id"] for event in watcher.events]
    assert ids == sorted(ids)


def test_a_stream_has_ids_kinds_and_entries(world: Served):
    world.patch(1)
    with raw(world) as http:
        answer = http.get("/events", params={"since": 0, "wait_s": 0})
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    blocks = [block for block in answer.text.split("\n\n") if block.startswith("id: ")]
    entries = world.plane.journal.entries(limit=1000)
    assert [block.splitlines()[0] for block in blocks] == [f"id: {entry.id}" for entry in entries]
    assert all(block.splitlines()[1] == "event: layer" for block in blocks)


def test_a_watcher_resumes_after_the_last_it_saw(world: Served):
    for priority in (1, 2, 3):
        world.patch(priority)
    with world.client("reader") as client:
        seen = list(client.events(since=0, wait_s=0))
        rest = list(client.events(since=seen[-3]["id"], wait_s=0))
        assert rest == seen[-2:]
    with raw(world) as http:
        answer = http.get(
            "/events", params={"since": 0, "wait_s": 0}, headers={"Last-Event-ID": str(seen[-2]["id"])}
        )
        assert [line for line in answer.text.splitlines() if line.startswith("id: ")] == [
            f"id: {seen[-1]['id']}"
        ]


def test_more_than_a_page_arrives_whole(world: Served):
    for priority in range(1, 620):
        world.plane.jobs.patch_layer(
            "demo.count",
            "oncall",
            {"priority": priority},
            actor=ONCALL,
            reason=f"p{priority}",
            idempotency_key=None,
            now_ms=1,
        )
    with world.client("reader") as client:
        found = list(client.events(since=0, wait_s=0))
    assert [event["id"] for event in found] == list(range(1, world.plane.journal.last_id() + 1))


def test_a_subject_filters(world: Served):
    world.apply("demo.other")
    world.patch(1, "demo.other")
    with world.client("reader") as client:
        found = list(client.events(since=0, subject="demo.other", wait_s=0))
    assert found and {event["subject"] for event in found} == {"demo.other"}


def test_an_idle_stream_says_that_it_lives(world: Served):
    with raw(world) as http, http.stream("GET", "/events", params={"wait_s": LONG_S}) as answer:
        lines = (line for line in answer.iter_lines() if line)
        assert list(islice(lines, 3)) == ["retry: 1000", ": still here", ": still here"]


def test_there_is_room_for_so_many(world: Served):
    with ExitStack() as watching, raw(world) as http, world.client("reader") as client:
        for _ in range(3):  # an answer's head says that the place is taken
            response = watching.enter_context(http.stream("GET", "/events", params={"wait_s": 60}))
            assert response.status_code == 200
        with pytest.raises(Refused, match="too many event streams") as refused:
            list(client.events(wait_s=0))
        assert refused.value.why and refused.value.fix


def test_who_leaves_makes_room(world: Served):
    for _ in range(12):
        with raw(world) as http, http.stream("GET", "/events") as response:
            assert response.status_code == 200
        begun(world, 0)  # the server notices the end of a connection with its next write


def test_streams_end_in_order_when_the_server_stops(world: Served):
    watchers = [Watcher(world.client("reader").events(wait_s=LONG_S)) for _ in range(2)]
    begun(world, 2)
    world.server.stop(LIMIT_S)
    for watcher in watchers:
        watcher.join()
        assert watcher.error is None  # the end of a stream, not a broken connection
    assert not world.server.is_serving


def test_a_stream_ends_with_its_token(world: Served):
    with world.client("admin") as admin:
        issued = admin.issue_token("guest", "reader", days=1, why="a look", key="g1")
        watcher = Watcher(world.client(token=issued["token"]).events(wait_s=LONG_S))
        begun(world, 1)
        admin.revoke_token(issued["id"], why="enough", key="g2")
        watcher.join()
    assert watcher.error is None


def test_what_another_instance_writes_appears_by_itself(tmp_path: Path, postgres: Any):
    """Plan: two control planes on one PostgreSQL; a watcher of one sees what the other was told."""
    assert POLL_S <= 0.2, "so that it appears within a second"
    database = postgres.new_database()
    shared = tmp_path / "plane"
    with served(shared, database=database) as one, served(shared, database=database) as two:
        one.apply()
        with one.client("reader") as client:
            watcher = Watcher(client.events(subject="demo.count", limit=1, wait_s=LONG_S))
            begun(one, 1)
            two.patch(7)
            watcher.join()
    assert reasons(watcher) == ["p7"]


def test_watch_goes_on_without_a_gap_through_a_restart(tmp_path: Path):
    """Plan: a watcher; its server stops and another takes its port; nothing is missed and nothing comes twice."""
    with served(tmp_path / "plane") as first:
        first.apply()
        port = int(first.server.url.rsplit(":", 1)[1])
        token = first.tokens["reader"]
        client = Client(first.server.url, token)
        since = first.plane.journal.last_id()
        watcher = Watcher(client.watch(since=since, subject="demo.count"))
        first.patch(1)
        watcher.wait_for(1)
    with served(tmp_path / "plane", listening=Listening(port=port)) as second:
        assert second.plane.tokens.caller(token, now_ms=second.plane.clock.now_ms()).role == "reader"
        second.patch(2)
        watcher.wait_for(2)
        client.close()
    assert reasons(watcher) == ["p1", "p2"]


def test_watch_gives_up_when_its_patience_ends():
    client = Client("http://127.0.0.1:9", "pk_token", pause=lambda ms: None, retries=0)
    with client, pytest.raises(StoreUnavailable):
        next(client.watch(since=0, patience_ms=1000))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("since", "-1"),
        ("since", "x"),
        ("since", str(2**63)),
        ("limit", "0"),
        ("limit", "1001"),
        ("wait_s", "-1"),
        ("wait_s", "3601"),
        ("wait_s", "1.5"),
        ("subject", ""),
        ("subject", "a\x00b"),
    ],
)
def test_parameters_have_bounds(seen: Served, name: str, value: str):
    with raw(seen) as http:
        answer = http.get("/events", params={name: value})
        assert answer.status_code == 422 and answer.json()["fix"]
        assert http.get("/events", headers={"Last-Event-ID": "x"}).status_code == 422
