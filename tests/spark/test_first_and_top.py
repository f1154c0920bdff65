"""Dedup, aggregates in two phases and tops: one Spark batch makes the rows of the stream, in Python and in SQL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import testing
from tests.spark.test_operators import SALES, VISITS, a_stage, batched, inject, sales

FIRSTS = """
from penstock import Pipeline, sliding

p = Pipeline("firsts", partitions=2)
first = p.source("sales").key_by("shop").dedup(within="40ms")
windows = first.window(sliding("1s", every="500ms"))
counts = windows.aggregate("count(*) AS n", "sum(amount) AS total", two_phase=True)
counts.top(3, by="n").sink("best")
"""
FIRSTS_SQL = """
CREATE PIPELINE firsts_sql WITH (partitions = 2);
INSERT INTO best
SELECT shop, window.start AS since, count(*) AS n, max(amount) AS most
FROM (SELECT * FROM sales QUALIFY
  row_number() OVER (PARTITION BY shop, window(event_time, '50 milliseconds') ORDER BY event_time) = 1) f
GROUP BY shop, window(event_time, '1 second')
QUALIFY row_number() OVER (PARTITION BY window ORDER BY n DESC) <= 2;
"""


@pytest.mark.parametrize(("name", "text"), [("firsts.py", FIRSTS), ("firsts.sql", FIRSTS_SQL)])
def test_a_batch_makes_the_rows_of_the_stream(spark: Any, tmp_path: Path, name: str, text: str):
    rows = sales(1500)
    stage = a_stage(spark, tmp_path, name, text)
    inject(stage, "sales", rows)
    run = testing.PipelineRun(tmp_path / name, SALES, VISITS)
    with run.batch():
        for row in rows:
            run.record("sales", row["ts"], row["shop"], **row)
    run.close()
    expected = sorted((made.ts, made.key, False, *made.values.values()) for made in run.productions("best"))
    assert len(expected) > 8
    assert sorted(batched(spark, stage, "best", ["sales"]).elements()) == expected
