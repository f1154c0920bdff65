"""Claims about the metrics store, on memory, SQLite and PostgreSQL: what was recorded is found again."""

from __future__ import annotations

import numpy as np
import pytest
import sqlalchemy as sa

from penstock.core.errors import CorruptData, StoreUnavailable
from penstock.db.database import Database
from penstock.scaling.metrics.frames import METRICS
from penstock.scaling.metrics.minutes import DAY, Minute, bits_of, decode
from penstock.scaling.metrics.retriever import MetricQuery, Retriever
from penstock.scaling.metrics.store import (
    BLOCKS,
    CHUNK,
    KEEP_DAYS,
    MINUTES,
    NAMES,
    OPEN_MIN,
    RING,
    SEAL_EVERY,
    MetricStore,
)

DAY_0 = 20_000 * DAY
BUSY = bits_of(["busy"])


@pytest.fixture
def database(place):
    found = Database(place)
    yield found
    found.close()


def a_minute(minute: int, **busy: float) -> Minute:
    """Jobs by name, each with how busy it was."""
    values = np.full((len(busy), len(METRICS)), np.nan)
    values[:, list(METRICS).index("busy")] = list(busy.values())
    values[:, list(METRICS).index("task_count")] = 3
    return Minute(minute=minute, jobs=tuple(busy), values=values)


def read(store: MetricStore, job: str, first: int, minutes: int, metric: str = "busy") -> list[float]:
    codes = store.codes([job], [metric], first, minutes)
    return decode(codes, bits_of([metric])[:, None])[0, 0].tolist()


def shown(values: list[float]) -> list[float | None]:
    return [None if np.isnan(value) else round(value, 3) for value in values]


def settle(store: MetricStore, now_minute: int) -> None:
    """All that there is to seal and to sweep."""
    while store.seal(now_minute) or store.sweep(now_minute):
        pass


def count(database: Database, table: sa.Table) -> int:
    with database.reading() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


def test_what_was_recorded_is_found_and_the_rest_is_unknown(database):
    store = MetricStore(database)
    for minute in (0, 1, 3):
        store.put(a_minute(DAY_0 + minute, a=0.25, b=minute / 4))
    assert shown(read(store, "a", DAY_0 - 1, 6)) == [None, 0.25, 0.25, None, 0.25, None]
    assert shown(read(store, "b", DAY_0, 4)) == [0, 0.25, None, 0.75]
    assert shown(read(store, "b", DAY_0, 4, "task_count")) == [3, 3, None, 3]
    assert shown(read(store, "b", DAY_0, 4, "cpu")) == [None] * 4
    assert shown(read(store, "nobody", DAY_0, 2)) == [None, None]
    assert store.knows("b") and not store.knows("nobody")


def test_another_life_finds_the_same(database):
    MetricStore(database).put(*(a_minute(DAY_0 + minute, a=0.5) for minute in range(5)))
    assert shown(read(MetricStore(database), "a", DAY_0, 6)) == [0.5] * 5 + [None]


def test_a_minute_said_again_counts_as_last_said_where_it_is_known(database):
    store = MetricStore(database)
    store.put(a_minute(DAY_0, a=0.5, b=0.5, c=0.5))
    store = MetricStore(database)
    store.put(a_minute(DAY_0, a=0.25, b=float("nan")))
    for found in (store, MetricStore(database)):
        assert [shown(read(found, job, DAY_0, 1)) for job in "abc"] == [[0.25], [0.5], [None]]


def test_sealing_changes_nothing_that_is_read(database):
    """Plan: nine hours of two jobs with a gap and a restart in between; sealed, each minute is as it was told."""
    told = {DAY_0 - 200 + minute: (minute % 50) / 50 for minute in range(540) if not 100 <= minute < 110}
    store, items = MetricStore(database), list(told.items())
    for begin in range(0, len(items), 53):
        some = items[begin : begin + 53]
        store.put(*(a_minute(minute, a=value, b=1 - value) for minute, value in some))
        settle(store, some[-1][0] + 1)
        if begin == 265:
            store = MetricStore(database)
    left = count(database, MINUTES)
    assert OPEN_MIN <= left < OPEN_MIN + SEAL_EVERY < RING
    first, last = min(told), max(told)
    for found in (store, MetricStore(database)):
        values = read(found, "a", first, last - first + 1)
        for minute, value in zip(range(first, last + 1), values, strict=True):
            want = told.get(minute)
            assert np.isnan(value) if want is None else value == pytest.approx(want, rel=1 / 256), minute
        assert np.isnan(read(found, "b", first - 3, 3)).all()
    assert count(database, BLOCKS) == 2 * 2 * 2  # jobs, metrics, days


