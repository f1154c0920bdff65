"""Threads that must live do, whatever is answered: wardens go on beating, engines asking for lists, hosts for orders."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from penstock.client import Client
from penstock.container.container import ContainerSettings, _HttpLink
from penstock.container.engine import TaskListFetcher
from penstock.container.host import LendableHost
from penstock.container.warden import Warden
from penstock.core.errors import PenstockError
from penstock.core.system_clock import SystemClock
from penstock.fleet.messages import Profile
from penstock.fleet.task_service import TaskList
from tests.fleet.test_warden import ENGINE
from tests.server.garbage import GARBAGE, StrangeServer, strange_server
from tests.waiting import LIMIT_S, until

PROFILE = Profile(heartbeat_ms=100, deadline_ms=3_000, failover_ms=6_000, engine_stale_ms=60_000)
NEW = {"said_by_a_newer_version": {"more": [1, 2]}}
JOB = {
    "birth": "b",
    "generation": 1,
    "running_version": 1,
    "config": {"kind": "process"},
    "tasks": [[0, [0]]],
}


def as_control_plane(path: str, body: Any) -> dict[str, Any]:
    """What one of a newer version says, with fields that are not known here, at each depth."""
    if path.endswith("/beat"):
        return {
            "verdict": "ok",
            "term": 1,
            "sequence": body["sequence"],
            "assignment_version": 1,
            "shards": [{"shard": 3, "epoch": 1, "state": "owned", **NEW}],
            "shard_count": 8,
            "list_version": 1,
            "restarts": [{"task_id": "a/0", "number": 1, **NEW}],
            "reason": "",
            **NEW,
        }
    if path.startswith("/api/v1/tasks"):
        job = JOB | NEW
        return {"version": 5, "full": True, "jobs": {"a": job}, "removed": [], "since": 0, **NEW}
    if path.endswith("/order"):
        return {"state": "here", "order": None, **NEW}
    return NEW


@pytest.fixture
def server() -> Iterator[StrangeServer]:
    with strange_server(as_control_plane) as found:
        yield found


@pytest.fixture
def warden(server: StrangeServer, tmp_path: Path) -> Iterator[Warden]:
    client = Client(server.url, "pk_x", timeout_s=PROFILE.deadline_ms / 4000)
    lives = count()
    (tmp_path / "later").write_text("0")  # how much later than this machine's its clock is
    found = Warden(
        container="c1",
        folder=tmp_path / "c1",
        engine_command=[sys.executable, "-c", ENGINE, str(tmp_path / "later")],
        link=_HttpLink(client, "folder", str(tmp_path / "no-store")),
        profile=PROFILE,
        clock=SystemClock(),
        new_incarnation=lambda: f"life-{next(lives)}",
    )
    thread = threading.Thread(target=found.run)
    thread.start()
    yield found
    server.now = None
    found.stop()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    client.close()


def beats(server: StrangeServer) -> list[dict[str, Any]]:
    return [body for path, body in server.asked if path.endswith("/beat")]


def test_a_newer_control_plane_is_understood(server: StrangeServer, warden: Warden) -> None:
    """Unknown fields in every answer: one life, whose beats are acknowledged for longer than its lease."""
    until(lambda: len(beats(server)) > 2 * PROFILE.deadline_ms / PROFILE.heartbeat_ms, "no more beats come")
    assert warden._contact.missed == 0
    assert {beat["incarnation"] for beat in beats(server)} == {"life-0"}


def test_a_warden_goes_on_after_every_kind_of_answer(server: StrangeServer, warden: Warden) -> None:
    until(lambda: len(beats(server)) > 3, "it never beats")
    for what, answer in GARBAGE.items():
        before, server.now = server.strange, answer
        until(lambda before=before: server.strange >= before + 2, f"after {what} it asks no more")
        so_many, server.now = len(beats(server)), None
        until(lambda so_many=so_many: len(beats(server)) >= so_many + 2, f"{what} was the end of it")
        until(lambda: warden._contact.missed == 0, f"after {what} no answer is taken")


class Taken:
    """What a Task Manager gets of lists."""

    def __init__(self) -> None:
        self.task_list: TaskList | None = None

    def on_task_list(self, news: TaskList, now_ms: int, *, cached: bool = False) -> bool:
        self.task_list = news
        return True


# A list may have half a gigabyte, which is too much for a test.
@pytest.mark.parametrize("what", [what for what in GARBAGE if what != "a body without end"])
def test_lists_come_again_after_every_kind_of_answer(
    server: StrangeServer, tmp_path: Path, what: str
) -> None:
    server.now, taken, clock = GARBAGE[what], Taken(), SystemClock()
    with Client(server.url, "pk_x", timeout_s=0.5, retries=0) as client:
        lists = TaskListFetcher(client, tmp_path / "tasks.json", clock, lambda: None)
        lists._loop.every_ms = 20
        if what == "a body that drips":
            client._link._http.timeout = 0.01  # between two drops
        lists.start()
        until(lambda: server.strange >= 2, f"after {what} it asks no more")
        server.now = None

        def has_list() -> bool:
            lists.deliver(taken, clock.boot_ms())  # type: ignore[arg-type]
            return taken.task_list is not None

        until(has_list, f"{what} was the end of it")
        lists._loop.stop()
    assert taken.task_list is not None and taken.task_list.version == 5
    assert [spec.task_id for spec in taken.task_list.specs()] == ["a/0"]


@pytest.mark.parametrize("what", GARBAGE)
def test_a_host_goes_on_asking_after_every_kind_of_answer(
    server: StrangeServer, tmp_path: Path, what: str
) -> None:
    """Orders that cannot be read change nothing; what a dying container's host is told is of no matter."""
    (tmp_path / "token").write_text("pk_x")
    settings = ContainerSettings(
        name="c1",
        folder=tmp_path,
        url=server.url,
        token_file=tmp_path / "token",
        bus="",
        rows="",
        profile="fast",
        engine="spark",
        cores=2,
    )
    host = LendableHost(settings, lambda *_: Still(), SystemClock())
    host._enter(settings)
    assert host._place is not None
    host._place.client.close()
    host._place.client = Client(server.url, "pk_x", timeout_s=0.3, retries=0)
    server.now = GARBAGE[what]
    assert host.poll_order() == ""
    with Client(server.url, "pk_x", timeout_s=0.3, retries=0) as client:
        # Each of these is a warden's or a host's: it raises what they expect, or takes no for an answer.
        asking: list[Callable[[], object]] = [lambda: client.container_dead("c1", "f")]
        asking += [client.installation] if what != "a body that drips" else []  # a question may take a minute
        for ask in asking:
            with contextlib.suppress(PenstockError):
                assert ask() is False, f"{what} was taken for an answer"
    server.now = None
    assert host.poll_order() == "here"
    host._leave()


