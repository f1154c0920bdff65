"""Which text and JSON may become part of a record."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.jobs.text_rules import (
    DEPTH_MAX,
    INT_MAX,
    KEY_MAX,
    LENGTH_MAX,
    STRING_MAX,
    VALUES_MAX,
    check_json,
    check_line,
    is_line,
    shown,
)

MISLEADING = "\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def accepts(value: Any) -> bool:
    try:
        check_json("it", value)
    except ConfigError as error:
        assert error.what == "it is not valid" and error.why and error.fix
        return False
    return True


@pytest.mark.parametrize(
    "letter", [*map(chr, range(32)), "\x7f", *map(chr, range(0x80, 0xA0)), *MISLEADING, "\ud800"]
)
def test_letters_that_steer_or_mislead_are_not_part_of_a_line(letter: str) -> None:
    assert not is_line(f"a{letter}b") and is_line("ab")
    with pytest.raises(ConfigError):
        check_line("the reason", f"a{letter}b", length_max=10)
    # Code has lines and tabs; nothing else of these.
    assert accepts({"code": f"a{letter}b"}) == (letter in "\t\n\r")
    assert not accepts({f"a{letter}b": 1})
    assert shown(f"a{letter}b").isascii() or shown(f"a{letter}b").isprintable()


@pytest.mark.parametrize(
    "text", ["plain", "mit Umlaut ä", "数据流", "🦆", "a'b\"c`d\\e", "{{x}} %s $(y) <z>"]
)
def test_all_other_text_is(text: str) -> None:
    check_line("the reason", text, length_max=50)
    assert accepts({text: text})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("x" * 11, "11 characters"),
        (7, "a int"),
        (None, "nothing"),
        ("a\nb", "control"),
    ],
)
def test_a_line_that_is_not_valid_is_told_why(text: Any, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_line("the reason", text, length_max=10)
    assert caught.value.what == "the reason is not valid" and why in caught.value.why
    assert "1 to 10 characters" in caught.value.fix


def nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    ("largest", "too_much"),
    [
        (INT_MAX, INT_MAX + 1),
        (-INT_MAX - 1, -INT_MAX - 2),
        ("x" * STRING_MAX, "x" * (STRING_MAX + 1)),
        ({"k" * KEY_MAX: 1}, {"k" * (KEY_MAX + 1): 1}),
        (nested(DEPTH_MAX), nested(DEPTH_MAX + 1)),
        ([0] * (VALUES_MAX - 1), [0] * VALUES_MAX),
        (["x" * 1024] * (LENGTH_MAX // 1024), ["x" * 1024] * (LENGTH_MAX // 1024 + 1)),
        (1.7e308, float("inf")),
        ("a", b"a"),
        ([1], {1}),
        ({"1": 1}, {1: 1}),
    ],
)
def test_each_bound_holds_exactly(largest: Any, too_much: Any) -> None:
    assert accepts(largest)
    assert not accepts(too_much)


def test_what_is_wrong_is_named_by_its_path() -> None:
    with pytest.raises(ConfigError) as caught:
        check_json("the config", {"plan": {"stages": [{}, {"expr": float("nan")}]}})
    assert caught.value.why == "plan.stages.1.expr: it is not a finite number"


def test_no_depth_is_too_deep_to_be_refused() -> None:
    assert not accepts(nested(200_000))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("aä数🦆 \n", max_size=5),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.text("abc.", max_size=3), below, max_size=3)
    ),
)


@given(plain)
def test_ordinary_json_is_accepted_and_can_be_written(value: Any) -> None:
    assert accepts(value)
    assert json.loads(json.dumps(value)) == value


def test_what_an_error_shows_is_short_and_harmless() -> None:
    assert shown("demo") == "'demo'"
    assert shown("x" * 1000) == f"'{'x' * 100}…'"
    assert shown("a\x1b[31m\u202eb") == r"'a\x1b[31m\u202eb'"
    assert shown(7) == "'7'"
