from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import text as json_text
from penstock.db.database import Database
from penstock.db.journal_store import AUDIT

texts = st.text() | st.text(alphabet=st.characters(max_codepoint=0x2FF)) | st.just("\x00\u2028\U0001f600\x7f")
numbers = st.integers() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=20,
)


@given(values)
def test_what_is_written_reads_as_with_json(value: Any) -> None:
    """Types, signs of zero and the order of keys included; either can read what the other wrote."""
    for text in (json_text.dumps(value), json.dumps(value)):
        for found in (json_text.loads(text), json.loads(text)):
            assert repr(found) == repr(value)


@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, [math.nan], "\ud800", {"\udfff": 1}, 2**64, -(2**63) - 1, 10**400, 5e-324]
)
def test_what_is_hard_to_write_comes_back_all_the_same(value: Any) -> None:
    assert repr(json_text.loads(json_text.dumps(value))) == repr(value)
    assert repr(json_text.loads(json.dumps(value))) == repr(value)


@pytest.mark.parametrize("text", ["", "{", "[1,]", "nul", '{"a" 1}'])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        json_text.loads(text)


def test_what_is_no_plain_value_is_refused() -> None:
    with pytest.raises(TypeError):
        json_text.dumps(object())


def test_columns_keep_numbers_strings_and_order(place: Path | str | None) -> None:
    data = {"b": 2**70, "a": 0.1, "ü\u2028\U0001f600": ["\t\\\n'\"", None, True, 1e300], "": {}}
    database = Database(place)
    with database.transaction() as connection:
        row = {name: "" for name in ("actor", "role", "action", "subject", "reason")}
        connection.execute(sa.insert(AUDIT).values(at_ms=0, data=data, **row))
    with database.reading() as connection:
        found = connection.execute(sa.select(AUDIT.c.data)).scalar_one()
    assert repr(found) == repr(data)
    database.close()
