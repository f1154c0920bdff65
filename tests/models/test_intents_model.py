from __future__ import annotations

from dataclasses import fields, replace

import pytest

from .explorer import Found, explore
from .intents import IntentsModel, Rules, State


def without(rule: str) -> Found[State]:
    return explore(IntentsModel(replace(Rules(), **{rule: False})))


@pytest.fixture(scope="module")
def found() -> Found[State]:
    return explore(IntentsModel(Rules()))


def test_every_record_is_published_once_by_one_package(found: Found[State]) -> None:
    """Some order of three lives around a release loses, doubles or mixes records."""
    assert found.problem is None, found.story()
    assert found.states > 5_000


def test_the_search_met_half_published_ranges_and_both_packages(found: Found[State]) -> None:
    """The search was about nothing: no successor ever had something to repeat."""
    assert found.reaches(lambda s: s.lives[1].replaying is not None and any(s.logs) and s.token == 2)
    assert found.reaches(lambda s: s.lives[2].replaying is not None and s.lives[2].replaying.package == 1)
    packages = {frozenset(row.package for log in state.logs for row in log) for state in found.finals}
    assert packages == {frozenset({1}), frozenset({2}), frozenset({1, 2})}


def test_without_intent_first_two_packages_write_the_same_record() -> None:
    """The successor does not know what was begun, and writes the range with the new package."""
    found = without("intent_first")
    assert found.problem is not None and found.problem.startswith("mixed"), found.story()
    assert found.shows("life 1 publishes", "life 2 means to publish", "life 2 publishes")


def test_without_intent_checks_token_an_earlier_life_begins_a_range_behind_its_successor() -> None:
    """A life that lost the interval still begins a range, which its successor has not read."""
    found = without("intent_checks_token")
    assert found.problem is not None and found.problem.startswith(("mixed", "doubled")), found.story()
    assert found.shows("life 2 takes the row", "life 1 means to publish", "life 1 publishes")


def test_without_publish_before_commit_a_fenced_range_is_lost() -> None:
    """Offsets committed for records that are never sent."""
    found = without("publish_before_commit")
    assert found.problem is not None and found.problem.startswith("lost"), found.story()
    assert found.shows("commits", "takes the row", "fences the bus")


def test_without_replay_same_range_the_rest_of_a_begun_range_meets_the_new_package() -> None:
    """The successor repeats a part with the old package; the rest is there already and is written anew."""
    found = without("replay_same_range")
    assert found.problem is not None and found.problem.startswith("mixed"), found.story()
    assert found.shows("[0, 2) with package 1", "[0, 1) with package 1", "[1, 2) with package 2")


def test_without_replay_same_package_a_begun_range_is_finished_by_other_code() -> None:
    """A record is written partly by the old and partly by the new package."""
    found = without("replay_same_package")
    assert found.problem is not None and found.problem.startswith("mixed"), found.story()
    assert found.shows(
        "[0, 1) with package 1", "life 1 publishes", "[0, 1) with package 2", "life 2 publishes"
    )


def test_without_package_kept_the_successor_cannot_finish_what_was_begun() -> None:
    """The code that an intent names is gone, and the interval stands still."""
    found = without("package_kept")
    assert found.problem is not None and found.problem.startswith("stuck"), found.story()
    assert found.shows("with package 1", "cleaned away")


def test_without_sequence_from_offset_a_repeated_range_is_appended_again() -> None:
    """A counter that goes on from the bus makes new records of the repeated ones."""
    found = without("sequence_from_offset")
    assert found.problem is not None and found.problem.startswith("doubled"), found.story()
    assert found.shows("life 1 publishes", "life 2 publishes")


def test_every_rule_is_taken_away_by_a_test() -> None:
    """A rule that no test takes away may not be needed at all."""
    for rule in fields(Rules):
        assert any(name.startswith(f"test_without_{rule.name}_") for name in globals()), rule.name