def test_sealing_is_all_or_nothing(tmp_path):
    """The store fails between sealing and its commit: nothing is lost, and the next round seals the same."""
    failing: list[str] = []

    def fault(point: str) -> None:
        if point in failing:
            raise StoreUnavailable("it is away", why="a test", fix="wait")

    database = Database(tmp_path / "store.db", fault=fault)
    store = MetricStore(database)
    store.put(*(a_minute(DAY_0 + minute, a=0.5) for minute in range(SEAL_EVERY + OPEN_MIN)))
    now = DAY_0 + SEAL_EVERY + OPEN_MIN
    failing.append("commit")
    with pytest.raises(StoreUnavailable):
        store.seal(now)
    failing.clear()
    assert count(database, BLOCKS) == 0 and count(database, MINUTES) == SEAL_EVERY + OPEN_MIN
    assert read(MetricStore(database), "a", DAY_0, 300) == [0.5] * 300
    assert store.seal(now) and not store.seal(now)
    assert count(database, BLOCKS) == 2 and count(database, MINUTES) == OPEN_MIN
    assert read(MetricStore(database), "a", DAY_0, 300) == [0.5] * 300
    database.close()


def test_a_minute_that_was_not_written_names_nobody(tmp_path):
    failing: list[str] = []

    def fault(point: str) -> None:
        if point in failing:
            raise StoreUnavailable("it is away", why="a test", fix="wait")

    database = Database(tmp_path / "store.db", fault=fault)
    store = MetricStore(database)
    failing.append("commit")
    with pytest.raises(StoreUnavailable):
        store.put(a_minute(DAY_0, a=0.5))
    failing.clear()
    assert not store.knows("a")
    store.put(a_minute(DAY_0, b=0.25, a=0.5))
    for found in (store, MetricStore(database)):
        assert (read(found, "a", DAY_0, 1), read(found, "b", DAY_0, 1)) == ([0.5], [0.25])
    database.close()


def test_a_minute_is_one_transaction_however_many_jobs(tmp_path):
    begun: list[str] = []
    database = Database(tmp_path / "store.db", fault=begun.append)
    store = MetricStore(database)
    jobs = {f"job{number}": 0.5 for number in range(3 * CHUNK)}
    begun.clear()
    store.put(a_minute(DAY_0, **jobs))
    assert begun.count("commit") == 1
    assert count(database, MINUTES) == 3
    last = f"job{3 * CHUNK - 1}"
    assert read(MetricStore(database), last, DAY_0, 1) == [0.5]
    database.close()


def test_two_weeks_are_kept_and_then_forgotten(database):
    store = MetricStore(database)
    for day in range(KEEP_DAYS + 3):
        if day < 2:
            store.put(a_minute(DAY_0 + day * DAY, old=0.5, a=0.5))
        else:
            store.put(a_minute(DAY_0 + day * DAY, a=0.5))
        settle(store, DAY_0 + day * DAY + 500)
    last = DAY_0 + (KEEP_DAYS + 2) * DAY
    settle(store, last + 500)
    values = read(store, "a", DAY_0, (KEEP_DAYS + 2) * DAY + 1)[::DAY]
    assert shown(values) == [None, None] + [0.5] * (KEEP_DAYS + 1)
    assert store.knows("a") and not store.knows("old")
    assert not MetricStore(database).knows("old")
    with database.reading() as connection:
        assert connection.execute(sa.select(sa.func.min(BLOCKS.c.day))).scalar() == DAY_0 // DAY + 2


