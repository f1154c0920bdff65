"""Claims about retrieval (I20): whole frames or none, and the reason names metrics and minutes."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.db.database import Database
from penstock.scaling.metrics.frames import METRICS, Frame, NoFrame
from penstock.scaling.metrics.minutes import DAY, Minute
from penstock.scaling.metrics.retriever import MINUTES_MAX, MetricQuery, Retriever, history
from penstock.scaling.metrics.store import MetricStore

DAY_0 = 20_000 * DAY
NAN = float("nan")


def rows(first: int, **jobs: list[dict[str, float]]) -> list[Minute]:
    """One minute after another: per job, what is known of it; {} is nothing."""
    found = []
    for offset in range(max(len(told) for told in jobs.values())):
        names = [name for name, told in jobs.items() if offset < len(told) and told[offset]]
        values = np.full((len(names), len(METRICS)), NAN)
        for place, name in enumerate(names):
            for metric, value in jobs[name][offset].items():
                values[place, list(METRICS).index(metric)] = value
        found.append(Minute(minute=first + offset, jobs=tuple(names), values=values))
    return found


@pytest.fixture
def store():
    database = Database(None)
    yield MetricStore(database)
    database.close()


def now_after(minutes: int) -> int:
    """A moment in the minute after so many."""
    return (DAY_0 + minutes) * 60_000 + 5_000


def test_a_whole_range_is_a_frame(store):
    told = [{"busy": offset / 16, "lag_s": float(offset)} for offset in range(10)]
    store.put(*rows(DAY_0, a=told))
    found = Retriever(store).frame(
        "a", MetricQuery(metrics=("lag_s", "busy"), minutes=4), now_ms=now_after(10)
    )
    assert isinstance(found, Frame)
    assert (found.job, found.first_minute, found.minutes) == ("a", DAY_0 + 6, 4)
    assert found.values["lag_s"].tolist() == [6, 7, 8, 9] and found.last("busy") == 9 / 16
    assert list(found.values) == ["lag_s", "busy"]


def test_what_is_missing_is_named(store):
    told = [{"busy": 0.5, "lag_s": 1.0} for _ in range(10)]
    told[4], told[5], told[8] = {"busy": 0.5}, {"busy": 0.5}, {}
    store.put(*rows(DAY_0, a=told))
    found = Retriever(store).frame(
        "a", MetricQuery(metrics=("busy", "lag_s"), minutes=8), now_ms=now_after(10)
    )
    assert isinstance(found, NoFrame)
    assert found.metrics == ("busy", "lag_s")
    assert found.reason == (
        "busy missing in 1 of 8 minutes (10-04 00:08 UTC); "
        "lag_s missing in 3 of 8 minutes (10-04 00:08 UTC, 10-04 00:04 UTC to 10-04 00:05 UTC)"
    )
    only = Retriever(store).frame("a", MetricQuery(metrics=("busy",), minutes=1), now_ms=now_after(10))
    assert isinstance(only, Frame)


def test_as_much_may_be_missing_as_was_declared_but_not_the_newest_minute(store):
    told = [{"busy": 0.5} for _ in range(10)]
    told[3] = {}
    store.put(*rows(DAY_0, a=told, b=[*told[:9], {}]))
    wanted = MetricQuery(metrics=("busy",), minutes=10, missing_max=0.2)
    found = Retriever(store).frames(["a", "b"], wanted, now_ms=now_after(10))
    assert isinstance(found["a"], Frame) and np.isnan(found["a"].values["busy"][3])
    assert isinstance(found["b"], NoFrame) and "00:09" in found["b"].reason
    strict = MetricQuery(metrics=("busy",), minutes=10, missing_max=0.05)
    assert isinstance(Retriever(store).frame("a", strict, now_ms=now_after(10)), NoFrame)


@pytest.mark.parametrize(("late", "is_there"), [(0, True), (1, True), (2, False), (60, False)])
def test_stale_numbers_are_refused(store, late: int, is_there: bool):
    store.put(*rows(DAY_0, a=[{"busy": 0.5} for _ in range(5)]))
    found = Retriever(store).frame("a", MetricQuery(metrics=("busy",), minutes=2), now_ms=now_after(5 + late))
    assert isinstance(found, Frame) == is_there
    if isinstance(found, NoFrame):
        assert found.reason == f"the newest minute recorded is 10-04 00:04 UTC, {late + 1} min ago"


def test_nothing_at_all_is_said_so(store):
    wanted = MetricQuery(metrics=("busy",), minutes=2)
    found = Retriever(store).frame("a", wanted, now_ms=now_after(5))
    assert isinstance(found, NoFrame) and found.reason == "no metrics were recorded yet"
    store.put(*rows(DAY_0, b=[{"busy": 0.5}] * 5))
    found = Retriever(store).frame("a", wanted, now_ms=now_after(5))
    assert isinstance(found, NoFrame) and found.reason == "it has no metrics yet"


def test_numbers_of_the_future_are_not_shown(store):
    """Another instance's clock is a little ahead: a frame ends with the minute before now."""
    store.put(*rows(DAY_0, a=[{"lag_s": float(offset)} for offset in range(10)]))
    found = Retriever(store).frame("a", MetricQuery(metrics=("lag_s",), minutes=2), now_ms=now_after(8))
    assert isinstance(found, Frame) and found.values["lag_s"].tolist() == [6, 7]


