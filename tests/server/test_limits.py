"""Claims about how much and how often a caller may send."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.problems import TooMany
from penstock.server import limits
from penstock.server.limits import BODY_BYTES_MAX, JSON_DEPTH_MAX, measure_json
from penstock.server.security import RateLimit
from penstock.streams import package_store
from tests.server.world import JOB, World, a_world

LAYER = f"/jobs/{JOB}/layers/oncall"
JSON = {"Content-Type": "application/json"}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_a_body_over_the_limit_is_413_and_nothing_is_written(shared: World):
    before = shared.everything()
    body = {"changes": {"owner": "x" * BODY_BYTES_MAX}, "why": "big"}
    answer = shared.ask("PATCH", LAYER, json=body)
    assert answer.status_code == 413
    assert str(BODY_BYTES_MAX) in answer.json()["detail"] and answer.json()["fix"]
    assert shared.everything() == before


def test_a_body_at_the_limit_passes(world: World):
    body = json.dumps({"changes": {"owner": "me"}, "why": "full"})
    full = body + " " * (BODY_BYTES_MAX - len(body))
    assert world.ask("PATCH", LAYER, content=full, headers=JSON).status_code == 200


async def sent_in_parts(parts: list[bytes], limit: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    async def chunks():
        for part in parts:
            yield part

    return b"".join([chunk async for chunk in limits.limited(chunks(), limit, {"headers": headers})])


def test_a_stream_without_a_length_is_cut_where_it_is_too_long():
    assert asyncio.run(sent_in_parts([b"ab", b"cd"], 4, [])) == b"abcd"
    with pytest.raises(limits.TooLarge):
        asyncio.run(sent_in_parts([b"ab", b"cd", b"e"], 4, []))


def test_an_announced_length_is_refused_before_a_byte_is_read():
    async def never():
        raise AssertionError("was read")
        yield b""

    async def read() -> None:
        async for _ in limits.limited(never(), 4, {"headers": [(b"content-length", b"5")]}):
            pass

    with pytest.raises(limits.TooLarge):
        asyncio.run(read())


def test_a_package_over_its_limit_is_413_and_not_kept(shared: World):
    before = shared.everything()
    headers = {"Content-Length": str(package_store.PACKAGE_BYTES_MAX + 1)}
    answer = shared.ask("PUT", f"/packages/{'0' * 64}", content=b"short", headers=headers)
    assert answer.status_code == 413
    assert shared.everything() == before


def test_a_stranger_may_not_make_us_read_a_package(shared: World):
    headers = {"Content-Length": str(package_store.PACKAGE_BYTES_MAX + 1)}
    answer = shared.ask("PUT", f"/packages/{'0' * 64}", role=None, content=b"short", headers=headers)
    assert answer.status_code == 401


@pytest.mark.parametrize("body", [nested(JSON_DEPTH_MAX + 1), '{"a":' * 40 + "1" + "}" * 40, "[" * 100_000])
def test_json_nested_too_deep_is_422(shared: World, body: str):
    answer = shared.ask("PATCH", LAYER, content=body, headers=JSON)
    assert answer.status_code == 422
    assert answer.json()["title"] == "the JSON is nested too deep"


@pytest.mark.parametrize(
    ("body", "depth"),
    [
        (b"1", 0),
        (b"[]", 1),
        (b'{"a": [1, {}]}', 3),
        (b'["[[[[", "]", 1]', 1),
        (rb'["\"[[[[", []]', 2),
        (rb'["\\", [[]]]', 3),
        (rb'["\\\"[[", "\\\\", [[]]]', 3),
        (b"[[], [[]], {}]", 3),
        ("[" + '"é[["' + ", [2]]", 2),
    ],
)
def test_depth_is_counted_outside_strings_only(body: bytes | str, depth: int):
    data = body.encode() if isinstance(body, str) else body
    assert measure_json(data).depth <= depth
    assert depth == 0 or measure_json(data).depth > depth - 1


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab[]{}"\\,:'),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text('[{"\\'), below, max_size=4),
    max_leaves=30,
)


def depth_of(value: object) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 1 + max(map(depth_of, value.values()), default=0) if isinstance(value, dict) else 0


@given(values)
def test_the_fast_count_agrees_with_the_parser(value: object):
    data, depth = json.dumps(value).encode(), depth_of(value)
    assert measure_json(data).depth <= depth
    assert depth == 0 or measure_json(data).depth > depth - 1


@given(st.text('[]{}",\\ ', max_size=200))
def test_whatever_it_lets_through_is_shallow_or_no_json(text: str):
    if measure_json(text.encode()).depth <= 3:
        try:
            found = json.loads(text)
        except ValueError:
            return
        assert depth_of(found) <= 3


@pytest.mark.parametrize(
    "unit", ["[],", "{},", '"a",', '"\\\\",', '"\\"",', nested(32) + ",", "]", "[", "}{", "1,"]
)
def test_a_full_body_is_looked_at_in_a_few_passes(unit: str):
    """Measured in passes that look at every byte once: what looks at bytes again and again takes thousands."""
    body = ("[" + unit * (BODY_BYTES_MAX // len(unit)) + "1]").encode()
    one_pass_s = cpu_s(lambda: sum(body))
    assert cpu_s(lambda: measure_json(body)) < 20 * one_pass_s


def cpu_s(work: Callable[[], object]) -> float:
    """This thread's own time: what the machine does besides does not count."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


