"""What a warden does next: the rules without processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.container.watchdog import (
    ENGINE_START_MS,
    Contact,
    EndEngine,
    Lease,
    Renewal,
    SendHeartbeat,
    Watchdog,
)
from penstock.fleet.messages import FAST, Heartbeat, HeartbeatReply, HeartbeatVerdict, ShardEntry, TaskReport
from tests.fleet.harness import dropping, owned


def a_watchdog() -> Watchdog:
    lease = Lease(deadline_ms=FAST.deadline_ms)
    return Watchdog(container="c1", incarnation="i1", profile=FAST, started_ms=0, lease=lease, pid=7)


def said() -> Heartbeat:
    return Heartbeat(container="c1", incarnation="i1", sequence=0, list_version=5, engine_ready=True)


def a_reply(sequence: int, verdict: HeartbeatVerdict = HeartbeatVerdict.OK) -> HeartbeatReply:
    return HeartbeatReply(
        verdict=verdict, term=3, sequence=sequence, assignment_version=9, shard_count=64, list_version=5
    )


def beats(watchdog: Watchdog, now_ms: int) -> list[Heartbeat]:
    return [
        action.heartbeat for action in watchdog.check(now_ms).actions if isinstance(action, SendHeartbeat)
    ]


def end(watchdog: Watchdog, now_ms: int) -> str:
    return "".join(
        action.reason for action in watchdog.check(now_ms).actions if isinstance(action, EndEngine)
    )


def test_beats_carry_what_the_engine_said_and_grow_in_number():
    watchdog = a_watchdog()
    watchdog.on_sign(500, said())
    (first,) = beats(watchdog, 600)
    assert (first.sequence, first.pid, first.list_version) == (1, 7, 5)
    assert watchdog.check(700).actions == ()
    watchdog.on_sign(1_600, said())
    (second,) = beats(watchdog, 1_700)
    assert second.sequence == 2


def test_an_engine_that_starts_slowly_is_told_of_as_one_that_runs_nothing():
    """Nobody fails over for it, and nothing fills the pipe that it does not read yet."""
    watchdog = a_watchdog()
    for now_ms in range(0, ENGINE_START_MS + 1, FAST.heartbeat_ms):
        (beat,) = beats(watchdog, now_ms)
        assert (beat.list_version, beat.acked, beat.tasks, beat.engine_ready) == (0, (), (), False)
        watchdog.on_sent(beat, now_ms)
        assert not watchdog.on_reply(a_reply(beat.sequence), now_ms)
        assert not watchdog.on_renewed(a_reply(beat.sequence), now_ms, now_ms)
    watchdog.on_sign(ENGINE_START_MS, said())
    (first,) = beats(watchdog, ENGINE_START_MS + FAST.heartbeat_ms // 5)  # what it says is told soon
    watchdog.on_sent(first, ENGINE_START_MS)
    assert first.list_version == 5
    assert watchdog.on_reply(a_reply(first.sequence), ENGINE_START_MS)


def starting() -> Heartbeat:
    return replace(said(), list_version=0, engine_ready=False)


def told(version: int, *shards: ShardEntry, sequence: int = 1) -> HeartbeatReply:
    return replace(a_reply(sequence), assignment_version=version, shards=shards)


@pytest.mark.parametrize("has_spoken", [False, True])
def test_for_an_engine_that_is_not_ready_the_warden_gives_back_what_is_to_be_dropped(has_spoken: bool):
    """Soon, and only that: what is owned is for the engine to record."""
    watchdog = a_watchdog()
    if has_spoken:
        watchdog.on_sign(0, starting())
    (beat,) = beats(watchdog, 0)
    watchdog.on_sent(beat, 0)
    assert not watchdog.on_reply(told(9, owned(1, 7), dropping(2, 8)), 100)
    (early,) = beats(watchdog, 200)
    assert early.acked == (dropping(2, 8),) and not early.engine_ready
    assert not watchdog.on_renewed(told(11, owned(1, 7)), 300, 300)  # it is gone, the store says
    (later,) = beats(watchdog, 600)
    assert later.acked == ()


def test_an_engine_is_never_told_of_an_assignment_older_than_what_was_given_back_for_it():
    """A late answer names as owned what others have by now."""
    watchdog = a_watchdog()
    (beat,) = beats(watchdog, 0)
    watchdog.on_sent(beat, 0)
    assert not watchdog.on_reply(told(9, dropping(2, 8)), 100)
    assert not watchdog.on_reply(told(7, owned(2, 6)), 150)  # late, while it is not ready either
    (beat,) = beats(watchdog, 200)
    assert beat.acked == (dropping(2, 8),)
    watchdog.on_sign(300, said())
    assert not watchdog.on_reply(told(7, owned(2, 6)), 350)
    assert not watchdog.on_renewed(told(8, owned(2, 6)), 350, 350)
    assert watchdog.on_reply(told(9, dropping(2, 8)), 400)
    assert watchdog.on_reply(told(12, owned(2, 12)), 400)  # given again


def test_a_ready_engine_gives_back_itself():
    watchdog = a_watchdog()
    watchdog.on_sign(0, replace(said(), acked=(owned(2, 6),)))
    (beat,) = beats(watchdog, 0)
    watchdog.on_sent(beat, 0)
    assert watchdog.on_reply(told(9, dropping(2, 8)), 100)
    (beat,) = beats(watchdog, 1_000)
    assert beat.acked == (owned(2, 6),)


def test_that_an_engine_is_ready_is_told_early():
    watchdog = a_watchdog()
    watchdog.on_sign(0, starting())
    assert beats(watchdog, 0)
    watchdog.on_sign(100, said())
    assert not beats(watchdog, 199)
    assert [beat.engine_ready for beat in beats(watchdog, 200)] == [True]


def runs(*tasks: str, generation: int = 1) -> Heartbeat:
    reports = [
        TaskReport(task_id=task, job="j", generation=generation, shard=1, state="running") for task in tasks
    ]
    return replace(said(), tasks=tuple(reports))


def test_that_a_task_ended_is_told_early_and_the_answer_to_it_asked_for_soon():
    watchdog = a_watchdog()
    watchdog.on_sign(0, runs("j/0", "j/1"))
    assert beats(watchdog, 0)
    watchdog.on_sign(100, runs("j/1"))
    assert not beats(watchdog, 199)  # a fifth of an interval lies between two beats
    assert [len(beat.tasks) for beat in beats(watchdog, 200)] == [1]
    assert not beats(watchdog, 599)
    assert beats(watchdog, 600)
    assert not beats(watchdog, 1_599)  # then as usual
    assert beats(watchdog, 1_600)


def test_tasks_that_begin_or_go_on_are_told_with_the_next_beat():
    watchdog = a_watchdog()
    watchdog.on_sign(0, runs("j/0"))
    assert beats(watchdog, 0)
    watchdog.on_sign(100, runs("j/0", "j/1"))
    assert not beats(watchdog, 999)
    assert beats(watchdog, 1_000)


def test_that_a_newer_list_is_obeyed_is_told_early_but_not_again_and_again():
    """A plan waits for it, also where nothing of the job ran."""
    watchdog = a_watchdog()
    watchdog.on_sign(0, said())
    assert beats(watchdog, 100)
    watchdog.on_sign(200, replace(said(), list_version=6))
    assert not beats(watchdog, 499)
    (early,) = beats(watchdog, 500)
    assert early.list_version == 6
    for at_ms in range(500, 2_000, 100):
        watchdog.on_sign(at_ms, replace(said(), list_version=at_ms))
        if beats(watchdog, at_ms):
            assert at_ms in (900, 1_300, 1_700)
    watchdog.on_sign(2_000, replace(said(), list_version=1_900))
    assert beats(watchdog, 2_100)
    watchdog.on_sign(2_900, replace(said(), list_version=1_900))
    assert not beats(watchdog, 3_000), "what was told is no news"


def test_a_shard_given_back_and_a_task_of_an_older_generation_are_news_too():
    watchdog = a_watchdog()
    watchdog.on_sign(0, replace(said(), acked=(owned(4, 1),)))
    assert beats(watchdog, 0)
    gone = (dropping(4, 2),)
    watchdog.on_sign(100, replace(said(), acked=gone))
    assert beats(watchdog, 200)
    watchdog.on_sign(700, replace(said(), acked=gone))
    assert beats(watchdog, 700) and not beats(watchdog, 1_600)  # told once
    watchdog = a_watchdog()
    watchdog.on_sign(0, runs("j/0"))
    assert beats(watchdog, 0)
    watchdog.on_sign(100, runs("j/0", generation=2))
    assert beats(watchdog, 200)


def test_an_engine_that_gives_no_sign_is_ended():
    watchdog = a_watchdog()
    assert end(watchdog, ENGINE_START_MS) == ""
    assert "no sign of life" in end(watchdog, ENGINE_START_MS + 1)
    watchdog = a_watchdog()
    watchdog.on_sign(100, said())
    assert end(watchdog, 100 + FAST.engine_stale_ms) == ""
    assert "no sign of life" in end(watchdog, 101 + FAST.engine_stale_ms)


def test_the_lease_counts_from_the_sending_of_what_was_acknowledged():
    watchdog = a_watchdog()
    watchdog.on_sign(0, said())
    (beat,) = beats(watchdog, 1)
    watchdog.on_sent(beat, 1)
    assert watchdog.on_reply(a_reply(1), 1_500)
    watchdog.on_sign(8_000, said())
    assert end(watchdog, 8_000) == ""
    assert "acknowledged" in end(watchdog, 8_001)


@pytest.mark.parametrize("verdict", [HeartbeatVerdict.WITHHELD, HeartbeatVerdict.REBOOT])
def test_the_engine_hears_nothing_of_an_answer_that_extends_nothing(verdict: HeartbeatVerdict):
    watchdog = a_watchdog()
    watchdog.on_sign(0, said())
    (beat,) = beats(watchdog, 1)
    watchdog.on_sent(beat, 1)
    assert not watchdog.on_reply(a_reply(1, verdict), 2)
    assert bool(end(watchdog, 3)) == (verdict is HeartbeatVerdict.REBOOT)


def test_after_two_missed_beats_the_store_stands_for_the_shard_manager():
    contact, beat = Contact(), said()
    assert not contact.on_silence() and not contact.on_silence()  # nothing was ever acknowledged
    contact.on_answer(a_reply(1))
    assert not contact.on_silence()
    assert contact.on_silence()
    reply = contact.reply_from_store(beat, Renewal(assignment_version=11, shards=(owned(3, 4),)))
    assert (reply.verdict, reply.term, reply.shard_count) == (HeartbeatVerdict.OK, 3, 64)
    assert reply.shards == (owned(3, 4),) and reply.list_version == 0
    assert contact.reply_from_store(beat, None).verdict is HeartbeatVerdict.REBOOT
    contact.on_answer(a_reply(2))
    assert not contact.on_silence()


def test_a_renewal_counts_from_its_beginning_and_its_end_ends_the_life():
    watchdog, contact = a_watchdog(), Contact()
    contact.on_answer(a_reply(1))
    watchdog.on_sign(0, said())
    (beat,) = beats(watchdog, 1)
    watchdog.on_sent(beat, 1)
    watchdog.on_reply(a_reply(1), 2)
    renewal = Renewal(assignment_version=1, shards=())
    assert watchdog.on_renewed(contact.reply_from_store(beat, renewal), 5_000, 7_000)
    watchdog.on_sign(12_900, said())
    assert end(watchdog, 12_999) == "" and end(watchdog, 13_000)
    assert not watchdog.on_renewed(contact.reply_from_store(beat, None), 13_000, 13_001)
