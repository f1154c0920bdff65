from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import pytest

from .cuts import CutsModel, Marked, Rules, State, event_time_script
from .explorer import Found, explore


def without(rule: str) -> Found[State]:
    return explore(CutsModel(replace(Rules(), **{rule: False})))


@pytest.fixture(scope="module")
def found() -> Found[State]:
    return explore(CutsModel(Rules()))


def test_the_result_is_a_function_of_the_log_and_its_marks(found: Found[State]) -> None:
    """Some way to cut some log into batches gives another result than another way."""
    assert found.problem is None, found.story()
    assert found.states > 5_000
    results: dict[tuple[object, ...], set[tuple[str, ...]]] = {}
    for state in found.finals:
        results.setdefault(state.script, set()).add(state.consumer.said)
    assert len(results) > 200
    assert all(len(said) == 1 for said in results.values())


def test_the_search_met_late_records_and_several_marks_in_one_batch(found: Found[State]) -> None:
    """The search was about nothing: no log had anything to be cut at."""
    assert found.reaches(lambda state: "late 1" in state.consumer.said)
    assert found.reaches(lambda state: "2 at 5" in state.consumer.said and "3 at 10" in state.consumer.said)
    two_marks_waiting = found.reaches(
        lambda s: s.consumer.position == 0 and sum(isinstance(e, Marked) for e in s.script[: s.appended]) == 2
    )
    assert two_marks_waiting


def test_event_time_watermarks_by_record_do_not_depend_on_batches() -> None:
    """A low that follows the records' own times gives other results in other batches."""
    scripts = tuple(event_time_script(times, 3) for times in product((1, 6, 11), repeat=4))
    assert explore(CutsModel(Rules(), scripts)).problem is None
    by_batch = explore(CutsModel(replace(Rules(), cut_at_marks=False), scripts))
    assert by_batch.problem is not None and by_batch.problem.startswith("depends on batches")


def test_without_cut_at_marks_records_and_timers_change_places() -> None:
    """With the records of a batch first and its timers then, the result depends on where the batch ended."""
    found = without("cut_at_marks")
    assert found.problem is not None and found.problem.startswith("depends on batches"), found.story()
    assert found.shows("append Marked(low=5", "append Record", "batch [0, 4)")


def test_without_cut_at_every_mark_the_timers_of_an_earlier_mark_fire_late() -> None:
    """Two marks in a batch are taken as one, and records between them come before the first one's timers."""
    found = without("cut_at_every_mark")
    assert found.problem is not None and found.problem.startswith("depends on batches"), found.story()
    assert found.shows("append Marked(low=5", "append Record", "append Marked(low=10", "batch [0, 3)")


def test_without_end_is_current_a_consumer_is_past_the_mark_before_it_appears() -> None:
    """A mark whose end was read before further records were appended comes too late for a quick consumer."""
    found = without("end_is_current")
    assert found.problem is not None and found.problem.startswith("depends on batches"), found.story()
    assert found.shows("append Record", "append Marked(low=5, missed=1)")


def test_every_rule_is_taken_away_by_a_test() -> None:
    """A rule that no test takes away may not be needed at all."""
    for rule in fields(Rules):
        assert any(name.startswith(f"test_without_{rule.name}_") for name in globals()), rule.name
