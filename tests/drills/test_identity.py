"""Two containers of one name: one wins, the other hears why, and nothing that it does harms the first."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.drills.conftest import Stopwatch
from tests.drills.fleet import DrillFleet, watch_for

pytestmark = [pytest.mark.drill, pytest.mark.timeout(120)]


def test_twin_in_the_same_folder(fleet: DrillFleet, stopwatch: Stopwatch) -> None:
    """The folder's lock is held: the command ends at once and says so."""
    fleet.run_jobs()
    before, since = fleet.current(), time.monotonic()
    home = fleet.home_of("c1")
    twin = fleet.join("c1", folder=home)
    assert twin.wait(30) != 0
    took_s = time.monotonic() - since
    said = (home / "host.log").read_text()
    for part in (
        "another process already runs container c1",
        "holds the lock of the folder",
        "stop the other process",
    ):
        assert part in said
    watch_for(10, "the first one goes on")
    fleet.assert_well()
    fleet.assert_undisturbed(before, since)
    stopwatch.took(took_s, limit_s=15, note="refused by the folder's lock")


@pytest.mark.slow
def test_twin_in_another_folder(fleet: DrillFleet, tmp_path: Path, stopwatch: Stopwatch) -> None:
    """The lease is held: it may wait for its end, but it gets nothing; and its leaving is not the first one's."""
    fleet.run_jobs()
    before, since = fleet.current(), time.monotonic()
    life = fleet.container("c1")["incarnation"]
    home = tmp_path / "twin"
    twin = fleet.join("c1", folder=home)
    log = home / "warden.log"
    fleet.wait("the refusal", lambda: log.exists() and "already running" in log.read_text(), seconds=30)
    took_s = time.monotonic() - since
    for part in ("container c1 is already running", "its lease has not expired", "choose another name"):
        assert part in log.read_text()
    watch_for(10, "both go on")
    assert not (home / "engine.pid").exists()
    assert fleet.container("c1")["incarnation"] == life
    twin.terminate()
    assert twin.wait(30) == 0
    watch_for(3, "the twin is gone")
    assert fleet.container("c1")["incarnation"] == life and "c1" in fleet.ready()
    fleet.assert_well()
    fleet.assert_undisturbed(before, since)
    assert log.read_text().count("already running") == 1, "said again and again"
    stopwatch.took(took_s, limit_s=15, note="refused by the lease")
