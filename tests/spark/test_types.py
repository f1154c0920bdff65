"""Every function that a step may call exists in Spark, takes these arguments, and gives the type we say."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import AnalysisException

from penstock.streams.compile.expression_types import Typer
from penstock.streams.compile.expressions import parse_text
from penstock.streams.compile.functions import FUNCTIONS, Function
from tests.streams import test_expressions as expressions

SAMPLES = {
    "s": "query", "n": "n", "i": "n", "j": "n", "k": "2", "b": "ok", "x": "raw", "sx": "query", "p": "n", "a": "query",
    "t": "timestamp_millis(ts)", "d": "DATE(query)", "m": "timestamp_millis(ts)", "ts": "timestamp_millis(ts)",
    "r": "split(query, ' ')", "f": "0.5", "o": "n", "h": "n",
}  # fmt: skip
# Arguments that Spark reads while it plans.
WRITTEN_OUT = {
    "encode": "encode(query, 'UTF-8')",
    "decode": "decode(raw, 'UTF-8')",
    "format_string": "format_string('%s', n)",
    "split_part": "split_part(query, ' ', 1)",
}


def calls() -> list[str]:
    """Each function with as few and with as many arguments as it takes."""
    found = []
    for name, function in FUNCTIONS.items():
        counts = {
            function.required,
            len(function.kinds),
            len(function.kinds) + 2 * (function.rest is not None),
        }
        found += (
            [WRITTEN_OUT[name]]
            if name in WRITTEN_OUT
            else [_call(function, count) for count in sorted(counts)]
        )
    return found


def _call(function: Function, count: int) -> str:
    kinds = [str(function.kind_of(index)) for index in range(count)]
    return f"{function.name}({', '.join(SAMPLES[kind] for kind in kinds)})"


def ours(text: str) -> str:
    return Typer(dict(expressions.COLUMNS)).type_of(parse_text(text))


@pytest.fixture(scope="module")
def spark_type(spark: Any) -> Any:
    rows = spark.createDataFrame([], ", ".join(f"{name} {kind}" for name, kind in expressions.COLUMNS))

    def find(text: str) -> str:
        try:
            kind = rows.selectExpr(f"{text} AS x").schema["x"].dataType.simpleString()
        except AnalysisException as error:
            return str(error).splitlines()[0]
        return kind.partition("(")[0] if kind.startswith("decimal(") else str(kind)

    return find


def test_every_allowed_function_gives_the_type_we_say(spark_type: Any) -> None:
    wrong = {text: (ours(text), spark_type(text)) for text in calls()}
    assert {text: types for text, types in wrong.items() if types[0] != types[1]} == {}


def test_expressions_have_the_type_that_spark_gives(spark_type: Any) -> None:
    (mark,) = expressions.test_the_type_is_the_one_spark_gives.pytestmark  # type: ignore[attr-defined]
    assert {text: spark_type(text) for text, _ in mark.args[1]} == dict(mark.args[1])
