"""Claims about what a running task says of itself: totals that only grow, and which life they belong to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.streams.testing import Stage, wait_for
from tests.spark.test_tasks import CATEGORY, PARSE, ZEITGEIST, publish, queries


def totals_when(stage: Stage, is_so: Callable[[dict[str, float]], bool], what: str) -> dict[str, float]:
    """What the one task tells once this holds; a look that failed meanwhile tells nothing."""
    seen: list[dict[str, float]] = []

    def look() -> bool:
        (view,) = stage.tasks.poll()
        assert view.state not in ("failed", "fenced"), view.error
        seen.append(dict(view.metrics))
        return "read_total" in seen[-1] and is_so(seen[-1])

    wait_for(look, what, seconds=180)
    return seen[-1]


def test_totals_grow_with_the_work_and_begin_anew_with_a_start(spark: Any, tmp_path: Path):
    stage = Stage(spark, tmp_path, ZEITGEIST / "pipeline.py", CATEGORY)
    injector = stage.injector("queries")
    publish(stage, queries(0, 10), injector, now_ms=1000)
    ids = stage.start(PARSE)
    first = totals_when(stage, lambda told: True, "the first totals")
    publish(stage, queries(10, 500), injector, now_ms=2000)
    later = totals_when(stage, lambda told: told["read_total"] >= 500, "the records to be counted")
    assert later["started_ms"] == first["started_ms"] < later["at_ms"]
    assert 0 < later["written_total"] <= later["read_total"] <= 510
    assert later["busy_ms_total"] > first["busy_ms_total"] > 0
    stage.stop(ids)
    again = stage.start(PARSE)
    new = totals_when(stage, lambda told: True, "totals of the next life")
    assert new["started_ms"] > later["at_ms"] and new["read_total"] <= 10
    stage.stop(again)
