"""kill -9 of the control plane: at each step of a move, and for half a minute (Turbine IV-A2, IV-D).

Shard Manager, State Syncer and Task Service are one process here: killing it is killing all three.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import time

import pytest

from tests.drills.conftest import Stopwatch
from tests.drills.fleet import DrillFleet, kill_all, watch_for
from tests.drills.marks import runs_of

pytestmark = [pytest.mark.drill, pytest.mark.timeout(150)]
LINGER_S = 2.0  # tasks take so long to stop: a DROP has a beginning and an end
AWAY_S = 30


class Move:
    """One shard on its way, seen in the store itself."""

    def __init__(self, fleet: DrillFleet) -> None:
        self.fleet, self.source = fleet, fleet.busiest()
        self.target = next(name for name in ("c1", "c2", "c3") if name != self.source)
        self.task = fleet.tasks_on(self.source)[0]
        job, _, index = self.task.rpartition("_")
        lines = {line["task_id"]: line for line in fleet.client.tasks()}
        self.shard = int(lines[f"{job}/{index}"]["shard"])
        self.moved = [
            line["task_id"].replace("/", "_") for line in lines.values() if line["shard"] == self.shard
        ]
        self.bystanders = {task: run for task, run in fleet.current().items() if task not in self.moved}
        self.began = time.monotonic()

    def begin(self) -> None:
        self.fleet.client.move_shard(self.shard, self.target, why="a drill")

    def row(self) -> tuple[str, str]:
        """(container, state) of the shard."""
        with sqlite3.connect(self.fleet.folder / "store.db") as store:
            found = store.execute("SELECT container, state FROM shards WHERE shard = ?", (self.shard,))
            container, state = found.fetchone()
        store.close()
        return str(container), str(state)

    def is_stopping(self) -> bool:
        lines = self.fleet.client.tasks()
        return any(line["shard"] == self.shard and line["state"] == "stopping" for line in lines)


def kill_control_plane(fleet: DrillFleet) -> float:
    assert fleet.process is not None
    fault = kill_all([fleet.process.pid])
    fleet.process.wait()
    return fault


def test_kill_shard_manager_after_the_move_is_decided(joined: DrillFleet, stopwatch: Stopwatch) -> None:
    """The store says `dropping`, and nobody was told yet."""
    joined.run_jobs(linger_s=LINGER_S)
    move = Move(joined)
    warden = joined.warden_pid(move.source)
    os.kill(warden, signal.SIGSTOP)  # it cannot hear of it before the Shard Manager is dead
    try:
        move.begin()
        fault = kill_control_plane(joined)
        assert move.row() == (move.source, "dropping")
    finally:
        os.kill(warden, signal.SIGCONT)
    finish(move, fault, stopwatch)


@pytest.mark.slow
def test_kill_shard_manager_while_tasks_stop(joined: DrillFleet, stopwatch: Stopwatch) -> None:
    """The source obeys the DROP, and nobody is there to be told when it is done."""
    joined.run_jobs(linger_s=LINGER_S)
    move = Move(joined)
    move.begin()
    joined.wait("the DROP to be obeyed", move.is_stopping)
    fault = kill_control_plane(joined)
    assert move.row() == (move.source, "dropping")
    finish(move, fault, stopwatch)


def test_kill_shard_manager_after_the_drop_is_acknowledged(joined: DrillFleet, stopwatch: Stopwatch) -> None:
    """The store names the new owner, which was not told: it finds out in the store, without a Shard Manager."""
    joined.run_jobs(linger_s=LINGER_S)
    move = Move(joined)
    warden = joined.warden_pid(move.target)
    move.begin()
    joined.wait("the DROP to be obeyed", move.is_stopping)
    os.kill(warden, signal.SIGSTOP)  # it cannot hear of it before the Shard Manager is dead
    try:
        joined.wait("the DROP to be acknowledged", lambda: move.row() == (move.target, "owned"), seconds=5)
        fault = kill_control_plane(joined)
    finally:
        os.kill(warden, signal.SIGCONT)
    assert joined.current()[move.task].place == move.source
    finish(move, fault, stopwatch, alone=True)


def finish(move: Move, fault: float, stopwatch: Stopwatch, *, alone: bool = False) -> None:
    """Let the fleet be without a control plane, start one on the same folder, and look."""
    fleet = move.fleet
    watch_for(6, "no control plane")
    runs = fleet.current()
    assert all((runs[task].place == move.target) is alone for task in move.moved)
    fleet.launch()
    print("  the control plane is back", flush=True)
    took_s = fleet.await_recovery(move.moved, fault)
    # Balancing may bring it back later: the operator's move left the containers uneven.
    runs_since = [run for run in fleet.runs() if run.last > fault]
    assert all(move.target in {run.place for run in runs_of(runs_since, task)} for task in move.moved)
    fleet.assert_well()
    fleet.assert_undisturbed(move.bystanders, move.began)
    how = "the new owner read the store" if alone else "6 s without a control plane among them"
    stopwatch.took(took_s, limit_s=20, note=how)


def test_control_plane_away(joined: DrillFleet, stopwatch: Stopwatch) -> None:
    """Containers renew their leases in the store: nothing stops, and nothing storms when it is back."""
    joined.run_jobs()
    before, since = joined.current(), time.monotonic()
    kill_control_plane(joined)
    watch_for(AWAY_S, "no Shard Manager, no State Syncer, no Task Service")
    joined.assert_undisturbed(before, since)
    back, back_ms = time.monotonic(), time.time() * 1000
    joined.launch()
    joined.wait("beats", lambda: all(row["seen_ms"] > back_ms for row in joined.client.containers()))
    took_s = time.monotonic() - back
    watch_for(13, "longer than a fail-over interval: a late storm would come now")
    joined.assert_well()
    joined.assert_undisturbed(before, since)
    stopwatch.took(took_s, limit_s=20, note=f"away for {AWAY_S} s, 0 restarts")


def test_container_dies_while_control_plane_is_away(joined: DrillFleet, stopwatch: Stopwatch) -> None:
    """Nobody fails it over meanwhile; the next Shard Manager gives everybody a full interval, then acts."""
    joined.run_jobs()
    victim = joined.busiest()
    lost, since = joined.tasks_on(victim), time.monotonic()
    before = {task: run for task, run in joined.current().items() if task not in lost}
    victims = joined.processes_of(victim, with_host=True)
    kill_control_plane(joined)
    kill_all(victims)
    watch_for(5, f"no control plane, and {victim} is dead")
    back = time.monotonic()
    joined.launch()
    took_s = joined.await_recovery(lost, back)
    joined.assert_well()
    joined.assert_undisturbed(before, since)
    stopwatch.took(took_s, limit_s=25, note="counted from the return of the control plane")
