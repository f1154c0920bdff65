"""Retention by the time that has passed: whatever the wall clock says, nothing goes early or stays for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.streams.bus.care import BusCare
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.bus.idle import NOTES, Reading, count_on, is_note_due
from penstock.streams.bus.log import CategorySpec, Log
from penstock.streams.bus.memory import MemoryLog
from tests.contracts.buses import SPEC, records

HOUR_MS, YEAR_MS = 3_600_000, 365 * 86_400_000
BRIEF = CategorySpec(name="brief", partitions=2, columns=SPEC.columns, retention_ms=HOUR_MS)
NOW = 1_790_000_000_000


class Machine:
    """A bus under the control plane's rounds, on a machine whose clocks the test moves."""

    def __init__(self, open_log: Callable[[Machine], Log]) -> None:
        self.wall_ms, self.boot_ms, self.boot_id = NOW, 5 * HOUR_MS, "first"
        self._open, self._seq = open_log, 0
        self.start()
        self.log.create(BRIEF)

    def start(self) -> None:
        """The control plane starts."""
        self.log = self._open(self)
        self.care = BusCare(self.log, clean_ms=60_000, clean_after_ms=600_000)

    def publish(self) -> None:
        self._seq += 1
        self.log.publish("brief", producer="a", epoch=1, batches={0: records(self._seq)}, gapless=True)

    def run(self, minutes: int) -> None:
        """Time passes, a round each minute."""
        for _ in range(minutes):
            self.wall_ms += 60_000
            self.boot_ms += 60_000
            self.care.tick(now_ms=self.wall_ms, boot_ms=self.boot_ms)
            assert not self.care.failing

    @property
    def first(self) -> int:
        """The first offset that is still there."""
        return self.log.start_offsets("brief")[0]


@pytest.fixture(params=["memory", "embedded"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    if request.param == "memory":
        kept: list[MemoryLog] = []

        def open_log(machine: Machine) -> Log:
            kept[:] = kept or [MemoryLog(now_ms=lambda: machine.wall_ms)]
            return kept[0]

        return Machine(open_log)
    return Machine(
        lambda machine: EmbeddedLog(tmp_path, now_ms=lambda: machine.wall_ms, boot_id=machine.boot_id)
    )


def test_a_record_goes_when_its_retention_has_passed_and_not_before(machine: Machine):
    machine.publish()
    machine.run(30)
    machine.publish()
    machine.run(30)
    assert machine.first == 0
    machine.run(2)
    assert machine.first == 1, "the first one is an hour old"
    machine.run(28)
    assert machine.first == 1
    machine.run(2)
    assert machine.first == 2 == machine.log.end_offsets("brief")[0]


@pytest.mark.parametrize("by", [YEAR_MS, -YEAR_MS, -NOW])
def test_a_wall_clock_that_is_set_to_another_year_deletes_nothing_and_holds_nothing_up(
    machine: Machine, by: int
):
    """Plan: a record, the clock is set, a record, the clock is set right again, a record: each stays an hour."""
    machine.publish()
    machine.run(20)
    machine.wall_ms += by
    machine.publish()
    machine.run(20)
    assert machine.first == 0
    machine.wall_ms -= by
    machine.publish()
    machine.run(20)
    assert machine.first == 0
    for gone in (1, 2, 3):
        machine.run(2)
        assert machine.first == gone
        machine.run(18)


def test_a_control_plane_that_starts_under_a_wrong_clock_deletes_nothing(machine: Machine):
    """Nothing was noted of these records: they are as old as somebody has seen them."""
    machine.publish()
    machine.wall_ms += YEAR_MS
    machine.start()
    machine.run(60)
    assert machine.first == 0
    machine.run(2)
    assert machine.first == 1


def test_time_is_counted_on_over_restarts_of_the_control_plane_and_of_the_machine(tmp_path: Path):
    machine = Machine(
        lambda machine: EmbeddedLog(tmp_path, now_ms=lambda: machine.wall_ms, boot_id=machine.boot_id)
    )
    machine.publish()
    machine.run(20)
    machine.start()  # its process, on the same machine, ten minutes later
    machine.boot_ms += 600_000
    machine.run(10)
    assert machine.first == 0
    # The machine was off for a week, and its clock is not set yet when it starts.
    machine.boot_ms, machine.boot_id, machine.wall_ms = 0, "second", 0
    machine.start()
    machine.run(19)
    assert machine.first == 0
    machine.run(3)
    assert machine.first == 1


def test_notes_do_not_pile_up(machine: Machine, tmp_path: Path):
    for _ in range(300):
        machine.publish()
        machine.run(1)
    assert machine.first > 200
    if isinstance(machine.log, EmbeddedLog):
        with machine.log._of("brief")[0].reading() as connection:
            (count,) = connection.execute("SELECT count(*) FROM noted_ends").fetchone()
    else:
        assert isinstance(machine.log, MemoryLog)
        count = len(machine.log._stored["brief"].noted_ends)
    assert count <= NOTES + 3


def test_an_index_of_before_is_read_and_its_records_go_after_their_retention(tmp_path: Path):
    """It has no notes, and times of appending from whatever clock: nothing goes in the first round."""
    machine = Machine(
        lambda machine: EmbeddedLog(tmp_path, now_ms=lambda: machine.wall_ms, boot_id=machine.boot_id)
    )
    machine.wall_ms -= 2 * YEAR_MS
    machine.publish()
    machine.wall_ms += 2 * YEAR_MS
    assert isinstance(machine.log, EmbeddedLog)
    with machine.log._of("brief")[0].reading() as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert not names & {"readings", "noted_ends"}, "as the version before made it"
    machine.run(60)
    assert machine.first == 0
    machine.run(2)
    assert machine.first == 1


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["round", "late round", "reboot"]),
            st.integers(0, 10_000),
            st.integers(0, 10_000),
        ),
        max_size=30,
    ),
    knows_boots=st.booleans(),
)
def test_never_more_is_counted_than_has_passed(steps: list[tuple[str, int, int]], knows_boots: bool):
    """Plan: rounds, rounds of somebody who read the clock long before, and starts of the machine after some time
    off.
    """
    boot, boot_ms, passed, last = 0, 5_000, 0, None
    first_ms: int | None = None  # when the clock was read first
    for kind, took, other in steps:
        if kind == "reboot":
            boot, boot_ms = boot + 1, took
            passed += other + took
        else:
            boot_ms += took
            passed += took
        if kind == "late round" and not knows_boots:
            continue  # only the id of a start tells an older reading from one of a new start
        read_ms = max(0, boot_ms - other) if kind == "late round" else boot_ms
        now = count_on(last, boot_id=f"b{boot}" if knows_boots else "", boot_ms=read_ms)
        first_ms = passed - (boot_ms - read_ms) if first_ms is None else first_ms
        assert now.counted_ms <= passed - first_ms
        assert last is None or now.counted_ms >= last.counted_ms
        last = now


def test_a_new_start_of_the_machine_is_noted_at_once():
    last = Reading(boot_id="a", boot_ms=1_000_000, counted_ms=50)
    again = count_on(last, boot_id="b", boot_ms=10)
    assert again == Reading(boot_id="b", boot_ms=10, counted_ms=60)
    assert is_note_due(last, again, retention_ms=10**9)
    assert not is_note_due(again, count_on(again, boot_id="b", boot_ms=20), retention_ms=10**9)
