"""Claims about what a running task says of itself: totals that only grow, and which life they belong to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.spark.test_tasks import CATEGORY, COUNT, PARSE, ZEITGEIST, publish, queries, reference
from tests.support.stage import Stage, wait_for


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


def test_keys_and_bytes_kept_are_told_across_a_rescale_and_go_with_their_keys(spark: Any, tmp_path: Path):
    """Plan: a second that stays open; one task, then three of a new generation; then the second is over."""
    stage = Stage(spark, tmp_path, ZEITGEIST / "pipeline.py", CATEGORY)
    injector = stage.injector("queries")
    records = queries(0, 100)
    expected = len({query for query, _, _ in reference(records)})

    def kept() -> tuple[float, float] | None:
        """Keys and bytes of all tasks of the count together; None: one does not tell."""
        told = [view.metrics for view in stage.tasks.poll() if view.task_id.startswith(COUNT)]
        if not all({"key_count", "state_bytes"} <= metrics.keys() for metrics in told):
            return None
        return sum(one["key_count"] for one in told), sum(one["state_bytes"] for one in told)

    def wait_for_keys(count: int) -> float:
        wait_for(lambda: (kept() or (-1, 0))[0] == count, f"{count} keys", seconds=180)
        found = kept()
        assert found is not None
        return found[1]

    publish(stage, records, injector, now_ms=1000)
    first = stage.start(PARSE) + stage.start(COUNT)
    size = wait_for_keys(expected)
    assert size > 5 * expected
    parsing = [view.metrics for view in stage.tasks.poll() if view.task_id.startswith(PARSE)]
    assert all("key_count" not in metrics for metrics in parsing), "it keeps no state"
    stage.stop(first)
    second = stage.start(PARSE, generation=2) + stage.start(COUNT, generation=2, tasks=3)
    assert wait_for_keys(expected) == size
    injector.close(now_ms=2000)
    assert wait_for_keys(0) == 0
    stage.stop(second)
