"""Claims about which JSON comes in: one meaning, bounded, storable; all else is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.server.limits import JSON_DEPTH_MAX, JSON_KEYS_MAX, JSON_VALUES_MAX, check_json, measure_json
from tests.server.world import JOB, World

LAYER = f"/jobs/{JOB}/layers/oncall"
JSON = {"Content-Type": "application/json"}
MANY_KEYS = json.dumps({f"k{number}": 1 for number in range(JSON_KEYS_MAX + 1)}).encode()
MANY_VALUES = b"[" + b"1," * JSON_VALUES_MAX + b"1]"

# What is in the body, and what the refusal must name.
REFUSED: dict[str, tuple[bytes, str]] = {
    "a key twice": (b'{"a": 1, "a": 2}', "'a' twice"),
    "a key twice inside": (b'{"x": [{"b": 1, "c": {}, "b": 1}]}', "'b' twice"),
    "a key twice by escapes": (b'{"a": 1, "\\u0061": 2}', "'a' twice"),
    "not a number": (b'{"a": NaN}', "NaN"),
    "infinity": (b'{"a": Infinity}', "Infinity"),
    "minus infinity": (b'{"a": [-Infinity]}', "-Infinity"),
    "a float beyond floats": (b'{"a": 1e999}', "too large"),
    "a float of many digits": (b'{"a": ' + b"9" * 400 + b".5}", "too large"),
    "an integer beyond 64 bits": (b'{"a": 9223372036854775808}', "too large"),
    "a negative one": (b'{"a": -9223372036854775809}', "too large"),
    "an integer of 5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "too large"),
    "NUL in text": (b'{"a": "x\\u0000y"}', "NUL"),
    "NUL in a key": (b'{"\\u0000": 1}', "NUL"),
    "half a letter": (b'{"a": "\\ud800"}', "surrogate"),
    "half a letter in a key": (b'{"\\udfff": 1}', "surrogate"),
    "not UTF-8": (b'{"a": "\xff"}', "UTF-8"),
    "UTF-16": ('{"a": "ü"}'.encode("utf-16"), "UTF-8"),
    "too deep": (b"[" * 33 + b"]" * 33, "deep"),
    "too many keys": (MANY_KEYS, str(JSON_KEYS_MAX)),
    "too many values": (MANY_VALUES, str(JSON_VALUES_MAX)),
}


@pytest.mark.parametrize(("body", "named"), REFUSED.values(), ids=REFUSED)
def test_what_could_hurt_is_refused_by_name(body: bytes, named: str):
    with pytest.raises(ConfigError) as caught:
        check_json(body)
    assert named in str(caught.value)
    assert caught.value.what and caught.value.why and caught.value.fix


@pytest.mark.parametrize(("body", "named"), REFUSED.values(), ids=REFUSED)
def test_over_http_it_is_422_and_changes_nothing(shared: World, body: bytes, named: str):
    before = shared.everything()
    wrapped = b'{"changes": %s, "why": "x"}' % body if b"utf" not in named.lower().encode() else body
    answer = shared.ask("PATCH", LAYER, content=wrapped, headers=JSON)
    assert answer.status_code == 422 and named in answer.text, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert shared.everything() == before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"null",
        b'{"a": 9223372036854775807, "b": -9223372036854775808}',
        b'{"a": 1.7e308, "b": 1e-999}',
        b'{"a": "NaN", "b": "\\\\u0000", "c": "1e999", "d": "99999999999999999999"}',
        b'{"a": {"a": {"a": 1}}, "b": [{"a": 1}, {"a": 1}]}',
        '{"a": "ü 😀 \\ud83d\\ude00"}'.encode(),
        b"not json at all",  # the parser's to say
        b'{"a": 1',
    ],
)
def test_what_is_harmless_passes(body: bytes):
    check_json(body)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text('ab[]{}":,\\'),
        lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text('[{":,\\'), below, max_size=4),
        max_leaves=30,
    )
)
def test_the_shape_is_what_the_parser_finds(value: Any):
    def counted(item: Any) -> tuple[int, int]:
        below = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        pairs = [counted(part) for part in below]
        depth = 1 + max((part[0] for part in pairs), default=0) if isinstance(item, dict | list) else 0
        return depth, sum(part[1] for part in pairs) + (len(item) if isinstance(item, dict) else 0)

    shape = measure_json(json.dumps(value).encode())
    assert (shape.depth, shape.keys) == counted(value)


def test_the_limits_are_those_that_are_documented():
    assert (JSON_DEPTH_MAX, JSON_KEYS_MAX) == (32, 10_000)
