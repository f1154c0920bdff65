from __future__ import annotations

from dataclasses import fields, replace

import pytest

from .explorer import Found, explore
from .step import RECORDS, Rules, State, StepModel


def without(rule: str, *, with_restore: bool = False) -> Found[State]:
    return explore(StepModel(replace(Rules(), **{rule: False}), with_restore=with_restore))


@pytest.fixture(scope="module")
def found() -> Found[State]:
    return explore(StepModel(Rules()))


def test_every_effect_counts_once_whoever_crashes_or_comes_back(found: Found[State]) -> None:
    """Some order of two lives and their twins loses, doubles or brings back an effect."""
    assert found.problem is None, found.story()
    assert found.states > 40_000
    assert {state.row.offset for state in found.finals} == {RECORDS}
    assert {state.row.assignment for state in found.finals} == {2}
    assert not found.reaches(lambda state: state.alarmed)


def test_the_search_met_zombies_twins_and_new_lives(found: Found[State]) -> None:
    """The search was about nothing: the situations that the rules are for never arose."""
    assert found.reaches(lambda state: state.lives == 3)
    twins = found.reaches(lambda s: s.attempts[0] is not None and s.attempts[0] == s.attempts[1])
    assert twins, "two attempts of one batch with the same snapshot"

    def a_zombie_holds_a_snapshot(state: State) -> bool:
        attempt = state.attempts[0]
        return attempt is not None and attempt.phase == "ran" and attempt.driver.token < state.row.token

    assert found.reaches(a_zombie_holds_a_snapshot)


def test_a_row_store_put_back_to_an_older_copy_is_noticed_and_nothing_is_lost() -> None:
    """A restored row store makes a running life skip or repeat records."""
    found = explore(StepModel(Rules(), with_restore=True))
    assert found.problem is None, found.story()
    assert found.states > 50_000
    assert found.reaches(lambda state: state.alarmed)
    assert {state.row.offset for state in found.finals} == {RECORDS}


def test_without_acquire_counts_token_a_zombie_commits() -> None:
    """If taking an interval issues no new token, its old owner goes on writing."""
    found = without("acquire_counts_token")
    assert found.problem == "zombie: a commit under an older assignment", found.story()
    assert found.shows("A acquires", "B acquires", "of A commits")


def test_without_acquire_compares_assignment_an_older_owner_takes_the_interval_back() -> None:
    """If acquire compares nothing, a container that missed its own removal takes the interval back."""
    found = without("acquire_compares_assignment")
    assert found.problem == "zombie: a commit under an older assignment", found.story()
    assert found.shows("B acquires", "A acquires", "of A commits")


def test_without_token_checked_in_write_a_paused_worker_commits_after_its_successor_acquired() -> None:
    """A token looked at before the write transaction only is out of date inside it."""
    found = without("token_checked_in_write")
    assert found.problem is not None and found.problem.startswith("zombie"), found.story()
    assert found.shows("of A reads", "B acquires", "of A commits")


def test_without_token_must_equal_an_earlier_token_passes() -> None:
    """A token that was issued once is accepted for ever."""
    found = without("token_must_equal")
    assert found.problem is not None and found.problem.startswith("zombie"), found.story()
    assert found.shows("of A reads", "B acquires", "of A commits")


def test_without_row_locked_a_zombie_commits_between_check_and_write() -> None:
    """A check without a lock is passed before the successor's acquire, and the write comes after it."""
    found = without("row_locked")
    assert found.problem is not None and found.problem.startswith("zombie"), found.story()
    assert found.shows("of A checks", "B acquires", "of A writes")


def test_without_version_checked_a_slow_twin_undoes_what_came_after_it() -> None:
    """A second attempt of a batch writes its old snapshot over the batches that were committed since."""
    found = without("version_checked")
    assert found.problem is not None and found.problem.startswith(("lost", "doubled")), found.story()
    assert found.shows("worker 1 of A reads for [0, 1)", "worker 0 of A commits", "worker 1 of A commits")


def test_without_committed_records_skipped_a_late_twin_applies_its_records_again() -> None:
    """An attempt that reads its snapshot after its twin's commit counts the batch a second time."""
    found = without("committed_records_skipped")
    assert found.problem is not None and found.problem.startswith("doubled"), found.story()
    assert found.shows("worker 0 of A commits", "worker 1 of A reads", "worker 1 of A commits")


def test_without_start_above_refused_a_restored_row_loses_records_in_silence() -> None:
    """A range that begins above the committed offset is committed, and the records between are gone."""
    found = without("start_above_refused", with_restore=True)
    assert found.problem is not None and found.problem.startswith("lost"), found.story()
    assert found.shows("copied", "commits", "put back", "commits")


def test_without_position_is_planned_end_a_filtered_tail_stops_the_interval() -> None:
    """A position taken from the last record seen never passes records that the filter drops."""
    found = without("position_is_planned_end")
    assert found.problem == "stuck: at offset 2", found.story()
    assert found.shows("commits", "finds its start above the committed offset")


def test_without_cache_carries_version_an_old_cache_overwrites_newer_state() -> None:
    """A worker that missed a batch adds to its old copy of the state and writes that."""
    found = without("cache_carries_version")
    assert found.problem is not None and found.problem.startswith("lost"), found.story()
    assert found.shows("worker 0 of A commits", "worker 1 of A reads for [1, 2)", "worker 1 of A commits")


def test_without_cache_carries_token_a_restored_row_meets_a_cache_of_its_lost_history() -> None:
    """After a restore versions are counted again, and a cache of the same number is from another history."""
    found = without("cache_carries_token", with_restore=True)
    assert found.problem is not None and found.problem.startswith("doubled"), found.story()
    assert found.shows("copied", "put back", "A acquires", "commits")


def test_every_rule_is_taken_away_by_a_test() -> None:
    """A rule that no test takes away may not be needed at all."""
    for rule in fields(Rules):
        assert any(name.startswith(f"test_without_{rule.name}_") for name in globals()), rule.name
