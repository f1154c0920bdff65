from __future__ import annotations

from dataclasses import fields, replace

import pytest

from .explorer import Found, explore
from .outbox import OutboxModel, Rules, State


def without(*rules: str, with_restore: bool = False) -> Found[State]:
    taken = {rule: False for rule in rules}
    return explore(OutboxModel(replace(Rules(), **taken), with_restore=with_restore))


@pytest.fixture(scope="module")
def found() -> Found[State]:
    return explore(OutboxModel(Rules()))


def test_every_durable_production_is_on_the_bus_once_and_in_order(found: Found[State]) -> None:
    """Some order of two lives, their publishes and the answers loses, doubles or reorders a production."""
    assert found.problem is None, found.story()
    assert found.states > 900
    assert not found.reaches(lambda state: bool(state.alarm))
    assert {sum(map(len, state.bus.logs)) for state in found.finals} == {3}


def test_the_search_met_leftovers_overlaps_and_fenced_publishes(found: Found[State]) -> None:
    """The search was about nothing: no life ever found something half published."""

    def second_life_repeats_what_the_bus_has(state: State) -> bool:
        on_bus = {one for log in state.bus.logs for one in log}
        flights = state.lives[1].flights
        names = {row.production for flight in flights if not flight.answered for row in flight.batch}
        return bool(names & on_bus) and bool(names - on_bus)

    assert found.reaches(second_life_repeats_what_the_bus_has), "an overlapping batch"
    assert found.reaches(lambda s: s.lives[0].phase == "stopped" and s.bus.epoch == 2)
    makers = {tuple(one.life for one, _ in state.rows.history) for state in found.finals}
    assert makers == {(1, 1, 1), (1, 1, 2), (2, 2, 2)}, "each step was made by either life"


def test_a_store_put_back_to_an_older_copy_is_a_named_error() -> None:
    """Rows or bus restored from an older copy lose productions without a word."""
    found = explore(OutboxModel(Rules(), with_restore=True))
    assert found.problem is None, found.story()
    assert found.states > 1_500
    alarms = {(state.fault, state.alarm) for state in found.seen if state.alarm}
    assert alarms >= {("rows", "row store older than the bus"), ("bus", "gap in the sequence")}
    assert all(fault for fault, _ in alarms), "no alarm without a fault"


def test_without_sent_after_commit_a_production_is_seen_that_never_became_durable() -> None:
    """A production sent before its step is committed is seen, and a crash takes its step back."""
    found = without("sent_after_commit")
    assert found.problem is not None and found.problem.startswith("not durable"), found.story()
    assert found.shows("sends before its commit", "the bus gets")


def test_without_sequence_per_partition_an_orderly_publish_looks_like_a_gap() -> None:
    """One counter for all output partitions leaves gaps in each, and gaps cannot be refused any more."""
    found = without("sequence_per_partition")
    assert found.problem == "false alarm: gap in the sequence", found.story()


@pytest.mark.parametrize("rule", ["oldest_first", "leftovers_first", "one_in_flight"])
def test_a_broken_order_is_stopped_by_the_gap_check_and_loses_records_without_it(rule: str) -> None:
    """A later sequence that arrives first makes the mark trim the earlier ones."""
    assert without(rule).problem == "false alarm: gap in the sequence"
    blind = without(rule, "gap_refused")
    assert blind.problem is not None and blind.problem.startswith(("hole", "lost")), blind.story()


def test_without_oldest_first_a_later_production_overtakes() -> None:
    """A batch from the middle of the outbox arrives before the beginning."""
    assert without("oldest_first").shows("sends y z", "the bus gets y z")


def test_without_leftovers_first_a_new_production_overtakes_what_a_dead_life_left() -> None:
    """The successor sends its own productions before those it found."""
    assert without("leftovers_first").shows(
        "life 1 commits", "life 2 commits", "life 2 sends z", "the bus gets z"
    )


def test_without_one_in_flight_the_second_batch_overtakes_the_first() -> None:
    """Two batches on their way at once arrive in the wrong order."""
    assert without("one_in_flight").shows("sends x", "sends y z", "the bus gets y z")


def test_without_trimmed_by_record_the_new_tail_of_an_overlapping_batch_is_dropped() -> None:
    """The successor repeats more than arrived, and the whole batch passes for a repetition."""
    found = without("trimmed_by_record")
    assert found.problem is not None and found.problem.startswith("lost"), found.story()
    assert found.shows("the bus gets x from life 1", "life 2 sends x y z", "marks x y z delivered")


def test_without_gap_refused_a_bus_that_lost_its_tail_hides_it() -> None:
    """Records that a damaged bus lost are covered up by the next publish."""
    found = without("gap_refused", with_restore=True)
    assert found.problem is not None and found.problem.startswith("hole"), found.story()
    assert found.shows("delivered", "the bus goes back", "the bus gets")


def test_without_delivered_checks_token_an_earlier_life_deletes_what_was_not_sent() -> None:
    """A paused life writes the outbox as it knew it, and productions stored since are gone."""
    found = without("delivered_checks_token")
    assert found.problem is not None and found.problem.startswith("lost"), found.story()
    assert found.shows("life 2 takes the rows", "life 1 marks")


def test_without_fenced_publish_raises_rows_that_never_arrived_are_deleted() -> None:
    """A life whose publish was refused takes it for done and deletes the rows."""
    found = without("fenced_publish_raises")
    assert found.problem is not None and found.problem.startswith("lost"), found.story()
    assert found.shows("life 2 fences the bus", "the bus gets", "life 1 marks")


def test_without_partition_stored_a_leftover_lands_in_another_partition() -> None:
    """After a change of the partition count a leftover carries the sequence of one partition into another."""
    found = without("partition_stored")
    assert found.problem is not None and found.problem.startswith(("misplaced", "doubled")), found.story()
    assert found.shows("life 1 commits", "life 2 starts", "life 2 sends")


def test_without_bus_compared_at_acquire_restored_rows_lose_new_productions() -> None:
    """Rows from an older copy count their sequences again, and the bus trims the new productions as known."""
    found = without("bus_compared_at_acquire", with_restore=True)
    assert found.problem is not None and found.problem.startswith("lost"), found.story()
    assert found.shows("the rows go back", "life 2 commits", "life 2 marks")


def test_without_fenced_before_compared_a_late_publish_slips_in_after_the_comparison() -> None:
    """Marks read before the earlier life is fenced may rise afterwards, unseen by the comparison."""
    found = without("fenced_before_compared", with_restore=True)
    assert found.problem is not None and found.problem.startswith("lost"), found.story()
    assert found.shows("life 2 finds the bus in order", "from life 1", "life 2 fences the bus")


def test_every_rule_is_taken_away_by_a_test() -> None:
    """A rule that no test takes away may not be needed at all."""
    for rule in fields(Rules):
        assert any(name.startswith(f"test_without_{rule.name}_") for name in globals()), rule.name
