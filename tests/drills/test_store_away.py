"""The store freezes (Turbine IV-D): no lease can be renewed by anybody.

Tasks that nobody fences stop at their deadline and are started again when it is back, where they were. A shorter
absence is not noticed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.drills.conftest import Stopwatch
from tests.drills.fleet import DrillFleet, watch_for
from tests.postgres import PostgresServer

pytestmark = [pytest.mark.drill, pytest.mark.timeout(180)]
# The lease of 8 s counts from a sending, so it is over before; then the warden looks, kills and reaps.
STOPPED_S = 10.0


@contextmanager
def frozen(server: PostgresServer) -> Iterator[None]:
    """SIGSTOP of the server and of all that it started, those of connections to come too."""
    first = psutil.Process(server.pid)
    first.suspend()
    kin = first.children(recursive=True)
    for process in kin:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in (*kin, first):
            process.resume()


def test_store_away(tmp_path: Path, postgres: PostgresServer, stopwatch: Stopwatch) -> None:
    """4 s: nothing happens. 20 s: every task stops at its deadline, none is lost, none is doubled."""
    database = postgres.new_database()
    with DrillFleet(tmp_path, database=database) as fleet:
        fleet.launch()
        for name in ("c1", "c2", "c3"):
            fleet.join(name, database=database)
        fleet.await_ready("c1", "c2", "c3")
        fleet.run_jobs()
        before, since = fleet.current(), time.monotonic()
        with frozen(postgres):
            watch_for(4, "the store does not answer")
        watch_for(5, "it does")
        fleet.assert_undisturbed(before, since)

        fault = time.monotonic()
        with frozen(postgres):
            watch_for(20, "the store does not answer")
            ended = {run.task: run.last - fault for run in fleet.current().values()}
            print(
                f"  tasks stopped after {min(ended.values()):.1f} to {max(ended.values()):.1f} s", flush=True
            )
        back = time.monotonic()
        assert max(ended.values()) < STOPPED_S
        took_s = fleet.await_recovery(fleet.tasks, back)
        fleet.assert_well()
        after = fleet.current()
        assert {task: after[task].place for task in after} == {task: before[task].place for task in before}
        note = f"they had stopped {max(ended.values()):.1f} s after the store"
        stopwatch.took(took_s, limit_s=30, note=note)
