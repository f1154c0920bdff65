"""A container behind a cable that is cut, with every socket left open: nobody hears an error, only silence.

What happens depends on the store. In reach, the container renews its lease there and goes on. Out of reach, its tasks
stop before the Shard Manager may give them away, also when only the answers are lost.
"""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.drills.conftest import Stopwatch
from tests.drills.fleet import DrillFleet, watch_for
from tests.drills.proxy import Proxy
from tests.postgres import PostgresServer

pytestmark = [pytest.mark.drill, pytest.mark.timeout(150)]
FAR = "far"
# The lease of 8 s counts from a sending, so it is over before; then the warden looks, kills and reaps.
STOPPED_S = 10.0


def start(fleet: DrillFleet, cable: Proxy, *, database: str = "") -> None:
    """Two containers of the control plane's machine, and one behind a cable."""
    fleet.start()
    fleet.join(FAR, port=cable.port, database=database)
    fleet.await_ready("c1", "c2", FAR)
    fleet.run_jobs()
    assert fleet.tasks_on(FAR)


@pytest.mark.slow
def test_cut_off_from_the_control_plane(tmp_path: Path, stopwatch: Stopwatch) -> None:
    """The store is in reach: the lease is renewed there, and nobody is failed over."""
    with DrillFleet(tmp_path, containers=2) as fleet, Proxy(fleet.port) as cable:
        start(fleet, cable)
        before, since = fleet.current(), time.monotonic()
        cable.cut()
        watch_for(20, f"{FAR} reaches the store and nothing else")
        fleet.assert_undisturbed(before, since)
        healed_ms, healed = time.time() * 1000, time.monotonic()
        cable.heal()
        fleet.wait("a beat", lambda: fleet.container(FAR)["seen_ms"] > healed_ms)
        took_s = time.monotonic() - healed
        fleet.assert_well()
        fleet.assert_undisturbed(before, since)
        stopwatch.took(took_s, limit_s=10, note="cut for 20 s, 0 restarts")


def test_cut_off_from_everything(tmp_path: Path, postgres: PostgresServer, stopwatch: Stopwatch) -> None:
    """Neither control plane nor store: it stops by itself, then its shards go elsewhere; it returns as another."""
    near = postgres.new_database()
    with (
        DrillFleet(tmp_path, containers=2, database=near) as fleet,
        Proxy(fleet.port) as cable,
        Proxy(socket_of(near)) as store_cable,
    ):
        start(fleet, cable, database=through(store_cable, near))
        lost, old_life = fleet.tasks_on(FAR), fleet.container(FAR)["incarnation"]
        cut = time.monotonic()
        cable.cut()
        store_cable.cut()
        took_s = await_moved(fleet, lost, cut)
        watch_for(5, f"{FAR} is still cut off")
        cable.heal()
        store_cable.heal()
        fleet.wait("a new life", lambda: fleet.container(FAR)["incarnation"] != old_life)
        fleet.await_ready(FAR)
        fleet.assert_well()
        stopwatch.took(
            took_s, limit_s=20, note=f"it had stopped {stopped_s(fleet, lost, cut):.1f} s after the cut"
        )


def test_answers_are_lost(tmp_path: Path, postgres: PostgresServer, stopwatch: Stopwatch) -> None:
    """Its beats arrive and it cannot know: it stops, tries to come back, and is not waited for for ever."""
    with (
        DrillFleet(tmp_path, containers=2, database=postgres.new_database()) as fleet,
        Proxy(fleet.port) as cable,
    ):
        start(fleet, cable)  # without a way to the store
        lost = fleet.tasks_on(FAR)
        cut = time.monotonic()
        cable.cut(requests=False)
        took_s = await_moved(fleet, lost, cut)
        cable.heal()
        fleet.await_ready(FAR)
        fleet.assert_well()
        stopwatch.took(
            took_s, limit_s=30, note=f"it had stopped {stopped_s(fleet, lost, cut):.1f} s after the cut"
        )


def await_moved(fleet: DrillFleet, lost: list[str], cut: float) -> float:
    took_s = fleet.await_recovery(lost, cut, seconds=60)
    assert all(fleet.current()[task].place != FAR for task in lost)
    assert stopped_s(fleet, lost, cut) < STOPPED_S
    return took_s


def stopped_s(fleet: DrillFleet, lost: list[str], cut: float) -> float:
    """How long after the cut the last of those tasks took effect there."""
    return max(run.last for run in fleet.runs() if run.task in lost and run.first < cut) - cut


def socket_of(url: str) -> Path:
    """The socket file of a PostgreSQL server."""
    return Path(parse_qs(urlsplit(url).query)["host"][0]) / ".s.PGSQL.5432"


def through(cable: Proxy, url: str) -> str:
    """The same database at the other end of a cable."""
    return f"postgresql://postgres@127.0.0.1:{cable.port}{urlsplit(url).path}"
