"""Claims about how tests wait: however short a turn is, and however few of them a busy machine makes."""

from __future__ import annotations

import threading

import pytest

from tests.waiting import join, until


def test_it_gives_what_the_condition_said():
    assert until(lambda: [7]) == [7]


def test_any_number_of_turns_is_made():
    turns: list[int] = []
    until(lambda: len(turns) == 100_000, step=lambda: turns.append(1))


def test_it_gives_up_and_says_what_it_waited_for():
    with pytest.raises(AssertionError, match="not within 0 s: the end of it"):
        until(lambda: False, lambda: "the end of it", seconds=0)


def test_a_thread_that_ends_is_waited_for():
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait)
    thread.start()
    may_end.set()
    join(thread)
    assert not thread.is_alive()
