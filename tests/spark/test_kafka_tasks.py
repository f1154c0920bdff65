"""The same tasks on Kafka: the source, the step and the sink do not know which bus they are on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.spark.test_tasks import (
    CATEGORY,
    COUNT,
    PARSE,
    ZEITGEIST,
    counts,
    publish,
    queries,
    reference,
    settle,
)
from tests.support.stage import Stage, wait_for


@pytest.fixture
def stage(spark: Any, kafka: Any, tmp_path: Path) -> Stage:
    category = {**CATEGORY, "partitions": 2}
    return Stage(spark, tmp_path, ZEITGEIST / "pipeline.py", category, bus=kafka.new_place())


@pytest.mark.timeout(900)
def test_counts_on_kafka_are_exact_across_a_rescale_with_zombies(stage: Stage) -> None:
    """Plan: one task each; two each under a new generation, while the old ones go on until they are refused; end."""
    injector = stage.injector("queries")
    everything = queries(0, 2000)
    publish(stage, everything[:1000], injector, now_ms=1000)
    old_engine = stage.new_engine()
    for job in (PARSE, COUNT):
        stage.start(job, engine=old_engine)
    wait_for(lambda: counts(stage).total() > 0, "the first counts")
    new = stage.start(PARSE, generation=2, tasks=2) + stage.start(COUNT, generation=2, tasks=2)
    wait_for(
        lambda: all(view.state in ("fenced", "failed") for view in old_engine.poll()), "the old owner's end"
    )
    publish(stage, everything[1000:], injector, now_ms=2000)
    injector.close(now_ms=3000)
    settle(stage, reference(everything))
    stage.stop(new)
    assert not stage.deaths
