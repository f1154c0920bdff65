from __future__ import annotations

from dataclasses import fields, replace

import pytest

from .explorer import Found, explore
from .marks import END, MarksModel, Rules, State


def without(rule: str) -> Found[State]:
    return explore(MarksModel(replace(Rules(), **{rule: False})))


@pytest.fixture(scope="module")
def found() -> Found[State]:
    return explore(MarksModel(Rules()))


def test_no_record_on_time_comes_behind_a_mark_that_excludes_it(found: Found[State]) -> None:
    """Some order of steps, publishes, reports and marks makes a record late, or a watermark go back."""
    assert found.problem is None, found.story()
    assert found.states > 90_000


def test_the_search_met_many_marks_and_racing_writers(found: Found[State]) -> None:
    """The search was about nothing: no mark was ever written while records were on their way."""
    assert {state.marks[-1][0] for state in found.finals} == {END}
    assert max(len(state.marks) for state in found.finals) == 4, "3, 5, 8 and the end"
    assert {state.log for state in found.finals} == {(5, 8, 3), (5, 3, 8), (3, 5, 8)}
    both_write = found.reaches(
        lambda s: all(one.low is not None and one.end is not None for one in s.writers)
    )
    assert both_write, "two writers with a mark in hand"


def test_without_low_counts_undelivered_a_stored_production_comes_late() -> None:
    """The low passes a production that is in the outbox but not on the bus."""
    found = without("low_counts_undelivered")
    assert found.problem is not None and found.problem.startswith("late: [5]"), found.story()
    assert found.shows("0 commits", "0 reports 8", "reads W 8", "reads E 0", "5 is on the bus")


def test_without_low_counts_holds_a_timers_production_comes_late() -> None:
    """The low passes the time that a pending timer will stamp its production with."""
    found = without("low_counts_holds")
    assert found.problem is not None and found.problem.startswith("late: [8]"), found.story()
    assert found.shows("0 reports 10", "reads W 10", "8 is on the bus")


def test_without_report_after_commit_a_repeated_step_comes_late() -> None:
    """A low reported for a step that is then repeated with another outcome cannot be taken back."""
    found = without("report_after_commit")
    assert found.problem is not None and found.problem.startswith("late"), found.story()
    assert found.shows("reports before its commit", "reads W")


def test_without_delivered_after_answer_a_record_on_its_way_comes_late() -> None:
    """A production that counts as delivered when it is sent arrives behind the mark."""
    found = without("delivered_after_answer")
    assert found.problem is not None and found.problem.startswith("late: [3]"), found.story()
    assert found.shows("1 sends 3", "1 reports 20", "3 is on the bus")


def test_without_report_raises_only_a_late_report_pulls_the_watermark_back() -> None:
    """Two reports in the wrong order leave the older one standing."""
    found = without("report_raises_only")
    assert found.problem == "went back: low of producer 0 from 8 to 5", found.story()
    assert found.shows("hears 8 from 0", "hears 5 from 0")


def test_without_registered_count_a_producer_nobody_heard_of_comes_late() -> None:
    """The minimum is taken over those who reported, and the slow starter is not among them."""
    found = without("registered_count")
    assert found.problem is not None and found.problem.startswith("late: [3]"), found.story()
    assert not found.shows("from 1")


def test_without_low_read_before_end_a_record_slips_between_the_two_reads() -> None:
    """The end is read, a record is published and delivered, and then the low is read that counts on it."""
    found = without("low_read_before_end")
    assert found.problem is not None and found.problem.startswith("late"), found.story()
    assert found.shows("reads E 0", "is on the bus", "delivered", "reads W", "appends")


def test_without_mark_compared_and_set_a_slow_writer_appends_an_older_mark() -> None:
    """A mark read long ago lands behind a newer one, and the category's watermark goes back."""
    found = without("mark_compared_and_set")
    assert found.problem is not None and found.problem.startswith("went back"), found.story()
    assert found.shows("writer 0 reads W", "writer 1 appends", "writer 0 appends")


def test_every_rule_is_taken_away_by_a_test() -> None:
    """A rule that no test takes away may not be needed at all."""
    for rule in fields(Rules):
        assert any(name.startswith(f"test_without_{rule.name}_") for name in globals()), rule.name
