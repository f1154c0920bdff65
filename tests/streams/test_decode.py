"""Claims about JSON records: readable ones become columns, all others a reason, and nothing crashes."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.streams.bus.decode import PIECE_ROWS, decode_json, decode_one_by_one, read_at_once

COLUMNS = (("query", "string"), ("n", "bigint"), ("share", "double"), ("ok", "boolean"))


def decode(*values: bytes | None):
    return decode_json(pa.array(values, pa.binary()), COLUMNS)


def test_declared_columns_are_read_missing_ones_are_null_others_ignored():
    found = decode(b'{"query": "cats", "n": 3, "share": 1, "ok": true, "more": [1]}', b"{}")
    assert found.rows is None and found.bad == ()
    assert found.table.to_pylist() == [
        {"query": "cats", "n": 3, "share": 1.0, "ok": True},
        {"query": None, "n": None, "share": None, "ok": None},
    ]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"   ",
        b"{bad",
        b"null",
        b"[1]",
        b"1 2",
        b"{}{}",
        b"\xff\xfe",
        b'{"n": "x"}',
        b'{"n": 1.5}',
        b'{"n": 99999999999999999999}',
        b'{"n": NaN}',
        b'{"query": {"a": 1}}',
        b'{"query": "\xff"}',
        b'{"query": "\\ud800"}',
        b'{"share": 1e400}',
        b'{"deep": ' + b"[" * 100_000,
        None,
    ],
)
def test_what_cannot_be_read_is_set_aside_with_a_reason(value: bytes | None):
    found = decode(b'{"n": 1}', value, b'{"n": 2}')
    assert found.rows == (0, 2)
    assert [row["n"] for row in found.table.to_pylist()] == [1, 2]
    ((place, reason),) = found.bad
    assert place == 1 and reason


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_no_bytes_crash_the_decoder(values: list[bytes]):
    found = decode(*values)
    read = len(values) if found.rows is None else len(found.rows)
    assert read == found.table.num_rows and read + len(found.bad) == len(values)


@given(
    st.lists(st.fixed_dictionaries({"query": st.text(), "n": st.integers(-(2**63), 2**63 - 1)}), max_size=20)
)
def test_what_json_writes_comes_back(rows: list[dict[str, object]]):
    values = [json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") for row in rows]
    found = decode(*values)
    kept = rows if found.rows is None else [rows[place] for place in found.rows]
    assert [{"query": r["query"], "n": r["n"]} for r in found.table.to_pylist()] == kept


EVERY_KIND = (
    *COLUMNS,
    ("i", "int"),
    ("tags", "array<string>"),
    ("longs", "array<bigint>"),
    ("nums", "array<double>"),
)
EVERY_KIND += (("flags", "array<boolean>"), ("small", "array<int>"))
NUMBERS = (
    b"0",
    b"-0",
    b"-0.0",
    b"1.0",
    b"1e2",
    b"1E400",
    b"1e-400",
    b"01",
    b"1.",
    b"NaN",
    b"-Infinity",
    b"Inf",
    b"4.35",
)
NUMBERS += (b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809", b"2147483648", b"5e-324")
NUMBERS += (b"1.7976931348623157e308", b"1.7976931348623159e308", b"123456789012345678901234567890")
TEXTS = (
    b'"a"',
    b'"\\ud800"',
    b'"\\ud83d\\ude00"',
    b'"\\u0000"',
    b'"\xff"',
    b'"\t"',
    b'"\xc3\xa9"',
    b'": NaN"',
    b'"} null {"',
)
PLAIN = (b"null", b"true", b"false", b"{}", b"[]", b"nul", b"")
NAMES = st.sampled_from([name for name, _ in EVERY_KIND] + ["x", "\\u006e", ""])


def _objects(value: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    pairs = st.lists(st.tuples(NAMES, value), max_size=4)
    space = st.sampled_from([b"", b" ", b"\n"])
    return st.builds(
        lambda found, gap: (
            b"{" + b",".join(b'"%s":%s%s' % (name.encode(), gap, v) for name, v in found) + b"}"
        ),
        pairs,
        space,
    )


VALUES = st.recursive(
    st.sampled_from(NUMBERS + TEXTS + PLAIN),
    lambda inner: (
        _objects(inner) | st.lists(inner, max_size=3).map(lambda found: b"[" + b",".join(found) + b"]")
    ),
    max_leaves=6,
)
# Mostly what a column can hold: most of these are read at once.
NEARLY = {
    "string": (
        b'"a"',
        b'"\\ud83d\\ude00"',
        b'"\\u0000"',
        b'"\xc3\xa9"',
        b'": NaN"',
        b'"} null {"',
        b'"\\ud800"',
    )
}
NEARLY |= {"bigint": (b"1", b"9223372036854775807", b"-9223372036854775808", b"-0", b"1.0")}
NEARLY |= {"int": (b"7", b"2147483647", b"-2147483648", b"2147483648"), "boolean": (b"true", b"false")}
NEARLY |= {
    "double": (b"4.35", b"5e-324", b"1e-400", b"123456789012345678901234567890", b"1E5", b"-0.0", b"12")
}
NEARLY |= {
    f"array<{kind}>": (b"[]", b"[%s,null]" % found[0], b"[%s,%s]" % (found[1], found[0]))
    for kind, found in NEARLY.items()
}
FITTING = st.fixed_dictionaries(
    {},
    optional={name: st.sampled_from((*NEARLY[kind], b"null")) for name, kind in EVERY_KIND} | {"x": VALUES},
).map(
    lambda row: b"{" + b", ".join(b'"%s": %s' % (name.encode(), value) for name, value in row.items()) + b"}"
)
RECORDS = (
    _objects(VALUES)
    | VALUES
    | st.sampled_from([b"{}{}", b"{} null {}", b'{"x":[{}', b'{"query":"}', b'{"n":1} ', b"  "])
)


@settings(max_examples=400)
@given(st.lists(RECORDS, min_size=1, max_size=4) | st.lists(FITTING, min_size=1, max_size=4))
def test_arrow_reads_what_msgspec_reads_or_says_that_it_cannot(values: list[bytes]):
    given_values = pa.array(values, pa.binary())
    expected = decode_one_by_one(given_values, EVERY_KIND)
    found = read_at_once(given_values, EVERY_KIND)
    if found is not None:
        assert expected.rows is None
        # Texts, since -0.0 == 0.0.
        assert repr(found.to_pylist()) == repr(expected.table.to_pylist())
        found.validate(full=True)


@settings(max_examples=15)
@given(st.lists(RECORDS.filter(lambda value: value.startswith(b"{")), min_size=1, max_size=3))
def test_a_piece_that_cannot_be_read_at_once_changes_nothing_around_it(odd: list[bytes]):
    """Some records among many, two pieces apart: as if each was read alone."""
    plain = [b'{"query": "q", "n": %d}' % n for n in range(2 * PIECE_ROWS)]
    values = pa.array([*plain[:PIECE_ROWS], *odd, *plain[PIECE_ROWS:], *odd], pa.binary())
    found, expected = decode_json(values, EVERY_KIND), decode_one_by_one(values, EVERY_KIND)
    assert (found.rows, found.bad) == (expected.rows, expected.bad)
    assert repr(found.table.to_pylist()) == repr(expected.table.to_pylist())


@pytest.mark.parametrize("kinds", [COLUMNS, EVERY_KIND])
def test_ordinary_records_are_read_at_once(kinds: tuple[tuple[str, str], ...]):
    values = [
        b'{"query": "Info about NaN, \xc3\xa9", "n": 1, "share": 0.5, "ok": true, "x": {"y": [1, {}]}, "tags": ["a", null]}',
        b'{"nums": [1, 2.5], "longs": [], "n": null}',
    ]
    assert read_at_once(pa.array(values, pa.binary()).slice(1), kinds) is not None
    assert read_at_once(pa.array(values, pa.binary()), kinds) is not None


def test_deep_records_do_not_reach_a_reader_that_recurses():
    deep = b'{"x": ' + b"[" * 200 + b"]" * 200 + b"}"
    assert read_at_once(pa.array([b"{}", deep], pa.binary()), COLUMNS) is None
    assert decode(b"{}", deep).rows is None
