"""Somebody is told once, reminded, told when it is worse and when it is over; silences and acknowledgements hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.alarms.decide import (
    REMIND_MS,
    RESOLVE_AFTER_MS,
    RETENTION_MS,
    STALE_MS,
    Alarm,
    Silence,
    acknowledge,
    decide_alarms,
    is_expired,
    sweep_alarms,
)
from penstock.scaling.policies.policy import RaiseAlert

NOW = 1_790_000_000_000
LAG = RaiseAlert(key="lag", text="it lags")
WORSE = RaiseAlert(key="lag", text="it lags more", severity="critical")


class Board:
    """Alarms of one job over time."""

    def __init__(self) -> None:
        self.kept: dict[str, Alarm] = {}
        self.silences: list[Silence] = []
        self.told: list[tuple[str, str]] = []

    def _take(self, changes) -> list[str]:
        self.kept |= {alarm.name: alarm for alarm in changes.changed}
        self.told += [(notice.kind, notice.alarm.key) for notice in changes.notices]
        return [notice.kind for notice in changes.notices]

    def report(self, now_ms: int, *alerts: RaiseAlert, source: str = "doctor") -> list[str]:
        known = list(self.kept.values())
        return self._take(decide_alarms(known, "shops", {source: alerts}, self.silences, now_ms=now_ms))

    def sweep(self, now_ms: int) -> list[str]:
        return self._take(sweep_alarms(list(self.kept.values()), self.silences, now_ms=now_ms))

    @property
    def alarm(self) -> Alarm:
        (alarm,) = self.kept.values()
        return alarm


def test_alarms_of_a_job_at_rest_are_over_at_once_whoever_saw_them():
    """Plan: two sources see something; the job is stopped, and one source goes on speaking of it."""
    board = Board()
    assert board.report(NOW, LAG) == ["fired"]
    stopped = RaiseAlert(key="stopped_for_capacity", text="stopped")
    assert board.report(NOW, stopped, source="capacity") == ["fired"]
    known = list(board.kept.values())
    told = decide_alarms(known, "shops", {"capacity": (stopped,)}, [], now_ms=NOW + 1, at_rest=True)
    assert board._take(told) == ["resolved"]
    assert [alarm.key for alarm in board.kept.values() if alarm.is_firing] == ["stopped_for_capacity"]
    assert board.report(NOW + 2, LAG) == ["fired"], "it runs again, and lags again"


def test_the_same_trouble_is_told_once_and_its_end_once():
    board = Board()
    assert board.report(NOW, LAG) == ["fired"]
    for minute in range(1, 30):
        assert board.report(NOW + minute * 60_000, LAG) == []
    assert board.alarm.last_ms == NOW + 29 * 60_000 and board.alarm.first_ms == NOW
    assert board.report(NOW + 30 * 60_000) == [], "it may come back at once"
    assert board.report(NOW + 29 * 60_000 + RESOLVE_AFTER_MS) == ["resolved"]
    assert board.report(NOW + 40 * 60_000) == []
    assert board.report(NOW + 50 * 60_000, LAG) == ["fired"] and board.alarm.count == 2


def test_another_source_says_nothing_of_it():
    board = Board()
    board.report(NOW, LAG)
    assert board.report(NOW + 2 * RESOLVE_AFTER_MS, source="scaler") == []
    assert board.alarm.is_firing


def test_worse_is_news_also_to_those_who_look_after_it():
    board = Board()
    board.report(NOW, LAG)
    board.kept[board.alarm.name] = acknowledge(board.alarm, by="dana", now_ms=NOW)
    assert board.report(NOW + 60_000, WORSE) == ["escalated"] and board.alarm.acked_by == ""
    assert board.report(NOW + 120_000, LAG) == [], "better is none"


def test_reminders_until_somebody_looks_after_it():
    board = Board()
    board.report(NOW, WORSE)
    hour = REMIND_MS["critical"]
    assert board.report(NOW + hour - 1, WORSE) == [] and board.report(NOW + hour, WORSE) == ["reminded"]
    board.kept[board.alarm.name] = acknowledge(board.alarm, by="dana", now_ms=NOW + hour)
    assert board.report(NOW + 3 * hour, WORSE) == [] and board.alarm.acked_by == "dana"


def test_a_silence_keeps_quiet_and_what_still_fires_is_told_after_it():
    board = Board()
    board.silences = [Silence(id="a", job="sho*", until_ms=NOW + 600_000, by="dana", why="a release")]
    assert board.report(NOW, LAG) == [] and board.alarm.is_firing
    assert board.report(NOW + 599_999, LAG) == [] and board.report(NOW + 600_000, LAG) == ["fired"]


def test_what_was_silenced_from_beginning_to_end_is_never_told():
    board = Board()
    board.silences = [Silence(id="a", key="lag", until_ms=NOW + 600_000, by="dana", why="a release")]
    board.report(NOW, LAG)
    board.report(NOW + 400_000)
    assert board.sweep(NOW + 700_000) == [] and board.told == []
    board.silences = [Silence(id="b", until_ms=NOW + 2_000_000, by="dana", why="a release")]
    board.report(NOW + 1_900_000, LAG)
    assert board.report(NOW + 2_300_000) == [] and not board.alarm.is_firing, "over after the silence"


def test_a_silence_for_warnings_lets_what_is_critical_through():
    board = Board()
    board.silences = [Silence(id="a", severity_max="warning", until_ms=NOW + 600_000, by="dana", why="x")]
    assert board.report(NOW, LAG) == [] and board.report(NOW + 1, WORSE) == ["fired"]


def test_what_nobody_looks_at_any_more_ends_and_is_forgotten():
    board = Board()
    board.report(NOW, LAG)
    assert board.sweep(NOW + STALE_MS) == [] and board.sweep(NOW + STALE_MS + 1) == ["resolved"]
    assert not is_expired(board.alarm, NOW + RETENTION_MS)
    assert is_expired(board.alarm, NOW + STALE_MS + RETENTION_MS + 2)


def test_the_worst_of_two_with_one_key_counts():
    board = Board()
    assert board.report(NOW, WORSE, LAG) == ["fired"] and board.alarm.severity == "critical"


steps = st.lists(
    st.tuples(st.integers(0, 2 * RESOLVE_AFTER_MS), st.lists(st.sampled_from([LAG, WORSE]), max_size=1)),
    max_size=40,
)


@given(steps)
def test_an_end_is_told_only_after_a_beginning_and_each_once(steps):
    board, now_ms, is_open = Board(), NOW, False
    for pause, alerts in steps:
        now_ms += pause
        for kind in board.report(now_ms, *alerts):
            assert is_open == (kind != "fired"), kind
            is_open = kind != "resolved"
    assert is_open == any(alarm.is_firing for alarm in board.kept.values())


@given(st.lists(st.integers(0, 120_000), max_size=60))
def test_a_trouble_that_comes_and_goes_quickly_is_one_trouble(pauses):
    """Plan: seen in every second look, never away for as long as it takes to be over."""
    board, now_ms = Board(), NOW
    for number, pause in enumerate(pauses):
        now_ms += pause
        board.report(now_ms, *([LAG] if number % 2 == 0 else []))
    assert [kind for kind, _ in board.told if kind != "reminded"] == (["fired"] if pauses else [])
