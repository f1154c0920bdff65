"""Claims about job files: plain data only, of a bounded size; what is refused is refused with line and column."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.jobs import BYTES_MAX, DEPTH_MAX, VALUES_MAX, read_job_text, split_name
from penstock.cli.output import as_yaml
from penstock.core.errors import ConfigError

BOMB = "a: &a [x, x]\n" + "".join(f"b{n}: &b{n} [*a, *a]\n" for n in range(30))


def read(text: str, name: str = "job.yaml") -> dict[str, Any]:
    return read_job_text(text, name=name)


# What is in the file, and what the refusal must name.
REFUSED: dict[str, tuple[str, str]] = {
    "a key twice": (
        "name: a\ntask_count: 1\ntask_count: 2\n",
        "line 3, column 1: the key 'task_count' appears twice",
    ),
    "a key twice inside": ("slo:\n  lag_s: 1\n  lag_s: 2\n", "line 3, column 3"),
    "a key twice in flow": ("{a: 1, a: 2}", "'a' appears twice"),
    "an anchor": ("a: &x 1\n", "line 1, column 4: anchors"),
    "an alias": ("a: *x\n", "anchors and aliases"),
    "a bomb": (BOMB, "line 1, column 4: anchors"),
    "a merge key": ("a:\n  <<: {b: 1}\n", "line 2, column 3: merge keys (`<<`)"),
    "a tag": ("a: !!python/object/apply:os.system ['id']\n", "line 1, column 4: tags are not allowed"),
    "a plain tag": ("a: !!int '5'\n", "tags are not allowed"),
    "a tag on the document": ("!!map\na: 1\n", "tags are not allowed"),
    "a key that is a map": ("? {a: 1}\n: 2\n", "a key must be text"),
    "not a number": ("a: .nan\n", "line 1, column 4: .nan is not a finite number"),
    "infinity": ("a:\n  - -.inf\n", "line 2, column 5: -.inf"),
    "a float beyond floats": ("a: 1e999\n", "1e999 is not a finite number"),
    "an integer beyond 64 bits": ("a: 9223372036854775808\n", "64 bits"),
    "an integer of 5000 digits": ("a: " + "9" * 5000, "64 bits"),
    "too deep": ("a: " + "[" * 40 + "]" * 40, f"deeper than {DEPTH_MAX}"),
    "too many values": ("a: [" + "1, " * (VALUES_MAX + 1) + "1]", f"more than {VALUES_MAX} values"),
    "too large": ("a: " + "x" * BYTES_MAX, "larger than"),
    "two documents": ("a: 1\n---\nb: 2\n", "2 documents"),
    "nothing": ("", "0 documents"),
    "only a comment": ("# nothing\n", "0 documents"),
    "a list": ("- a\n- b\n", "a list, not a map"),
    "a text": ("just text\n", "text, not a map"),
    "a tab": ("a:\n\tb: 1\n", "line 2"),
    "an open quote": ('a: "x\n', "line"),
    "a control character": ("a: x\x07y\n", ""),
    "half a letter": ("a: x\ud800y\n", ""),
    "bad indentation": ("a: 1\n  b: 2\n", "line 2"),
}


@pytest.mark.parametrize(("text", "named"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_plain_data_is_refused_with_its_place(text: str, named: str):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert named in caught.value.why, caught.value.why
    assert "job.yaml" in caught.value.what and caught.value.fix


JSON_REFUSED: dict[str, tuple[str, str]] = {
    "a key twice": ('{"a": 1, "a": 2}', "'a' appears twice"),
    "not JSON": ('{"a": 1,\n "b" 2}', "line 2, column 6"),
    "YAML": ("a: 1", "line 1, column 1"),
    "not a number": ('{"a": NaN}', "NaN"),
    "infinity": ('{"a": -Infinity}', "Infinity"),
    "a float beyond floats": ('{"a": 1e999}', "1e999"),
    "an integer beyond 64 bits": ('{"a": 99999999999999999999}', "64 bits"),
    "too deep": ('{"a": ' + "[" * 40 + "]" * 40 + "}", f"deeper than {DEPTH_MAX}"),
    "much too deep": ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", f"deeper than {DEPTH_MAX}"),
    "a list": ("[1]", "a list"),
}


@pytest.mark.parametrize(("text", "named"), JSON_REFUSED.values(), ids=JSON_REFUSED)
def test_json_is_held_to_the_same(text: str, named: str):
    with pytest.raises(ConfigError) as caught:
        read(text, "job.json")
    assert named in caught.value.why and caught.value.fix


def test_scalars_mean_what_they_look_like():
    found = read(
        "int: 5\nneg: -5\nfloat: 1.5\nexp: 1e3\ntrue_: true\nnull_: null\nnothing:\ntilde: ~\n"
        "date: 2024-01-31\ntime: 2024-01-31T10:00:00Z\nyes_: yes\noff_: off\nquoted: '5'\nleading: 017\n"
        "under: 1_000\nsexagesimal: 12:30\nhex: 0x1F\nversion: 1.2.3\n"
    )
    assert found == {
        "int": 5,
        "neg": -5,
        "float": 1.5,
        "exp": 1000.0,
        "true_": True,
        "null_": None,
        "nothing": None,
        "tilde": None,
        "date": "2024-01-31",
        "time": "2024-01-31T10:00:00Z",
        "yes_": "yes",
        "off_": "off",
        "quoted": "5",
        "leading": "017",
        "under": "1_000",
        "sexagesimal": "12:30",
        "hex": "0x1F",
        "version": "1.2.3",
    }


def test_keys_are_text_whatever_they_look_like():
    assert read("1: a\ntrue: b\nnull: c\n") == {"1": "a", "true": "b", "null": "c"}


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(
        st.characters(
            blacklist_categories=("Cs", "Cc"), blacklist_characters="\u2028\u2029\ufeff\ufffe\uffff"
        )
    ),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.text("abc <&*!:#-", min_size=1), below, max_size=3)
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.text("abcd", min_size=1), plain, max_size=4))
def test_what_the_command_prints_as_yaml_or_json_it_reads_back(value: dict[str, Any]):
    assert read(json.dumps(value), "job.json") == value
    assert read(as_yaml(value)) == value
    assert yaml.safe_load(as_yaml(value)) == value


@given(st.text("a:-[]{}&*!?|>'\"#%@ \n\t,0.", max_size=60))
def test_any_text_is_a_map_or_refused(text: str):
    try:
        assert isinstance(read(text), dict)
    except ConfigError as error:
        assert error.what and error.why and error.fix


@pytest.mark.parametrize(
    ("config", "given_name", "ok"),
    [
        ({"name": "a.b"}, "", True),
        ({"name": "a.b"}, "a.b", True),
        ({}, "a.b", True),
        ({}, "", False),
        ({"name": 5}, "", False),
        ({"name": ""}, "", False),
        ({"name": "a.b"}, "c.d", False),
    ],
)
def test_a_file_is_of_one_job(config: dict[str, Any], given_name: str, ok: bool):
    if ok:
        assert split_name(config, given_name, name="f")[0] == "a.b"
    else:
        with pytest.raises(ConfigError):
            split_name(config, given_name, name="f")
