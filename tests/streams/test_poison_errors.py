"""Which of Spark's errors a value causes, and how they are told. The words are Spark's own."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")
from penstock.streams.spark.run_errors import error_class, is_of_values, readable

DIVIDED = """[STREAM_FAILED] Query [id = 1] terminated with exception: [DIVIDE_BY_ZERO] Division by zero. Use
`try_divide` to tolerate divisor being 0 and return NULL instead. SQLSTATE: 22012
\tat org.apache.spark.Foo"""


@pytest.mark.parametrize(
    ("text", "name", "of_values"),
    [
        (DIVIDED, "DIVIDE_BY_ZERO", True),
        ("[CAST_INVALID_INPUT] The value 'abc' cannot be cast", "CAST_INVALID_INPUT", True),
        ("[INVALID_ARRAY_INDEX] The index 9", "INVALID_ARRAY_INDEX", True),
        ("[UNABLE_TO_ACQUIRE_MEMORY] no", "UNABLE_TO_ACQUIRE_MEMORY", False),
        ("[STREAM_FAILED] something", "", False),
        ("Connection refused", "", False),
    ],
)
def test_an_error_is_known_by_its_class(text: str, name: str, of_values: bool):
    error = RuntimeError(text)
    assert (error_class(error), is_of_values(error)) == (name, of_values)


def test_the_class_comes_first():
    assert readable(RuntimeError(DIVIDED)).startswith("[DIVIDE_BY_ZERO] Division by zero.")
