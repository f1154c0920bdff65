"""The pattern analyzer: the past vetoes what it did not carry, and is silent where it does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.scaling.metrics.frames import NoFrame, Points
from penstock.scaling.scaler.decide import decide
from penstock.scaling.scaler.estimators import MB
from penstock.scaling.scaler.load import STAGING_MIN, adjust_rate, between, bootstrap_rate
from penstock.scaling.scaler.observation import (
    DAY_MIN,
    Decision,
    DecisionSettings,
    Footprint,
    Hold,
    Resize,
    TaskResources,
)
from penstock.scaling.scaler.pattern import DAYS, History, Pattern, analyse
from tests.scaling.scaler.jobs import START, a_frame, a_job, at_rest

P = 100.0
PREACTIVE = DecisionSettings(generation="preactive")
BEGIN = START - DAYS * DAY_MIN


def days(
    quiet: float = 140.0, peak: float = 140.0, *, on: range = range(DAYS), in_hours: float = 2.0
) -> Points:
    """Fourteen days at one rate, with a peak of an hour `in_hours` from this time of the day."""
    rates = np.full(DAYS * DAY_MIN, quiet)
    for day in on:
        at = day * DAY_MIN + round(in_hours * 60)
        rates[at : at + 60] = peak
    return rates


def with_history(rates: Points, input_rate: float = 140.0) -> Decision:
    """Sixteen tasks, of which two would do now."""
    observation = at_rest(a_job(16, partitions=0), thread_rate=P, input_rate=input_rate, settings=PREACTIVE)
    return decide(observation, lambda: History(first_minute=BEGIN, input_rate=rates))


def test_a_job_goes_down_where_the_past_agrees():
    decision = with_history(days())
    assert isinstance(decision, Resize) and decision.task_count == 2
    assert decision.inputs["days"] == DAYS and decision.bounds == ()


def test_the_next_hours_of_the_past_veto():
    decision = with_history(days(peak=1300.0))
    assert isinstance(decision, Hold) and decision.bound == "history"
    assert "1.3e+03 records/s arrived" in decision.reason and decision.inputs["X peak ahead"] == 1300


def test_down_only_to_what_the_past_needed():
    decision = with_history(days(peak=500.0))
    assert isinstance(decision, Resize) and decision.task_count == 6  # 500 / 0.85 / 100
    assert "history" in decision.bounds


def test_a_peak_further_away_than_x_hours_does_not_veto():
    decision = with_history(days(peak=1300.0, in_hours=5.0))
    assert isinstance(decision, Resize) and decision.task_count == 2


def test_one_odd_day_is_no_pattern_but_one_weekday_is():
    once = with_history(days(peak=1300.0, on=range(3, 4)))
    assert isinstance(once, Resize)
    weekly = with_history(days(peak=1300.0, on=range(3, 14, 7)))
    assert isinstance(weekly, Hold) and weekly.bound == "history"


def test_the_past_is_off_when_the_last_half_hour_is_unlike_it():
    decision = with_history(days(quiet=300.0, peak=1300.0))
    assert isinstance(decision, Resize) and decision.task_count == 2
    assert any("differ from" in bound for bound in decision.bounds)


def pattern_of(rates: Points, recent: float = 140.0) -> Pattern:
    history = History(first_minute=BEGIN, input_rate=rates)
    return analyse(history, np.full(30, recent), end_minute=START, settings=PREACTIVE)


def test_days_that_differ_among_themselves_make_more_differences_usual():
    rates = days()
    for day in range(0, DAYS, 2):
        rates[day * DAY_MIN : (day + 1) * DAY_MIN] = 60.0
    assert not pattern_of(rates, 60.0).off
    assert pattern_of(days(), 60.0).off


@pytest.mark.parametrize("known_days", [0, 2])
def test_few_days_are_no_pattern(known_days: int):
    rates = days(peak=1300.0)
    rates[: (DAYS - known_days) * DAY_MIN - 60] = np.nan
    decision = with_history(rates)
    assert isinstance(decision, Resize)
    assert any("too few" in bound for bound in decision.bounds)


def test_without_history_the_plan_stands_and_says_so():
    observation = at_rest(a_job(16, partitions=0), thread_rate=P, input_rate=140, settings=PREACTIVE)
    for look_back in (None, lambda: NoFrame(job="job", reason="too young")):
        decision = decide(observation, look_back)
        assert isinstance(decision, Resize) and any("history off" in bound for bound in decision.bounds)


def test_nonsense_in_the_past_is_a_gap():
    rates = days()
    rates[::11] = -5.0
    rates[::13] = np.inf
    pattern = pattern_of(rates)
    assert pattern.days == DAYS and pattern.input_peak == pytest.approx(140)
    for rubbish in (np.array([]), np.full(10, np.nan)):
        assert pattern_of(rubbish).off


def test_the_history_is_asked_for_only_when_less_would_do():
    def never() -> History:
        raise AssertionError("asked")

    for input_rate in (500.0, 5000.0):
        decide(
            at_rest(a_job(8, partitions=0), thread_rate=P, input_rate=input_rate, settings=PREACTIVE), never
        )


def test_keys_of_the_past_count_as_well():
    """Plan: now 1,000 keys take 160 MB; in two hours there are always fifty times as many."""
    job = a_job(16, partitions=0, state="aggregation", task=TaskResources(memory_mb=1000))
    state = {"state_bytes": 160.0 * MB, "key_count": 1000.0, "memory_task_mb": 110.0}
    observation = at_rest(job, thread_rate=P, input_rate=140, settings=PREACTIVE, **state)
    alike = History(first_minute=BEGIN, input_rate=days(), key_count=np.full(DAYS * DAY_MIN, 1000.0))
    more = History(first_minute=BEGIN, input_rate=days(), key_count=days(1000.0, 50_000.0))
    now, later = decide(observation, lambda: alike), decide(observation, lambda: more)
    assert isinstance(now, Resize) and now.task_count == 2
    assert isinstance(later, Resize) and later.task_count == 3
    assert later.task.memory_mb > now.task.memory_mb


# --- P


def test_p_is_bootstrapped_from_the_busier_minutes():
    job = a_job(4)
    busy = np.linspace(0.2, 0.8, 60)
    frame = a_frame(job, minutes=60, processed_rate=busy * 4 * P, busy_mean=busy)
    assert bootstrap_rate(frame, job, minutes=60) == pytest.approx(P)
    assert bootstrap_rate(frame, job, minutes=STAGING_MIN - 1) is None
    idle = a_frame(job, minutes=60, processed_rate=0.1, busy_mean=0.001)
    assert bootstrap_rate(idle, job, minutes=60) is None
    gaps = a_frame(job, minutes=60, processed_rate=busy * 4 * P, busy_mean=np.where(busy > 0.3, np.nan, busy))
    assert bootstrap_rate(gaps, job, minutes=60) is None


def test_p_follows_outcomes():
    """Appendix F of the notes: n' > n shows that P was too low; a breach after n' < n that it was too high."""
    assert adjust_rate(p=100, x=350, slots=4, measured=None) is None
    assert adjust_rate(p=100, x=600, slots=4, measured=None) == pytest.approx(150)
    assert adjust_rate(p=100, x=600, slots=4, measured=250) == pytest.approx(250)
    assert between(70, 200, None) == pytest.approx(135)
    assert between(70, 200, 90) == 90
    assert between(70, 200, 500) == pytest.approx(135)


def test_an_update_makes_p_void():
    fresh = Footprint(thread_rate=P, thread_rate_minute=START - 50)
    job = a_job(4, updated_minute=START - 100)
    known = at_rest(job, thread_rate=P, input_rate=200, footprint=fresh)
    assert decide(known).inputs["P"] == P
    void = Footprint(thread_rate=10 * P, thread_rate_minute=START - 150)
    assert decide(at_rest(job, thread_rate=P, input_rate=200, footprint=void)).inputs["P"] == pytest.approx(P)
