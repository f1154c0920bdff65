"""The loop runs rounds until it is stopped, whatever a round does."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest
import structlog

from penstock.core.errors import StoreUnavailable
from penstock.core.loop import Loop
from penstock.core.system_clock import SystemClock, sleep_ms
from tests.waiting import LIMIT_S, until


class Rounds:
    """A round that counts itself, fails when told to, and stops its loop at the end."""

    def __init__(self, *, last: int, failing: frozenset[int] = frozenset()) -> None:
        self.count, self.last, self.failing = 0, last, failing
        self.reached = threading.Event()
        self.loop: Loop | None = None

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.last:
            assert self.loop is not None
            self.loop.stop()
            self.reached.set()
        if self.count in self.failing:
            raise RuntimeError(f"round {self.count} broke")


def a_loop(rounds: Rounds, *, every_ms: int = 1) -> Loop:
    rounds.loop = Loop(name="test", round_=rounds, every_ms=every_ms)
    return rounds.loop


def test_rounds_repeat_until_stopped():
    rounds = Rounds(last=3)
    loop = a_loop(rounds)
    loop.run()
    assert (rounds.count, loop.rounds, loop.failures) == (3, 3, 0)


def test_a_round_that_raises_is_counted_logged_and_repeated():
    rounds = Rounds(last=5, failing=frozenset({2, 3}))
    loop = a_loop(rounds)
    with structlog.testing.capture_logs() as logs:
        loop.run()
    assert (rounds.count, loop.rounds, loop.failures) == (5, 3, 2)
    assert loop.last_error == "RuntimeError: round 3 broke"
    assert [(entry["log_level"], entry["streak"], "trace" in entry) for entry in logs] == [
        ("error", 1, True),
        ("error", 2, False),  # the trace is told once per streak
    ]
    assert "test_loop.py" in logs[0]["trace"] and "round 2 broke" in logs[0]["trace"]


def test_trouble_that_has_a_name_is_told_in_a_line_and_no_variable_is():
    def round_() -> None:
        password = "hunter2"
        loop._stop.set()
        raise StoreUnavailable("the database did not answer", why=f"{len(password)} tries", fix="try again")

    loop = Loop(name="test", round_=round_, every_ms=1)
    with structlog.testing.capture_logs() as logs:
        loop.run()
    (entry,) = logs
    assert "the database did not answer" in entry["error"]
    assert not {"trace", "exc_info"} & set(entry) and "hunter2" not in str(entry)


def test_a_poke_runs_the_next_round_at_once():
    rounds = Rounds(last=2)
    loop = a_loop(rounds, every_ms=3_600_000).start()
    loop.poke()
    assert rounds.reached.wait(LIMIT_S)
    loop.stop()


def test_stop_ends_a_waiting_loop_and_its_thread():
    began = threading.Event()
    loop = Loop(name="test-stop", round_=began.set, every_ms=3_600_000).start()
    assert began.wait(LIMIT_S)
    loop.stop(timeout_ms=int(LIMIT_S * 1000))
    assert not [thread for thread in threading.enumerate() if thread.name == "test-stop"]
    assert loop.rounds == 1


def test_stopping_from_inside_a_round_does_not_wait_for_itself():
    rounds = Rounds(last=1)
    loop = a_loop(rounds).start()
    assert rounds.reached.wait(LIMIT_S)
    loop.stop()
    assert loop.rounds == 1


@pytest.mark.parametrize("read", [SystemClock().now_ms, SystemClock().boot_ms])
def test_the_clocks_count_milliseconds_forward(read):
    before = read()
    sleep_ms(20)
    assert 20 <= read() - before < LIMIT_S * 1000


def test_the_wall_clock_tells_the_unix_time_in_milliseconds():
    assert 1_700_000_000_000 < SystemClock().now_ms() < 10_000_000_000_000


def test_a_round_that_takes_long_leaves_room_for_others():
    """Plan: rounds of 40 ms that may take a fifth of the time, poked all the while, begin 200 ms apart."""
    began: list[float] = []

    def round_() -> None:
        began.append(time.monotonic())
        time.sleep(0.04)

    loop = Loop("slow", round_, every_ms=1, share_max=0.2).start()
    until(lambda: len(began) >= 4, step=loop.poke)
    loop.stop()
    assert min(later - earlier for earlier, later in pairwise(began)) >= 0.19
