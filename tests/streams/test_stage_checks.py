"""A plan that was written by hand goes to Spark only if the compiler could have made it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.streams.compile.expressions import check_plan
from penstock.streams.compile.plan import compile_pipeline
from tests.streams.plans import PACKAGE, a_pipeline
from tests.streams.test_plan_sql import CATALOGUE, FORMS

COLUMNS = (("query", "string"), ("n", "int"))


def a_plan(*stages: Any, **others: Any) -> dict[str, Any]:
    return {"stages": list(stages), "key": None, **others}


@pytest.mark.parametrize("form", FORMS)
def test_what_the_compiler_makes_passes(form: str):
    p = a_pipeline()
    FORMS[form][0](p)
    columns: dict[str, Any] = {}
    for job in compile_pipeline(p, CATALOGUE, PACKAGE).to_json()["jobs"]:
        found = []
        for source, reads in zip(job["inputs"], job["plan"]["reads"], strict=True):
            name = source["category"]
            there = columns[name] if name in columns else CATALOGUE.describe(name).columns
            found.append(tuple(column for column in there if column[0] in reads))
        check_plan(job["plan"], found)
        columns |= {o["category"]: tuple(map(tuple, o["columns"])) for o in job["outputs"]}


BAD = {
    "reflection": a_plan({"op": "filter", "expr": "reflect('java.lang.Runtime', 'x') = 'y'"}),
    "reflection in a key": a_plan(key="java_method('a', 'b')"),
    "reflection in a branch": a_plan(
        branches=[
            {"input": 0, "stages": [{"op": "select", "columns": [["x", "reflect('a', 'b')", "string"]]}]}
        ]
    ),
    "a way out of the brackets": a_plan({"op": "filter", "expr": "true) OR (reflect('a', 'b') = 'x'"}),
    "settings": a_plan({"op": "select", "columns": [["x", "'${env:HOME}'", "string"]]}),
    "another column": a_plan({"op": "filter", "expr": "lang = 'en'"}),
    "a column of ours": a_plan({"op": "filter", "expr": "_offset > 5"}),
    "a column in place of ours": a_plan({"op": "select", "columns": [["_kind", "n", "int"]]}),
    "a type that is none": a_plan({"op": "select", "columns": [["x", "n", "int) END, now("]]}),
    "a name that is none": a_plan({"op": "select", "columns": [["x`, now() AS `y", "n", "int"]]}),
    "a clock": a_plan(
        {"op": "explode", "array": "array(now())", "columns": [["x", "string"]], "outer": False}
    ),
    "no such stage": a_plan({"op": "sql", "expr": "SELECT 1"}),
}


@pytest.mark.parametrize("case", BAD)
def test_what_it_would_refuse_is_refused(case: str):
    with pytest.raises(ConfigError, match="cannot be run") as caught:
        check_plan(BAD[case], [COLUMNS])
    assert caught.value.why and caught.value.fix