def test_after_the_clock_was_set_back_old_minutes_are_not_taken_for_new_ones(store):
    """Plan: ten minutes are recorded, the clock goes back by four; then the first minute of the new time is."""
    store.put(*rows(DAY_0, a=[{"lag_s": float(offset)} for offset in range(10)]))
    wanted, now_ms = MetricQuery(metrics=("lag_s",), minutes=2), now_after(6)
    found = Retriever(store).frame("a", wanted, now_ms=now_ms)
    assert isinstance(found, NoFrame) and "3 min ahead: the clock was set back" in found.reason
    store.put(*rows(DAY_0 + 6, a=[{"lag_s": 77.0}]))
    found = Retriever(store).frame("a", wanted, now_ms=now_ms + 60_000)
    assert isinstance(found, Frame) and found.values["lag_s"].tolist() == [5, 77]


def test_many_jobs_over_days_are_as_one_by_one(store):
    told = {
        f"job{number}": [{"busy": ((number + offset) % 7) / 8} for offset in range(700)]
        for number in range(5)
    }
    store.put(*rows(DAY_0 - 300, **told))
    while store.seal(DAY_0 + 400):
        pass
    wanted = MetricQuery(metrics=("busy",), minutes=700)
    retriever, now_ms = Retriever(store), now_after(400)
    every = retriever.frames([*told, "nobody"], wanted, now_ms=now_ms)
    assert isinstance(every["nobody"], NoFrame)
    for number, name in enumerate(told):
        found, alone = every[name], retriever.frame(name, wanted, now_ms=now_ms)
        assert isinstance(found, Frame) and isinstance(alone, Frame)
        assert found.values["busy"].tolist() == alone.values["busy"].tolist()
        assert found.values["busy"][0] == (number % 7) / 8


def test_people_see_what_there_is(store):
    store.put(*rows(DAY_0, a=[{"lag_s": 1.0}, {}, {"lag_s": 3.0}]))
    found = history(store, "a", ["lag_s"], 5, now_ms=now_after(4))
    assert [None if np.isnan(value) else value for value in found.values["lag_s"]] == [None, 1, None, 3, None]


@pytest.mark.parametrize(
    ("metrics", "minutes", "says"),
    [
        (("buzy",), 5, "no metric 'buzy'"),
        ((), 5, "names no metric"),
        (("busy", "busy"), 5, "one of them twice"),
        (("busy",), 0, "0 minutes"),
        (("busy",), MINUTES_MAX + 1, "minutes is not available"),
    ],
)
def test_what_cannot_be_asked_is_refused(metrics, minutes, says):
    with pytest.raises(ConfigError) as refused:
        MetricQuery(metrics=metrics, minutes=minutes)
    assert says in refused.value.what and refused.value.why and refused.value.fix
