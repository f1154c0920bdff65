"""Claims about heartbeats: exactly what the class declares, and many at a time."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError, StoreUnavailable, VersionConflict
from penstock.fleet.messages import Heartbeat, HeartbeatReply
from penstock.server.pools import Pool, RequestBatcher
from penstock.server.routes.containers import read_heartbeat
from tests.server.served import served
from tests.server.test_containers import BEAT, beat, register
from tests.server.world import World
from tests.waiting import LIMIT_S, until

JSON = "application/json"
COUNT = st.integers(0, 2**63 - 1)
WORD = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=20)
NUMBER = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**53), 2**53))
TASK = st.fixed_dictionaries(
    {"task_id": WORD, "job": WORD, "generation": COUNT, "shard": COUNT, "state": WORD},
    optional={
        "running_version": COUNT,
        "error": WORD,
        "restarts": COUNT,
        "metrics": st.dictionaries(WORD, NUMBER, max_size=3),
    },
)
ENTRY = st.fixed_dictionaries(
    {"shard": COUNT, "epoch": COUNT}, optional={"state": st.sampled_from(["owned", "dropping"])}
)
LOAD = st.fixed_dictionaries({"shard": COUNT, "tasks": COUNT, "load": st.lists(NUMBER, max_size=4)})
BEATS = st.fixed_dictionaries(
    {"container": WORD, "incarnation": WORD, "sequence": COUNT},
    optional={
        "acked": st.lists(ENTRY, max_size=3),
        "tasks": st.lists(TASK, max_size=3),
        "loads": st.lists(LOAD, max_size=3),
        "capacity": st.lists(NUMBER, max_size=4),
        "region": WORD,
        "order": COUNT,
        "engine_ready": st.booleans(),
        "host": WORD,
        "pid": COUNT,
    },
)


@given(BEATS)
def test_a_heartbeat_is_read_as_its_class_declares_it(body: dict[str, Any]):
    assert read_heartbeat(json.dumps(body).encode(), JSON) == Heartbeat.from_json(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'{"container":"c1"',
        json.dumps({**BEAT, "more": 1}).encode(),
        json.dumps({**BEAT, "tasks": [{**BEAT["tasks"][0], "more": 1}]}).encode(),
        json.dumps({**BEAT, "acked": [{"shard": 1, "epoch": 1, "state": "lost"}]}).encode(),
        json.dumps({**BEAT, "sequence": 2**63}).encode(),
        json.dumps({**BEAT, "sequence": 1.5}).encode(),
        json.dumps({**BEAT, "pid": -1}).encode(),
        json.dumps({**BEAT, "host": "a\0b"}).encode(),
        json.dumps({**BEAT, "host": "x" * 100_001}).encode(),
        json.dumps({**BEAT, "host": "\ud800"}).encode(),
        json.dumps({**BEAT, "host": "é"}, ensure_ascii=False).encode("latin-1"),
        json.dumps({**BEAT, "capacity": [float("nan")]}).encode(),
        json.dumps(BEAT).replace("0.5", "1e999").encode(),
        b'{"container":' + b"[" * 100_000,
    ],
)
def test_what_is_no_heartbeat_is_refused(body: bytes):
    with pytest.raises(ConfigError) as caught:
        read_heartbeat(body, JSON)
    assert caught.value.why and caught.value.fix


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-json"])
def test_a_heartbeat_is_sent_as_json(kind: str):
    with pytest.raises(ConfigError, match="not a valid heartbeat"):
        read_heartbeat(json.dumps(BEAT).encode(), kind)


def test_one_that_is_refused_changes_nothing(world: World):
    register(world)
    before = world.plane.fleet.containers()
    for changes in ({"more": 1}, {"container": "c2"}, {"pid": -1}):
        assert beat(world, **changes).status_code == 422
    refused = world.ask("POST", "/containers/c1/beat", role="reader", json=BEAT)
    nobody = world.ask("POST", "/containers/c1/beat", role=None, json=BEAT)
    assert (refused.status_code, nobody.status_code) == (403, 401)
    deep = b'{"container":' + b"[" * 100_000
    headers = {"Content-Type": "application/json"}
    answer = world.ask("POST", "/containers/c1/beat", role="container", content=deep, headers=headers)
    assert answer.status_code == 422 and "nested too deep" in answer.text
    assert world.plane.fleet.containers() == before


def test_beats_that_come_together_are_written_together_and_answered_one_by_one(tmp_path: Path):
    with served(tmp_path) as world:
        names = [f"c{number}" for number in range(12)]
        for name in names:
            with world.client(container=name) as client:
                client.register(name, f"i-{name}", f"f-{name}")
        manager, asked = world.plane.shard_manager, list[int]()
        answer_heartbeats, is_full = manager.answer_heartbeats, threading.Event()

        def slowly(beats: Any, now_ms: int) -> list[HeartbeatReply]:
            asked.append(len(beats))
            is_full.wait(LIMIT_S)
            return answer_heartbeats(beats, now_ms)

        manager.answer_heartbeats = slowly  # type: ignore[method-assign]

        def ask(name: str) -> int:
            with world.client(container=name) as client:
                sequence = int(name[1:]) + 1
                return client.beat(
                    Heartbeat(container=name, incarnation=f"i-{name}", sequence=sequence)
                ).sequence

        with ThreadPoolExecutor(len(names)) as threads:
            answers = threads.map(ask, names)
            until(lambda: len(manager._inbox) == len(names), "all to arrive, and wait")
            is_full.set()
            assert list(answers) == [number + 1 for number in range(12)]
        assert sum(asked) == 12 and len(asked) < 12
        assert [row.sequence for row in world.plane.fleet.containers()] == [
            int(name[1:]) + 1 for name in sorted(names)
        ]


def test_one_beat_that_does_not_fit_leaves_the_others_their_answers(world: World, monkeypatch):
    register(world)
    answer_beats, calls = world.plane.answer_beats, list[int]()

    def conflict_at_first(beats: Any) -> list[HeartbeatReply]:
        calls.append(len(beats))
        if len(calls) == 1:
            raise VersionConflict("shard 3", expected=1, actual=2)
        return answer_beats(beats)

    monkeypatch.setattr(world.plane, "answer_beats", conflict_at_first)
    assert beat(world).json()["verdict"] == "ok" and calls == [1, 1]


def test_a_store_that_is_away_is_told_to_all_who_beat(world: World, monkeypatch):
    def away(beats: Any) -> list[HeartbeatReply]:
        raise StoreUnavailable("the store is away", why="a test", fix="wait")

    monkeypatch.setattr(world.plane, "answer_beats", away)
    assert beat(world).status_code == 503


def test_together_gives_each_its_own_answer_and_an_error_to_all_of_one_call():
    pool, calls = Pool("test", 1), list[list[int]]()

    def call(items: list[int]) -> list[int]:
        calls.append(items)
        if 13 in items:
            raise ValueError("thirteen")
        return [2 * item for item in items]

    async def ask() -> list[Any]:
        together = RequestBatcher(pool, call, batch_max=4)
        first = await asyncio.gather(*(together.ask(item) for item in range(10)))
        left = asyncio.ensure_future(together.ask(99))
        await asyncio.sleep(0)
        left.cancel()
        second = await asyncio.gather(*map(together.ask, (13, 14)), return_exceptions=True)
        return [*first, *map(str, second), await together.ask(7)]

    assert asyncio.run(ask()) == [*range(0, 20, 2), "thirteen", "thirteen", 14]
    assert calls[:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
