"""Claims about what a running task says of itself: totals that only grow, and which life they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.streams.testing import Stage, wait_for
from tests.spark.test_tasks import CATEGORY, PARSE, ZEITGEIST, publish, queries


def test_totals_grow_with_the_work_and_begin_anew_with_a_start(spark: Any, tmp_path: Path):
    stage = Stage(spark, tmp_path, ZEITGEIST / "pipeline.py", CATEGORY)
    injector = stage.injector("queries")
    publish(stage, queries(0, 10), injector, now_ms=1000)
    ids = stage.start(PARSE)

    def told() -> dict[str, float]:
        (view,) = stage.tasks.poll()
        return view.metrics

    try:
        wait_for(lambda: "read_total" in told(), "the first totals")
        first = told()
        publish(stage, queries(10, 500), injector, now_ms=2000)
        wait_for(lambda: told().get("read_total", 0) >= 500, "the records to be counted")
        later = told()
        assert later["started_ms"] == first["started_ms"] < later["at_ms"]
        assert 0 < later["written_total"] <= later["read_total"] <= 510
        assert later["busy_ms_total"] > first["busy_ms_total"] > 0
    finally:
        stage.stop(ids)
    again = stage.start(PARSE)
    try:
        wait_for(lambda: told().get("started_ms", 0) > later["at_ms"], "totals of the next life")
    finally:
        stage.stop(again)
