from __future__ import annotations

from penstock.container.watchdog import Lease, StopTasks
from penstock.fleet.messages import HeartbeatVerdict
from tests.fleet.harness import a_reply


def ack(lease: Lease, sequence: int, now_ms: int, **values: object):
    return lease.on_ack(a_reply(1, sequence=sequence, **values), now_ms)


def test_nothing_may_start_before_the_first_acknowledgement():
    lease = Lease(8_000)
    lease.on_sent(1, 100)
    assert not lease.is_held(200)
    assert lease.on_time(50_000).actions == ()
    assert ack(lease, 1, 200).wake_at_ms == 8_100
    assert lease.is_held(200)


def test_it_counts_from_the_sending_of_the_acknowledged_beat():
    lease = Lease(8_000)
    lease.on_sent(1, 0)
    ack(lease, 1, 5_000)  # the answer was slow: those seconds are spent
    assert lease.on_time(7_999).actions == ()
    assert isinstance(lease.on_time(8_000).actions[0], StopTasks)
    assert not lease.is_held(8_000)


def test_a_late_answer_to_an_old_beat_changes_nothing():
    lease = Lease(8_000)
    lease.on_sent(1, 0)
    lease.on_sent(2, 1_000)
    ack(lease, 2, 1_100)
    assert ack(lease, 1, 1_200).wake_at_ms == 9_000


def test_answers_of_a_smaller_term_or_to_unknown_beats_are_ignored():
    lease = Lease(8_000)
    lease.on_sent(1, 0)
    ack(lease, 1, 100, term=2)
    lease.on_sent(2, 5_000)
    ack(lease, 2, 5_100, term=1)
    ack(lease, 77, 5_200, term=3)
    assert lease.on_time(8_000).actions != ()


def test_a_withheld_answer_does_not_extend_it():
    lease = Lease(8_000)
    lease.on_sent(1, 0)
    ack(lease, 1, 100)
    lease.on_sent(2, 5_000)
    ack(lease, 2, 5_100, verdict=HeartbeatVerdict.WITHHELD)
    assert lease.on_time(8_000).actions != ()


def test_a_lease_that_is_over_does_not_come_back():
    lease = Lease(8_000)
    lease.on_sent(1, 0)
    ack(lease, 1, 100)
    lease.on_sent(2, 7_999)
    # Paused between sending and reading the answer: the deadline passed meanwhile.
    assert ack(lease, 2, 8_500).actions != ()
    assert lease.on_time(8_600).actions != () and not lease.is_held(8_600)


def test_a_reboot_verdict_ends_it_at_once():
    lease = Lease(8_000)
    lease.on_sent(1, 0)
    step = ack(lease, 1, 100, verdict=HeartbeatVerdict.REBOOT, reason="failed over")
    assert step.actions == (StopTasks(reason="failed over"),)


def test_renewing_the_row_extends_it_from_the_moment_of_asking():
    lease = Lease(8_000)
    lease.on_sent(1, 0)
    ack(lease, 1, 100)
    assert lease.on_renewed(3_000, 3_500).wake_at_ms == 11_000
