"""The scaler deals partitions anew again and again, under faults, while others change what its deals are for."""

from __future__ import annotations

from random import Random

import pytest

from penstock.jobs.running_store import RunningStore
from penstock.jobs.tasks import requested_mapping
from penstock.sim import scenario
from penstock.sim.scenario import SCALER, Workload, World, draw_options

EVERY_MS = 3_000


class Dealing(Workload):
    """The usual clients, and a scaler whose deals often fit and sometimes do not. Its chance is its own."""

    def begin(self) -> None:
        self.rng = Random(7)
        super().begin()
        self.world.sim.after(EVERY_MS, "the scaler deals", self._deal)

    def _deal(self) -> None:
        if self.is_stopped:
            return
        tasks, partitions = self.rng.randint(1, 4), self.rng.randint(2, 6)
        deal = [self.rng.randrange(tasks) for _ in range(max(tasks, partitions))]
        deal[:tasks] = range(tasks)
        changes = {"task_count": tasks, "partition_tasks": deal} if self.rng.random() < 0.7 else {}
        self._patch(
            "deal", self.rng.choice(self.names), "scaler", SCALER, changes or {"partition_tasks": None}
        )
        self.world.sim.after(EVERY_MS, "the scaler deals", self._deal)


@pytest.mark.parametrize("number", range(4))
def test_deals_keep_every_invariant(number: int):
    """Plan: as any scenario: faults, then a healed world that must come to rest. Deals that fit are what runs."""
    world = World(draw_options(number))
    try:
        world.workload = Dealing(world)
        report = scenario._run(world)
        assert report.writes["deal"] > 0 and report.starts > 0, report.writes
        rows = RunningStore(world.database).changed_rows(0)[1]
    finally:
        world.database.close()
    for row in rows:
        asked = requested_mapping(row.config)
        assert row.state != "running" or asked is None or row.mapping == asked
