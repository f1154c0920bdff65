"""Claims about expressions in Arrow without Spark: which there are, and which values they leave to Spark.

That they give what Spark gives is claimed in `tests/spark/test_arrow_stages.py`.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.streams.compile.expressions import check_value
from penstock.streams.step.arrow_stages import Unsure, in_arrow
from tests.streams.arrow_cases import COLUMNS, EXPRESSIONS, ROWS, SPARKS_OWN, batch


def compute(text: str, *changed: tuple[object, ...]):
    found = in_arrow(text, dict(COLUMNS))
    assert found is not None
    rows = batch((*ROWS, *changed))
    return found.compute(dict(zip(rows.schema.names, rows.columns, strict=True)))


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_an_expression_has_the_type_that_the_checks_gave_it(text: str):
    found = in_arrow(text, dict(COLUMNS))
    assert found is not None and found.type == check_value(text, COLUMNS).type


@pytest.mark.parametrize("text", SPARKS_OWN)
def test_what_could_differ_is_sparks(text: str):
    assert in_arrow(text, dict(COLUMNS)) is None


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("d > 1", (None, None, None, None, float("nan"), None, None)),
        ("d = e", (None, None, None, None, 1.0, float("nan"), None)),
        ("upper(s)", ("é", None, None, None, None, None, None)),
        ("lower(t)", (None, "İ", None, None, None, None, None)),
        ("i + 1", (None, None, 2**31 - 1, None, None, None, None)),
        ("n * 2", (None, None, None, 2**62, None, None, None)),
        ("-n", (None, None, None, -(2**63), None, None, None)),
        ("n > d", (None, None, None, 2**53 + 1, 1.0, None, None)),
    ],
)
def test_values_that_could_differ_are_left_to_spark(text: str, row: tuple[object, ...]):
    with pytest.raises((Unsure, pa.ArrowInvalid)):
        compute(text, row)


def test_nothing_is_known_of_a_null():
    """Three-valued logic: NULL AND false is false, NULL OR true is true, all else with NULL is NULL."""
    rows = [(None, None, i, None, None, None, b) for i in (0, 1, None) for b in (True, False, None)]
    assert compute("i = 1 AND b", *rows)[len(ROWS) :].to_pylist() == [
        *(False, False, False),
        *(True, False, None),
        *(None, False, None),
    ]
    assert compute("i = 1 OR b", *rows)[len(ROWS) :].to_pylist() == [
        *(True, False, None),
        *(True, True, True),
        *(True, None, None),
    ]
