from __future__ import annotations

from dataclasses import fields, replace

import pytest

from .explorer import Found, explore
from .plans import NEW, OLD_AGAIN, PlansModel, Rules, State, is_good


def without(rule: str) -> Found[State]:
    return explore(PlansModel(replace(Rules(), **{rule: False})), goal=is_good)


@pytest.fixture(scope="module")
def found() -> Found[State]:
    return explore(PlansModel(Rules()), goal=is_good)


def test_old_and_new_tasks_never_meet_and_the_job_runs_in_the_end(found: Found[State]) -> None:
    """Some order of lists, acknowledgements and leaders runs two mappings at once, or leaves the job down."""
    assert found.problem is None, found.story()
    assert found.states > 300
    assert found.reaches(lambda state: is_good(state) and state.generation == NEW)
    assert found.reaches(lambda state: is_good(state) and state.generation == OLD_AGAIN)
    assert found.reaches(lambda state: state.stale_commit and state.step == "done")


def test_without_hold_is_level_a_stop_message_is_undone_by_the_next_refresh() -> None:
    """The list still names the tasks, so the container starts them again behind the confirmation."""
    found = without("hold_is_level")
    assert found.problem == "two mappings at once: [1, 2]", found.story()
    assert found.shows("0 gets the stop message", "0 starts generation 1", "commits generation 2")


def test_without_newer_lists_only_a_late_list_brings_the_old_tasks_back() -> None:
    """A container that acknowledged the hold follows an older answer."""
    found = without("newer_lists_only")
    assert found.problem == "two mappings at once: [1, 2]", found.story()
    assert found.shows("0 acknowledges list 1", "0 gets list 0", "0 starts generation 1")


def test_without_acked_when_reaped_old_tasks_are_still_dying_when_new_ones_start() -> None:
    """A list acknowledged on receipt says nothing about the tasks."""
    found = without("acked_when_reaped")
    assert found.problem == "two mappings at once: [1, 2]", found.story()
    assert found.shows("acknowledges list 1", "commits generation 2", "starts generation 2")


def test_without_all_confirm_the_container_that_was_not_asked_runs_on() -> None:
    """One acknowledgement is taken for all."""
    found = without("all_confirm")
    assert found.problem == "two mappings at once: [1, 2]", found.story()


def test_without_commit_lifts_hold_the_old_tasks_come_back_between() -> None:
    """A hold lifted before the commit serves the old list once more."""
    found = without("commit_lifts_hold")
    assert found.problem == "two mappings at once: [1, 2]", found.story()
    assert found.shows("the hold is lifted", "the plan commits generation 2", "starts generation 1")


def test_without_plan_is_row_a_new_leader_leaves_the_job_held() -> None:
    """The hold is durable, its reason is not, and nobody lifts it."""
    found = without("plan_is_row")
    assert found.problem == "stuck: the goal is out of reach", found.story()
    assert found.shows("holds the job", "fault: the leader is replaced")


def test_without_given_up_recommits_a_failed_plan_leaves_the_job_down() -> None:
    """A plan given up behind its hold leaves nobody running."""
    found = without("given_up_recommits")
    assert found.problem == "stuck: the goal is out of reach", found.story()
    assert found.shows("holds the job", "given up")


def test_without_commit_compares_a_deposed_leader_commits_what_was_given_up() -> None:
    """A leader that was paused at its last step commits the target over its successor's decision."""
    found = without("commit_compares")
    assert found.problem == "two mappings at once: [2, 3]", found.story()
    assert found.shows("given up", "the deposed leader commits", "starts generation 3", "starts generation 2")


def test_every_rule_is_taken_away_by_a_test() -> None:
    """A rule that no test takes away may not be needed at all."""
    for rule in fields(Rules):
        assert any(name.startswith(f"test_without_{rule.name}_") for name in globals()), rule.name
