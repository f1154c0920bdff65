"""Several control planes on one PostgreSQL database: one is active, all answer, a silent one is followed by another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.app import ControlPlane
from penstock.core.errors import EnvironmentProblem, StoreUnavailable
from penstock.core.system_clock import SystemClock
from penstock.settings import Settings
from tests.builders import ADMIN, a_body
from tests.waiting import until

LEASE_MS = 600_000  # passes only when a test lets it, however slow the machine is


class Clock(SystemClock):
    """The time of both, which a test may move."""

    later_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.later_ms


@pytest.fixture
def pair(postgres, tmp_path: Path) -> Iterator[tuple[ControlPlane, ControlPlane]]:
    settings = Settings(
        folder=tmp_path, database=postgres.new_database(), sync_ms=100, shard_ms=100, lease_ms=LEASE_MS
    )
    one, other = ControlPlane(settings), ControlPlane(settings)
    one.clock = other.clock = Clock()
    yield one, other
    for plane in (one, other):
        plane.stop()


def create(plane: ControlPlane, job: str, **changes: object) -> None:
    plane.jobs.create(
        job, a_body(job, state="stopped", **changes), birth=f"birth-{job}", actor=ADMIN, reason="test",
        idempotency_key=None, now_ms=plane.clock.now_ms(),
    )  # fmt: skip


def test_one_is_active_and_both_answer(pair):
    one, other = pair
    assert (one.is_active, other.is_active) == (True, False)
    create(other, "demo.a")
    assert one.jobs.view("demo.a").name == "demo.a"
    with pytest.raises(StoreUnavailable, match="standby"):
        other.register_container("c1", "life", folder_id="f")
    one.register_container("c1", "life", folder_id="f")
    assert [row.name for row in other.fleet.containers()] == ["c1"]


def test_the_standby_takes_over_when_the_active_one_stops_in_order(pair):
    one, other = pair
    for plane in pair:
        plane.start()
    one.stop()
    until(lambda: other.is_active)
    other.register_container("c1", "life", folder_id="f")


def test_the_standby_takes_over_from_one_that_fell_silent_and_that_one_is_fenced(pair):
    """Plan: the active one's loops never ran, as if it were paused; the other's find its lease over."""
    one, other = pair
    one.clock.later_ms = LEASE_MS
    other.start()
    until(lambda: other.is_active)
    with pytest.raises(Exception, match="no longer the active instance"):
        one.register_container("c1", "life", folder_id="f")
    one.start()
    until(lambda: not one.is_active)
    for _ in range(3 * 3):  # three leases, in steps after each of which both looked
        one.clock.later_ms += LEASE_MS // 3
        looks = [plane._loops[0].rounds for plane in pair]
        until(lambda looks=looks: all(p._loops[0].rounds > n + 1 for p, n in zip(pair, looks, strict=True)))
    assert other.is_active and not one.is_active  # and it stays so


def test_what_is_written_at_one_is_synced_by_the_other(pair):
    _, other = pair
    for plane in pair:
        plane.start()
    create(other, "demo.b")
    until(lambda: other.jobs.view("demo.b").is_in_sync)


def test_a_control_plane_with_its_data_elsewhere_is_refused(pair, tmp_path: Path):
    one, _ = pair
    elsewhere = Settings(folder=tmp_path / "elsewhere", database=one.settings.database)
    with pytest.raises(EnvironmentProblem) as caught:
        ControlPlane(elsewhere)
    assert "belongs to another installation" in caught.value.what and str(tmp_path) in caught.value.why