class Still:
    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


def test_an_order_of_the_future_is_declined_and_not_taken_for_a_known_one(tmp_path: Path) -> None:
    answers: list[Any] = []

    def sane(path: str, body: Any) -> dict[str, Any]:
        if path.endswith("/answer"):
            answers.append(body)
            return {"state": "here", "order": None}
        order = {"kind": "hop", "number": 7, "to": "b", "owner": "a", "url": "http://b", "token": "pk_b"}
        return {"state": "asked", "order": order}

    with strange_server(sane) as server:
        (tmp_path / "token").write_text("pk_x")
        settings = ContainerSettings(
            name="c1",
            folder=tmp_path,
            url=server.url,
            token_file=tmp_path / "token",
            bus="",
            rows="",
            profile="fast",
            engine="spark",
            cores=2,
        )
        host = LendableHost(settings, lambda *_: Still(), SystemClock())
        host._enter(settings)
        assert host.poll_order() == "asked"
        host._leave()
    assert [(said["number"], said["accepted"]) for said in answers] == [(7, False)]
    assert (
        "cannot execute an order of kind 'hop'" in answers[0]["why"] and "newer version" in answers[0]["why"]
    )


def test_requests_stay_strict_where_answers_are_not() -> None:
    """What is left out of an answer is a version's news; what is misspelt in a request is a mistake."""
    from penstock.core.errors import ConfigError
    from penstock.fleet.messages import Heartbeat, HeartbeatReply
    from penstock.server.routes.containers import read_heartbeat

    plain = {"verdict": "ok", "term": 1, "sequence": 1, "assignment_version": 1}
    assert HeartbeatReply.from_json(plain | NEW) == HeartbeatReply.from_json(plain)
    for wrong in ({"term": "1"}, {"shards": [{"shard": 1}]}, {"verdict": "maybe"}):
        with pytest.raises(ValueError):
            HeartbeatReply.from_json(plain | wrong)
    beat = Heartbeat(container="c1", incarnation="i", sequence=1)
    assert read_heartbeat(b'{"container":"c1","incarnation":"i","sequence":1}', "application/json") == beat
    with pytest.raises(ConfigError, match="not a valid heartbeat"):
        read_heartbeat(b'{"container":"c1","incarnation":"i","sequence":1,"new":1}', "application/json")
    assert replace(beat, pid=2) == Heartbeat.from_json({**beat.to_json(), "pid": 2})
