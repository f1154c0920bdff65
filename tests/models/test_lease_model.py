from __future__ import annotations

from dataclasses import fields, replace

import pytest

from .explorer import Found, explore
from .lease import LeaseModel, Rules, State, is_good


def without(rule: str, *, overlap_alone: bool = True) -> Found[State]:
    return explore(LeaseModel(replace(Rules(), **{rule: False}), overlap_alone=overlap_alone), goal=is_good)


@pytest.fixture(scope="module")
def found() -> Found[State]:
    return explore(LeaseModel(Rules()), goal=is_good)


def test_a_container_has_stopped_before_its_shards_are_given_away(found: Found[State]) -> None:
    """Some timing of beats, answers and renewals leaves two containers running a shard, or none for ever."""
    assert found.problem is None, found.story()
    assert found.states > 8_000


def test_the_search_met_failovers_of_the_dead_the_silent_and_the_renewed(found: Found[State]) -> None:
    """The search was about nothing: nobody was ever failed over."""
    assert found.reaches(lambda state: state.moved and state.dead)
    assert found.reaches(lambda state: state.moved and not state.dead)
    assert found.reaches(lambda state: state.deposed is not None and state.moved)
    renewing = found.reaches(lambda s: s.runs and s.manager.heard_age == 3 and s.lease_left == 2)
    assert renewing, "not heard for a full interval, alive by its renewals"


def test_without_counted_from_sending_a_late_answer_outlives_the_failover() -> None:
    """An answer that took its time extends the lease past what the manager waits."""
    found = without("counted_from_sending")
    assert found.problem == "two at once", found.story()
    assert found.shows("a tick", "an answer arrives", "a tick", "fails the container over")


def test_without_container_stops_at_deadline_it_runs_into_its_failover() -> None:
    """A container that nobody answers must stop by itself."""
    found = without("container_stops_at_deadline")
    assert found.problem == "two at once", found.story()


def test_without_renewals_compared_a_container_that_renews_in_the_row_is_taken_for_dead() -> None:
    """The manager does not hear it, the store does."""
    found = without("renewals_compared")
    assert found.problem == "two at once", found.story()
    assert found.shows("renews in the row", "fails the container over")


def test_without_failover_one_transaction_a_renewal_comes_between_decision_and_act() -> None:
    """A container that was silent comes back just before its shards are given away."""
    found = without("failover_one_transaction")
    assert found.problem == "two at once", found.story()
    assert found.shows("the manager decides", "renews in the row", "fails the container over")


def test_without_failover_checks_term_a_deposed_manager_gives_shards_away() -> None:
    """A manager that lost its office without knowing hears nobody, and fails everybody over."""
    found = without("failover_checks_term")
    assert found.problem == "two at once", found.story()
    assert found.shows("a new manager takes over", "the deposed manager fails the container over")


def test_without_answers_inside_term_a_deposed_manager_keeps_a_container_alive() -> None:
    """Beats go to the old manager, which answers; the new one hears nothing and fails the container over."""
    found = without("answers_inside_term")
    assert found.problem == "two at once", found.story()
    assert found.shows(
        "the deposed manager answers", "an answer arrives", "the manager fails the container over"
    )


def test_without_manager_waits_full_interval_a_new_manager_fails_over_the_living() -> None:
    """A manager that has just started has heard nobody yet."""
    found = without("manager_waits_full_interval")
    assert found.problem == "two at once", found.story()
    assert found.trace == ("fault: a new manager takes over", "the manager fails the container over")


def test_without_queue_drained_first_a_paused_manager_fails_over_who_beats() -> None:
    """After a pause of the manager the beats lie in its queue, and it looks at the clock first."""
    found = without("queue_drained_first", overlap_alone=False)
    assert found.problem == "failed over although its beats arrived", found.story()
    assert found.shows("reaches the manager's queue", "a tick", "fails the container over")


def test_every_rule_is_taken_away_by_a_test() -> None:
    """A rule that no test takes away may not be needed at all."""
    for rule in fields(Rules):
        assert any(name.startswith(f"test_without_{rule.name}_") for name in globals()), rule.name
