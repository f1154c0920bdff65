"""Records behind a low watermark without a flag become an alarm: when their number grows, and only then."""

from __future__ import annotations

from collections.abc import Callable

from penstock.alarms.checks import (
    BEHIND_LOW,
    EVENT_MS,
    PARTITIONS_REPORTED_MAX,
    SOURCE,
    BehindLow,
    BehindTrouble,
    Observed,
    decide_levels,
)
from penstock.alarms.decide import RESOLVE_AFTER_MS, Alarm
from penstock.alarms.store import AlarmStore
from penstock.db.database import Database
from penstock.db.journal_store import JournalStore
from penstock.fleet.messages import TaskReport

NOW = 1_790_000_000_000


def a_report(job: str = "a", task: int = 0, **totals: int) -> TaskReport:
    """`p3=2`: the task's partition 3 has counted two."""
    metrics = {f"{BEHIND_LOW}.{name[1:]}": float(count) for name, count in totals.items()}
    metrics[BEHIND_LOW] = float(sum(totals.values()))
    return TaskReport(
        task_id=f"{job}/{task}", job=job, generation=1, shard=0, state="running", metrics=metrics
    )


def looked(seen: BehindLow, *reports: TaskReport, at: int = 0) -> dict[str, int]:
    return {
        trouble.job: sum(trouble.totals.values())
        for trouble in seen.observe(reports, NOW + at)
        if decide_levels(Observed(behind=(trouble,)), NOW + at)[trouble.job]
    }


def test_none_are_no_trouble_and_the_first_ones_are():
    seen = BehindLow(tuple)
    assert looked(seen, a_report(), a_report("b")) == {}
    assert looked(seen, a_report(p0=2), a_report("b")) == {"a": 2}


def test_a_total_that_stands_is_over_after_a_while_and_one_that_grows_is_not():
    seen = BehindLow(tuple)
    assert looked(seen, a_report(p0=2), a_report("b", p1=1)) == {"a": 2, "b": 1}
    assert looked(seen, a_report(p0=2), a_report("b", p1=1), at=EVENT_MS - 1) == {"a": 2, "b": 1}
    assert looked(seen, a_report(p0=3), a_report("b", p1=1), at=EVENT_MS) == {"a": 3}
    assert looked(seen, a_report(p0=3), at=3 * EVENT_MS) == {}


def test_partitions_that_move_to_other_tasks_are_no_news():
    seen = BehindLow(tuple)
    looked(seen, a_report(p0=2, p1=5))
    later = 2 * EVENT_MS
    assert looked(seen, at=later) == {}
    assert looked(seen, a_report(task=0, p1=5), at=later) == {}
    assert looked(seen, a_report(task=0, p1=5), a_report(task=1, p0=2), at=later) == {}
    old, new = a_report(task=0, p0=2), a_report(task=1, p0=3)
    assert looked(seen, old, new, at=later) == {"a": 8}
    assert looked(seen, old, new, at=later + EVENT_MS) == {}, "one that is not gone yet says less"


def test_a_state_that_begins_anew_counts_anew():
    seen = BehindLow(tuple)
    looked(seen, a_report(p0=9))
    assert looked(seen, a_report(), at=2 * EVENT_MS) == {}
    assert looked(seen, a_report(p0=1), at=2 * EVENT_MS) == {"a": 1}


def test_the_alarm_says_how_many_why_and_what_to_do():
    totals = {f"{BEHIND_LOW}.{n}": n + 1 for n in range(100)}
    (alert,) = decide_levels(Observed(behind=(BehindTrouble(job="a b", totals=totals),)), NOW)["a b"]
    assert (alert.key, alert.severity) == (BEHIND_LOW, "warning")
    assert "5050 records" in alert.text and "had promised" in alert.text
    assert "penstock watermark 'a b'" in alert.what_to_do
    assert alert.evidence[BEHIND_LOW] == 5050 and len(alert.evidence) == PARTITIONS_REPORTED_MAX + 1


def test_the_next_control_plane_tells_only_what_came_meanwhile():
    database = Database(None)
    store = AlarmStore(database, JournalStore(database), ["log"])

    def tell(seen: BehindLow, *reports: TaskReport, at: int = 0) -> list[Alarm]:
        troubles = seen.observe(reports, NOW + at)
        levels = decide_levels(Observed(behind=troubles), NOW + at)
        store.report("a", {SOURCE: levels.get("a", ())}, NOW + at)
        return [alarm for alarm in store.alarms("a") if alarm.is_firing]

    told: Callable[[], tuple[Alarm, ...]] = store.alarms
    first = BehindLow(told)
    (alarm,) = tell(first, a_report(p0=2, p3=1))
    assert alarm.evidence == {BEHIND_LOW: 3, f"{BEHIND_LOW}.0": 2, f"{BEHIND_LOW}.3": 1}
    assert tell(first, a_report(p0=2, p3=1), at=EVENT_MS + RESOLVE_AFTER_MS) == []
    second = BehindLow(told)
    assert tell(second, a_report(p0=2, p3=1), at=3 * EVENT_MS) == []
    (alarm,) = tell(BehindLow(told), a_report(p0=2, p3=4), at=3 * EVENT_MS)
    assert alarm.count == 2 and alarm.evidence[BEHIND_LOW] == 6
    database.close()