@pytest.mark.parametrize(
    "body",
    ["", "{", "not json", "{'a': 1}", "\x00", '{"changes": {}} x', '"text"', "[]", "null", "\ufeff{}"],
)
def test_what_is_not_the_json_we_want_is_422(shared: World, body: str):
    before = shared.everything()
    answer = shared.ask("PATCH", LAYER, content=body.encode(), headers=JSON)
    assert answer.status_code == 422, answer.text
    problem = answer.json()
    assert problem["title"] and problem["detail"] and problem["fix"]
    assert shared.everything() == before


@pytest.mark.parametrize(
    "body",
    [
        b'{"changes": {"owner": "\xff\xfe"}, "why": "x"}',
        b'{"changes": {"owner": "\\ud800"}, "why": "x"}',
        b'{"changes": {"owner": "x"}, "why": "\\udfff"}',
        b'{"changes": {"priority": ' + b"9" * 5000 + b'}, "why": "x"}',
        b'{"changes": {"slo.lag_s": NaN}, "why": "x"}',
        b'{"changes": {"slo.lag_s": Infinity}, "why": "x"}',
        b'{"changes": {"slo.lag_s": 1e999}, "why": "x"}',
    ],
)
def test_text_and_numbers_that_no_store_can_hold_are_422(shared: World, body: bytes):
    before = shared.everything()
    answer = shared.ask("PATCH", LAYER, content=body, headers=JSON)
    assert answer.status_code == 422, answer.text
    assert shared.everything() == before


def test_a_pair_of_surrogates_is_a_letter(world: World):
    body = b'{"changes": {"owner": "\\ud83d\\ude00"}, "why": "smile"}'
    assert world.ask("PATCH", LAYER, content=body, headers=JSON).status_code == 200
    assert world.plane.jobs.view(JOB).config.owner == "😀"


def test_a_body_that_is_not_declared_as_json_is_422(shared: World):
    body = json.dumps({"changes": {"priority": 1}, "why": "x"})
    answer = shared.ask("PATCH", LAYER, content=body, headers={"Content-Type": "text/plain"})
    assert answer.status_code == 422


def test_requests_past_the_limit_wait_for_the_next_window():
    rate = RateLimit(2)
    rate.count("a", 1000)
    rate.count("a", 1999)
    rate.count("b", 1999)  # each has its own
    with pytest.raises(TooMany) as refused:
        rate.count("a", 1999)
    assert refused.value.what and refused.value.why and refused.value.fix
    rate.count("a", 2000)


def test_too_many_requests_are_429_and_beats_never(tmp_path: Path):
    with a_world(tmp_path / "plane", requests_max=3) as world:
        statuses = [world.ask("GET", "/tasks", role="reader").status_code for _ in range(40)]
        assert statuses[:3] == [200] * 3
        assert 429 in statuses  # forty within one second, or at least four within one window
        register = {"incarnation": "i1", "folder_id": "f"}
        beat = {"container": "c1", "incarnation": "i1", "sequence": 1}
        assert (
            world.ask("POST", "/containers/c1/register", role="container", json=register).status_code == 200
        )
        for sequence in range(1, 20):
            body = {**beat, "sequence": sequence}
            answer = world.ask("POST", "/containers/c1/beat", role="container", json=body)
            assert answer.status_code == 200
        refused = next(
            answer
            for answer in (world.ask("GET", "/status", role="oncall") for _ in range(40))
            if answer.status_code == 429
        )
        assert refused.headers["Content-Type"] == "application/problem+json"
        assert refused.headers["Retry-After"] == "1"
        assert refused.json()["title"] == "too many requests" and refused.json()["fix"]
