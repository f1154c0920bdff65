from __future__ import annotations

from dataclasses import fields, replace

import pytest

from .explorer import Found, explore
from .movement import MovementModel, Rules, State, is_good


def without(rule: str) -> Found[State]:
    return explore(MovementModel(replace(Rules(), **{rule: False})), goal=is_good)


@pytest.fixture(scope="module")
def found() -> Found[State]:
    return explore(MovementModel(Rules()), goal=is_good)


def test_one_container_runs_the_shard_and_it_is_never_lost(found: Found[State]) -> None:
    """Some order of late, lost and doubled messages gives the shard two owners, or none for ever."""
    assert found.problem is None, found.story()
    assert found.states > 6_000


def test_the_search_met_moves_failovers_and_returns(found: Found[State]) -> None:
    """The search was about nothing: the shard never went there and back."""
    owners = {tuple(record.owner for record in state.history if not record.dropping) for state in found.seen}
    assert {(0, 1, 0, 1), (0, 1, 0), (0, 0)} <= owners
    assert found.reaches(lambda s: s.containers[0].incarnation == 1 and s.containers[0].runs)
    assert found.reaches(lambda s: s.containers[0].runs and not s.containers[0].wanted), (
        "a DROP not yet reaped"
    )


def test_epochs_only_grow(found: Found[State]) -> None:
    """Two changes of the record share an epoch, or it goes back."""
    for state in found.seen:
        epochs = [record.epoch for record in state.history]
        assert epochs == sorted(set(epochs))


def test_without_record_before_message_a_restarted_manager_does_not_know_whom_it_told() -> None:
    """A message sent before the record changed is obeyed, and the record never hears of it."""
    found = without("record_before_message")
    assert found.problem in ("two at once", "stuck: the goal is out of reach"), found.story()
    assert found.shows("gets ADD", "fault: the manager restarts")


def test_without_every_change_new_epoch_a_late_set_of_the_same_epoch_undoes_a_drop() -> None:
    """`owned` and `dropping` under one epoch cannot be told apart by age."""
    found = without("every_change_new_epoch")
    assert found.problem == "two at once", found.story()
    assert found.shows("0 gets DROP 1", "0 acknowledges DROP 1", "0 gets the full set of 1", "0 starts")


def test_without_larger_epochs_only_a_late_add_undoes_a_drop() -> None:
    """An ADD that arrives a second time starts the tasks of a shard that was given away."""
    found = without("larger_epochs_only")
    assert found.problem == "two at once", found.story()
    assert found.shows("0 acknowledges DROP 2", "0 gets ADD 1", "0 starts")


def test_without_older_sets_ignored_a_late_reply_undoes_a_drop() -> None:
    """A heartbeat reply made before the DROP arrives after it, and brings the shard back."""
    found = without("older_sets_ignored")
    assert found.problem == "two at once", found.story()
    assert found.shows("0 acknowledges DROP 2", "0 gets the full set of 1", "0 starts")


def test_without_add_waits_for_drop_the_new_owner_starts_beside_the_old_one() -> None:
    """The shard is given away while its owner has not even heard of it."""
    found = without("add_waits_for_drop")
    assert found.problem == "two at once", found.story()
    assert not found.shows("acknowledges")


def test_without_drop_acked_when_reaped_the_new_owner_starts_beside_dying_tasks() -> None:
    """A DROP acknowledged on receipt says nothing about the tasks."""
    found = without("drop_acked_when_reaped")
    assert found.problem == "two at once", found.story()
    assert found.shows("0 starts", "0 acknowledges DROP 2", "1 starts")
    assert not found.shows("reaped")


def test_without_unknown_drop_acked_the_shard_hangs_in_dropping() -> None:
    """A container that never got the ADD has nothing to drop, says nothing, and the shard waits for ever."""
    found = without("unknown_drop_acked")
    assert found.problem == "stuck: the goal is out of reach", found.story()
    assert found.trace == ("a move: DROP", "0 gets DROP 2")


def test_without_failover_waits_for_lease_a_silent_container_still_runs() -> None:
    """Silence is taken for death."""
    found = without("failover_waits_for_lease")
    assert found.problem == "two at once", found.story()
    assert found.shows("0 starts", "fault: 0 is cut off", "a failover", "1 starts")


def test_without_incarnation_checked_a_restarted_container_obeys_old_mail() -> None:
    """A container that starts anew knows no epoch, and takes an ADD that was meant for its predecessor."""
    found = without("incarnation_checked")
    assert found.problem == "two at once", found.story()
    assert found.shows("a failover", "0 registers anew", "0 gets ADD 1")


def test_every_rule_is_taken_away_by_a_test() -> None:
    """A rule that no test takes away may not be needed at all."""
    for rule in fields(Rules):
        assert any(name.startswith(f"test_without_{rule.name}_") for name in globals()), rule.name
