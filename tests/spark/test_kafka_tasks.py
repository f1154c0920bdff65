"""The same tasks on Kafka: the source, the step and the sink do not know which bus they are on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.streams.testing import Stage, wait_for
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


@pytest.fixture
def stage(spark: Any, kafka: Any, tmp_path: Path) -> Stage:
    return Stage(spark, tmp_path, ZEITGEIST / "pipeline.py", CATEGORY, bus=kafka.new_place())


def test_counts_on_kafka_are_exact_across_rescale_restart_and_a_zombie(stage: Stage) -> None:
    """Plan: one task each; stop; more tasks under a new generation; a second owner of all of them; end of input."""
    injector = stage.injector("queries")
    everything = queries(0, 3000)
    publish(stage, everything[:1000], injector, now_ms=1000)
    first = stage.start(PARSE) + stage.start(COUNT)
    wait_for(lambda: counts(stage).total() > 0, "the first counts")
    stage.stop(first)
    publish(stage, everything[1000:2000], injector, now_ms=2000)
    old_engine = stage.new_engine()
    stage.start(PARSE, generation=2, tasks=2, engine=old_engine)
    stage.start(COUNT, generation=2, tasks=2, engine=old_engine)
    before = counts(stage).total()
    wait_for(lambda: counts(stage).total() > before, "counts of the second generation")
    new = stage.start(PARSE, generation=2, epoch=2, tasks=2) + stage.start(
        COUNT, generation=2, epoch=2, tasks=2
    )
    wait_for(lambda: all(view.state == "fenced" for view in old_engine.poll()), "the old owner to be fenced")
    publish(stage, everything[2000:], injector, now_ms=3000)
    injector.close(now_ms=4000)
    settle(stage, reference(everything))
    stage.stop(new)
    assert not stage.deaths
