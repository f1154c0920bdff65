"""SIGSTOP of a whole container, and its return: a machine that freezes cannot run its own timer.

Tasks of the kind `process` write where nobody fences them. Their only guard is the warden, and it is frozen with
them: between their waking and its first look they go on beside their successors. That moment is measured here and
printed; nothing but a check of PENSTOCK_EPOCH where they write can close it. Epochs must grow for that, and do.
"""

from __future__ import annotations

import time

import pytest

from tests.drills.conftest import Stopwatch
from tests.drills.fleet import DrillFleet, watch_for

pytestmark = [pytest.mark.drill, pytest.mark.timeout(150)]
# From waking to the last task's end: one look of the warden, and SIGKILL to a session, on a busy machine.
ZOMBIE_MAX_S = 2.0


def test_freeze_5_s(fleet: DrillFleet, stopwatch: Stopwatch) -> None:
    """It returns before its lease is over: its shards stay."""
    fleet.run_jobs()
    victim = fleet.busiest()
    mine = {task: fleet.current()[task] for task in fleet.tasks_on(victim)}
    wake = fleet.freeze(victim)
    watch_for(5, f"{victim} is frozen")
    woken = time.monotonic()
    wake()
    watch_for(5, f"{victim} is awake")
    fleet.await_ready(victim)
    fleet.assert_well()
    after = {task: fleet.current()[task] for task in mine}
    assert all(run.place == victim for run in after.values())
    took_s = max(min(mark for mark in run.marks if mark > woken) for run in after.values()) - woken
    restarted = sum(after[task].pid != mine[task].pid for task in mine)
    stopwatch.took(took_s, limit_s=10, note=f"it kept its shards; {restarted} of {len(mine)} tasks restarted")


@pytest.mark.parametrize("seconds", [pytest.param(15, marks=pytest.mark.slow), 40])
def test_freeze_beyond_the_lease(fleet: DrillFleet, stopwatch: Stopwatch, seconds: int) -> None:
    """It is failed over while it sleeps, and wakes as a zombie: it must end at once, and come back as another."""
    fleet.run_jobs()
    victim = fleet.busiest()
    lost, old_life = fleet.tasks_on(victim), fleet.container(victim)["incarnation"]
    fault = time.monotonic()
    wake = fleet.freeze(victim)
    took_s = fleet.await_recovery(lost, fault)
    assert took_s > 10, "it was failed over before its lease could be over"
    assert not fleet.overlaps()
    watch_for(max(0.0, fault + seconds - time.monotonic()), f"{victim} is frozen, its tasks run elsewhere")
    woken = time.monotonic()
    wake()
    fleet.await_ready(victim)
    assert fleet.container(victim)["incarnation"] != old_life
    fleet.await_still()
    fleet.await_marks(fleet.tasks)
    overlaps = fleet.overlaps()
    # Nothing but what the woken processes did in their first moment.
    assert all(overlap.older.place == victim and overlap.older.first < fault for overlap in overlaps)
    late = {mark - woken for overlap in overlaps for mark in overlap.older.marks if mark >= woken}
    assert max(late, default=0.0) < ZOMBIE_MAX_S, "\n".join(str(overlap) for overlap in overlaps)
    note = f"zombies marked {len(late)} times, the last {max(late, default=0.0) * 1000:.0f} ms after waking"
    stopwatch.took(took_s, limit_s=20, note=note)
