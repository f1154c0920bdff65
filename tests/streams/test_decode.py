"""Claims about JSON records: readable ones become columns, all others a reason, and nothing crashes."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.streams.bus.decode import decode_json

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