def test_a_name_that_comes_back_has_no_old_minutes(database):
    """Numbers are never given twice: what a slow reader still knows by an old one is not somebody else's."""
    store = MetricStore(database)
    store.put(a_minute(DAY_0, old=0.5))
    later = DAY_0 + 20 * DAY
    store.put(a_minute(later, a=0.5))
    settle(store, later)
    assert not store.knows("old")
    store.put(a_minute(later + 1, old=0.25, b=0.75))
    assert shown(read(store, "old", later, 2)) == [None, 0.25]
    with database.reading() as connection:
        rows = connection.execute(sa.select(NAMES.c.number).where(NAMES.c.kind == "job")).all()
    assert sorted(row[0] for row in rows) == [1, 2, 3]


def test_an_instance_that_only_reads_follows(database):
    writer, reader = MetricStore(database), MetricStore(database)
    for minute in range(3):
        writer.put(a_minute(DAY_0 + minute, a=0.5))
        reader.refresh()
    assert read(reader, "a", DAY_0, 3) == [0.5] * 3
    # While it does not look, most of it is sealed.
    writer.put(*(a_minute(DAY_0 + minute, a=0.25) for minute in range(3, 2 * SEAL_EVERY)))
    settle(writer, DAY_0 + 2 * SEAL_EVERY)
    reader.refresh()
    assert read(reader, "a", DAY_0, 2 * SEAL_EVERY) == [0.5] * 3 + [0.25] * (2 * SEAL_EVERY - 3)


@pytest.mark.parametrize("back", [1, 10, 100, RING + 10])
def test_a_clock_that_was_ahead_is_forgotten(database, back: int):
    store, other = MetricStore(database), MetricStore(database)
    store.put(*(a_minute(DAY_0 + minute, a=0.5) for minute in range(20)))
    other.refresh()
    store.put(a_minute(DAY_0 + 19 - back, a=0.25))
    other.refresh()
    for found in (store, other, MetricStore(database)):
        assert shown(read(found, "a", DAY_0 + 19 - back, back + 1)) == [0.25] + [None] * back
    store.put(a_minute(DAY_0 + 20 - back, a=0.75))
    other.refresh()
    for found in (store, other, MetricStore(database)):
        assert shown(read(found, "a", DAY_0 + 19 - back, 2)) == [0.25, 0.75]


def test_a_clock_far_ahead_leaves_the_past_to_be_sealed(database):
    store = MetricStore(database)
    store.put(a_minute(DAY_0, a=0.5))
    later = DAY_0 + 2 * DAY
    store.put(a_minute(later, a=0.25))
    settle(store, later + 1)
    assert shown(read(store, "a", DAY_0, 1)) == [0.5] and shown(read(store, "a", later, 1)) == [0.25]


def test_a_damaged_minute_costs_only_itself(database):
    store = MetricStore(database)
    store.put(*(a_minute(DAY_0 + minute, a=0.5) for minute in range(SEAL_EVERY + OPEN_MIN)))
    with database.transaction() as connection:
        connection.execute(sa.update(MINUTES).where(MINUTES.c.minute == DAY_0 + 1).values(points=b"x"))
    store = MetricStore(database)
    assert shown(read(store, "a", DAY_0, 3)) == [0.5, None, 0.5]
    settle(store, DAY_0 + SEAL_EVERY + OPEN_MIN)
    assert shown(read(MetricStore(database), "a", DAY_0, 3)) == [0.5, None, 0.5]


def test_damage_is_told_and_not_shown_as_numbers(database):
    store = MetricStore(database)
    store.put(*(a_minute(DAY_0 + minute, a=minute / 400) for minute in range(SEAL_EVERY + OPEN_MIN)))
    settle(store, DAY_0 + SEAL_EVERY + OPEN_MIN)
    with database.transaction() as connection:
        connection.execute(sa.update(BLOCKS).values(points=b"\x01damaged"))
    with pytest.raises(CorruptData):
        read(MetricStore(database), "a", DAY_0, 10)
    wanted = MetricQuery(metrics=("busy",), minutes=200)
    asked = Retriever(MetricStore(database)).frames(["a", "b"], wanted, now_ms=(DAY_0 + 300) * 60_000)
    assert "cannot be read" in asked["a"].reason and "no metrics yet" in asked["b"].reason
    later = DAY_0 + 2 * SEAL_EVERY + OPEN_MIN
    store.put(*(a_minute(minute, a=0.5) for minute in range(DAY_0 + 300, later)))
    settle(store, later)  # goes on with the same day
    assert shown(read(MetricStore(database), "a", later - 3, 3)) == [0.5] * 3
