"""Two containers of one name: one wins, the other hears why, and nothing that it does harms the first."""

from __future__ import annotations

import time

import pytest

from tests.drills.conftest import Stopwatch
from tests.drills.fleet import DrillFleet, watch_for

pytestmark = [pytest.mark.drill, pytest.mark.timeout(120)]


def test_twin_in_the_same_folder(joined: DrillFleet, stopwatch: Stopwatch) -> None:
    """The folder's lock is held: the command ends at once and says so."""
    joined.run_jobs()
    before, since = joined.current(), time.monotonic()
    winner = joined.hosts["c1"]
    twin = joined.join("c1")
    assert twin.wait(30) != 0
    took_s = time.monotonic() - since
    joined.hosts["c1"] = winner
    said = (joined.home_of("c1") / "host.log").read_text()
    for part in (
        "another process already runs container c1",
        "holds the folder's lock",
        "stop the other one",
    ):
        assert part in said
    watch_for(10, "the first one goes on")
    joined.assert_well()
    joined.assert_undisturbed(before, since)
    stopwatch.took(took_s, limit_s=15, note="refused by the folder's lock")


def test_twin_in_another_folder(joined: DrillFleet, stopwatch: Stopwatch) -> None:
    """The lease is held: it may wait for its end, but it gets nothing; and its leaving is not the first one's."""
    joined.run_jobs()
    before, since = joined.current(), time.monotonic()
    life = joined.container("c1")["incarnation"]
    twin = joined.join("c1", folder="twin")
    log = joined.home_of("twin") / "warden.log"
    joined.wait("the refusal", lambda: log.exists() and "already running" in log.read_text(), seconds=30)
    took_s = time.monotonic() - since
    for part in ("container c1 is already running", "its lease is not over", "choose another name"):
        assert part in log.read_text()
    watch_for(10, "both go on")
    assert not (joined.home_of("twin") / "engine.pid").exists()
    assert joined.container("c1")["incarnation"] == life
    twin.terminate()
    assert twin.wait(30) == 0
    watch_for(3, "the twin is gone")
    assert joined.container("c1")["incarnation"] == life and "c1" in joined.ready()
    joined.assert_well()
    joined.assert_undisturbed(before, since)
    assert log.read_text().count("already running") == 1, "said again and again"
    stopwatch.took(took_s, limit_s=15, note="refused by the lease")
