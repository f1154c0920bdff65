"""Input that all lies on one task of a real job on Spark: the scaler deals the partitions anew, nothing is lost.

Six partitions, two tasks, and nearly all calls in the three partitions of the first. More tasks are not allowed:
where they are, a look at a busy moment may give more first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.streams.bus.log import partitions_of
from tests.drills.calling import KEYS, PARTITIONS, Calling
from tests.e2e.platform import Platform

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200)]
# Of the calls: what lies in each partition. A container has two cores: three at once are too many for a task, and
# two are not.
PARTS = (0.32, 0.32, 0.32, 0.02, 0.01, 0.01)
MINUTES_S = 300.0
SLO_S = 6


class HotPartitions(random.Random):
    """Chooses keys so that each partition gets its part."""

    def __init__(self) -> None:
        super().__init__(1)
        places = partitions_of(pa.array(KEYS), PARTITIONS).tolist()
        assert set(places) == set(range(PARTITIONS)), "each partition has a key"
        self._parts = [PARTS[place] / places.count(place) for place in places]

    def choices(self, population: Sequence[str], weights=None, *, cum_weights=None, k: int = 1) -> list[str]:  # type: ignore[no-untyped-def, override]
        return super().choices(population, self._parts, k=k)


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    """`penstock up` with two containers of Spark."""
    found = Platform(tmp_path / "penstock", containers=2)
    try:
        found.launch()
        found.wait("containers", lambda: len(found.ready()) == 2, seconds=300)
        yield found
        assert found.stop() == []
    finally:
        found.kill()


def test_partitions_that_are_hot_on_one_task_are_dealt_anew(platform: Platform, tmp_path: Path):
    calling = Calling(platform, "uneven", tmp_path)
    calling._random = HotPartitions()
    calling.says(call_ms=6)
    calling.start(
        {
            "slo.lag_s": SLO_S,
            "scaler.settle_s": 0,
            "scaler.quiet_s": 3600,
            "batch_rows_max": 600,  # batches that end soon: they count when they are over
            "task_count": 2,
            "task_count_max": 2,
        }
    )
    before = platform.client.job(calling.job)
    assert before["running"]["mapping"] == [0, 0, 0, 1, 1, 1]
    calling.rate = 300
    platform.wait("lag", lambda: calling.lag_s() > SLO_S, seconds=240)
    platform.wait("another deal", lambda: "partition_tasks" in calling.layer("scaler"), seconds=2 * MINUTES_S)
    done = calling.decisions("autoscaler")[0]
    print(f"\n    {done['decision']}: {done['reason']}", flush=True)
    assert done["decision"] == "rebalance" and "the busiest task has" in done["reason"]
    platform.wait("the plan", calling.is_in_sync)
    job = platform.client.job(calling.job)
    mapping = job["running"]["mapping"]
    assert mapping == calling.layer("scaler")["partition_tasks"] and sorted(set(mapping)) == [0, 1]
    assert len({mapping[0], mapping[1], mapping[2]}) == 2, mapping  # the hot ones are on both
    assert job["running"]["generation"] > before["running"]["generation"]
    platform.wait("both tasks", lambda: len(platform.running(calling.job)) == 2)
    recovered_s = platform.wait("no lag", lambda: calling.lag_s() < SLO_S, seconds=420)
    print(f"    recovered {recovered_s:.0f} s after both tasks ran", flush=True)
    assert calling.task_count() == 2 and "task_count" not in calling.layer("scaler")
    assert "partition_tasks" in calling.told("config", "show", calling.job, "--output", "json")
    assert "from task 0 to 1" in calling.explained()
    calling.finish()
