"""A flood of tokens that nobody knows: it is turned away by address, and heartbeats do not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.client.problems import TooMany
from penstock.core.errors import Refused
from penstock.db.tokens import KNOWN_MAX, TokenRow
from penstock.fleet.container_store import ContainerState
from penstock.fleet.messages import Heartbeat, HeartbeatVerdict
from penstock.server.security import LOOKUPS_MAX, UNKNOWN_MAX, UnknownTokenLimit
from tests.server.served import Served, served
from tests.waiting import LIMIT_S, until

FLOOD_FROM = "127.0.0.2"
BEATS = 60


def caller_from(plane: Served, address: str, token: str) -> httpx.Client:
    """A client whose requests come from another address of this machine."""
    transport = httpx.HTTPTransport(local_address=address)
    headers = {"Authorization": f"Bearer {token}"}
    url = f"{plane.server.url}/api/v1"
    return httpx.Client(base_url=url, transport=transport, headers=headers, timeout=LIMIT_S, trust_env=False)


@contextmanager
def flood(plane: Served, *, threads: int = 8) -> Iterator[dict[int, int]]:
    """Wrong tokens, each another one, from one address until the block ends; gives answers by status."""
    seen: dict[int, int] = {}
    is_over, lock = threading.Event(), threading.Lock()

    def ask(worker: int) -> None:
        with caller_from(plane, FLOOD_FROM, "x") as client:
            number = 0
            while not is_over.is_set():
                number += 1
                wrong = f"pk_{worker:03d}{number:040d}"
                answer = client.get("/jobs", headers={"Authorization": f"Bearer {wrong}"})
                if answer.status_code == 429:
                    assert answer.headers["Retry-After"] == "1"
                    assert answer.json()["title"] == "too many unknown tokens" and answer.json()["fix"]
                with lock:
                    seen[answer.status_code] = seen.get(answer.status_code, 0) + 1

    with ThreadPoolExecutor(threads) as pool:
        asked = [pool.submit(ask, worker) for worker in range(threads)]
        try:
            yield seen
        finally:
            is_over.set()
        for each in asked:
            each.result()


def test_heartbeats_are_answered_while_wrong_tokens_flood_in_from_one_address(tmp_path: Path) -> None:
    """Known and new containers, from the same address and another; nobody is failed over."""
    with served(tmp_path) as plane:
        before = plane.client(container="c1")
        before.register("c1", "i", "f")
        before.beat(Heartbeat(container="c1", incarnation="i", sequence=1, engine_ready=True))
        looked_up = count_lookups(plane)
        with flood(plane) as seen:
            until(lambda: seen.get(429, 0) > 50, "the flood is not turned away")
            for sequence in range(2, 2 + BEATS):
                plane.plane.tokens.revoked()  # what was believed is looked up again, as after a second
                beat = Heartbeat(container="c1", incarnation="i", sequence=sequence, engine_ready=True)
                assert before.beat(beat).verdict is HeartbeatVerdict.OK
                plane.plane._tick_shards()
            # A container that is new here, from an address that did nothing.
            plane.client(container="c2").register("c2", "i", "f")
            # Behind the same address as the flood (NAT): a token that was good here is not held up.
            with caller_from(plane, FLOOD_FROM, plane.token_of("c1")) as same:
                assert same.get("/installation").status_code == 200
            until(lambda: sum(seen.values()) > 2_000, "the flood does not go on")
        (row,) = (row for row in plane.plane.fleet.containers() if row.name == "c1")
        assert row.state is ContainerState.LIVE and row.sequence == 1 + BEATS
        assert set(seen) == {401, 429} and seen[429] > seen[401]
        assert looked_up() == seen[401], "what is turned away is not looked up"


def count_lookups(plane: Served) -> Any:
    """How many look-ups of tokens that nobody knows there were."""
    tokens, counted, lock = plane.plane.tokens, list[str](), threading.Lock()
    find = tokens._find

    def counting(digest: str) -> TokenRow | None:
        found = find(digest)
        with lock:
            counted.extend([] if found else [digest])
        return found

    tokens._find = counting  # type: ignore[method-assign]
    return lambda: len(counted)


def test_look_ups_of_wrong_tokens_that_hang_leave_heartbeats_alone(tmp_path: Path) -> None:
    """The store takes its time with unknown tokens: what is known is answered meanwhile."""
    with served(tmp_path) as plane:
        known = plane.client(container="c1")
        known.register("c1", "i", "f")
        tokens, find = plane.plane.tokens, plane.plane.tokens._find
        is_waiting, may_go_on = threading.Event(), threading.Event()

        def slowly(digest: str) -> TokenRow | None:
            found = find(digest)
            if found is None:
                is_waiting.set()
                assert may_go_on.wait(LIMIT_S)
            return found

        tokens._find = slowly  # type: ignore[method-assign]
        try:
            with ThreadPoolExecutor(6) as pool:
                wrong = [pool.submit(guess, plane, number) for number in range(6)]
                assert is_waiting.wait(LIMIT_S)
                for sequence in range(1, 20):
                    tokens.revoked()
                    beat = Heartbeat(container="c1", incarnation="i", sequence=sequence, engine_ready=True)
                    assert known.beat(beat).sequence == sequence
                assert not any(each.done() for each in wrong)
                may_go_on.set()
                assert {each.result() for each in wrong} == {401}
        finally:
            may_go_on.set()


def guess(plane: Served, number: int) -> int:
    with caller_from(plane, FLOOD_FROM, f"pk_{number:043d}") as client:
        return client.get("/jobs").status_code


def test_a_token_that_was_taken_back_is_a_stranger_again(tmp_path: Path) -> None:
    with served(tmp_path) as plane:
        plane.client(container="c1").register("c1", "i", "f")
        tokens = plane.plane.tokens
        assert tokens.is_familiar(plane.token_of("c1")) and not tokens.is_familiar("pk_" + "x" * 43)
        with plane.client("admin") as admin:
            (row,) = (row for row in admin.tokens() if row["container"] == "c1")
            admin.revoke_token(row["id"], why="lost", key="k")
        with pytest.raises(Refused, match="this token is not known"):
            plane.client(container="c1").register("c1", "i2", "f")
        assert not tokens.is_familiar(plane.token_of("c1"))
        assert KNOWN_MAX >= 8_000, "every container that may be connected"


def fill(limit: UnknownTokenLimit, address: str, count: int, now_ms: int) -> None:
    for _ in range(count):
        limit.begin(address, now_ms)
        limit.end(address, now_ms, is_unknown=True)


def test_an_address_has_a_few_guesses_per_second_and_others_have_theirs() -> None:
    limit = UnknownTokenLimit()
    fill(limit, "10.0.0.1", UNKNOWN_MAX, 5_000)
    with pytest.raises(TooMany, match="too many unknown tokens"):
        limit.begin("10.0.0.1", 5_999)
    fill(limit, "10.0.0.2", 1, 5_999)
    fill(limit, "10.0.0.1", UNKNOWN_MAX, 6_000)
    assert limit.rejected == 1


def test_good_tokens_do_not_count_and_only_so_many_are_looked_up_at_once() -> None:
    limit = UnknownTokenLimit()
    for _ in range(10 * UNKNOWN_MAX):
        limit.begin("10.0.0.1", 0)
        limit.end("10.0.0.1", 0, is_unknown=False)
    for _ in range(LOOKUPS_MAX):
        limit.begin("10.0.0.1", 0)
    with pytest.raises(TooMany):
        limit.begin("10.0.0.1", 0)
    limit.begin("10.0.0.2", 0)
    limit.end("10.0.0.1", 0, is_unknown=False)
    limit.begin("10.0.0.1", 0)


def test_an_ipv6_network_is_one_address_and_memory_is_bounded() -> None:
    limit = UnknownTokenLimit(addresses_max=100)
    for number in range(UNKNOWN_MAX):
        fill(limit, f"2001:db8:0:1::{number:x}", 1, 0)
    with pytest.raises(TooMany):
        limit.begin("2001:db8:0:1:ffff::1", 0)
    limit.begin("2001:db8:0:2::1", 0)
    limit.end("2001:db8:0:2::1", 0, is_unknown=True)
    for number in range(1_000):
        fill(limit, f"10.0.{number // 250}.{number % 250}", 1, 0)
    assert len(limit._windows) == 100 and not limit._under_way
