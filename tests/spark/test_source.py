"""The bus as a source of Spark: how much a trigger takes, where AvailableNow ends, what Spark is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.streams.bus.log import CategorySpec, Log
from penstock.streams.places import open_log
from penstock.streams.step.step import TaskDescriptor
from tests.contracts.buses import records
from tests.support.stage import reading_task, wait_for

SPEC = CategorySpec(name="clicks", partitions=2, columns=(("query", "string"), ("n", "bigint")))


@pytest.fixture(params=["embedded", "kafka"])
def bus(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "kafka":
        yield request.getfixturevalue("kafka").new_place()
    else:
        yield f"embedded:{tmp_path / 'bus'}"


def publish(log: Log, *seqs: int) -> None:
    batches = {partition: records(*seqs, note="x" * 100) for partition in range(SPEC.partitions)}
    before = log.end_offsets(SPEC.name)
    log.publish(SPEC.name, producer="a", epoch=1, batches=batches, gapless=False)
    # Kafka answers a commit before every partition shows it; what is measured here needs all of them.
    wait_for(
        lambda: all(log.end_offsets(SPEC.name)[n] >= end + len(seqs) for n, end in enumerate(before)),
        "every partition shows what was published",
    )


def run(spark: Any, task: TaskDescriptor, folder: Path) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """What each batch brought until Spark ended the query, and what it said of itself."""
    found: list[list[int]] = []
    name = f"rows_{folder.name}".replace("-", "_")
    rows = spark.readStream.format("penstock").option("task", task.to_json()).load()

    def keep(batch: Any, number: int) -> None:
        found.append(sorted(row.n for row in batch.where("_kind = 0").select("n").collect()))

    query = (
        rows.writeStream.foreachBatch(keep)
        .queryName(name)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120), "AvailableNow did not end"
    return found, [json.loads(progress.json) for progress in query.recentProgress]


def test_available_now_reads_what_is_there_in_batches_that_fit(spark: Any, bus: str, tmp_path: Path):
    log = open_log(bus)
    log.create(SPEC)
    publish(log, *range(1, 201))
    whole = log.lag(SPEC.name, {0: 0, 1: 0}, now_ms=0).bytes
    task = reading_task(tmp_path, bus, SPEC.name).with_config(batch_bytes_max=whole // 4)
    batches, progress = run(spark, task, tmp_path)
    assert sorted(n for batch in batches for n in batch) == sorted([*range(1, 201)] * 2)
    assert 4 <= len(batches) <= 7 and max(map(len, batches)) <= 120
    ends = {f"0:{partition}": end for partition, end in enumerate(log.end_offsets(SPEC.name))}
    (source,) = progress[-1]["sources"]
    assert source["latestOffset"] == ends
    # Records that came later are the next run's.
    publish(log, 201, 202)
    assert [n for batch in run(spark, task, tmp_path)[0] for n in batch] == [201, 201, 202, 202]


def test_available_now_over_nothing_is_one_batch(spark: Any, tmp_path: Path):
    """Timers and leftovers of a task are due also when no record came."""
    place = f"embedded:{tmp_path / 'bus'}"
    open_log(place).create(SPEC)
    batches, _ = run(spark, reading_task(tmp_path, place, SPEC.name), tmp_path)
    assert batches == [[]]
