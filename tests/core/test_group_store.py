"""Claims about writes that go together: each is as alone as before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from penstock.core.errors import ConfigError, OutcomeUnknown, PenstockError, StoreUnavailable
from penstock.core.group_store import GroupedWrites
from penstock.core.quick_store import QuickConnection, insert_all, keep_ahead, later, taken_ahead
from penstock.core.sql_store import COUNTERS, Database, current_value, next_value
from tests.waiting import LIMIT_S, until

Work = Callable[[Any], Any]
_PUT = insert_all(COUNTERS)


class Desk:
    """Writes that wait behind one that is held open, so that they go together."""

    def __init__(self, database: Database) -> None:
        self.database, self.writes = database, GroupedWrites(database)
        self.threads = ThreadPoolExecutor(20)

    def together(self, *works: Work) -> list[Any]:
        """What came of each: its answer, or its error."""
        is_held, may_go = threading.Event(), threading.Event()

        def hold(connection: Any) -> None:
            is_held.set()
            may_go.wait(LIMIT_S)

        first = self.threads.submit(self.writes.run, hold)
        assert is_held.wait(LIMIT_S)
        futures = list[Future[Any]]()
        for number, work in enumerate(works):
            futures.append(self.threads.submit(self.writes.run, work))
            until(lambda number=number: len(self.writes._waiting) > number)  # in this order
        may_go.set()
        first.result(LIMIT_S)
        return [future.exception(LIMIT_S) or future.result(LIMIT_S) for future in futures]

    def value(self, counter: str) -> int:
        with self.database.reading() as connection:
            return current_value(connection, counter)


@pytest.fixture
def database(place: Path | str | None) -> Iterator[Database]:
    database = Database(place)
    yield database
    database.close()


@pytest.fixture
def desk(database: Database):
    desk = Desk(database)
    yield desk
    desk.threads.shutdown()


def count(counter: str, log: list[Any] | None = None) -> Work:
    def work(connection: Any) -> int:
        if log is not None:
            log.append(connection)
        return next_value(connection, counter)

    return work


def refuse(what: str, *, after: str = "") -> Work:
    def work(connection: Any) -> None:
        if after:
            next_value(connection, after)
        raise ConfigError(what, why="a test", fix="none")

    return work


def test_what_waits_goes_in_one_transaction_in_its_order(desk: Desk):
    log: list[Any] = []
    assert desk.together(*[count("a", log) for _ in range(5)]) == [1, 2, 3, 4, 5]
    assert len({id(connection) for connection in log}) == 1 and desk.value("a") == 5


def test_more_than_fit_go_in_several(desk: Desk):
    assert desk.together(*[count("a") for _ in range(19)]) == list(range(1, 20))


def test_one_that_is_refused_before_it_wrote_is_refused_alone(desk: Desk):
    log: list[Any] = []
    first, second, third = desk.together(count("a", log), refuse("no"), count("a", log))
    assert (first, str(second.what), third) == (1, "no", 2) and len(log) == 2


def test_one_that_fails_after_it_wrote_leaves_nothing_and_takes_nobody_with_it(desk: Desk):
    first, second, third = desk.together(count("a"), refuse("no", after="b"), count("a"))
    assert isinstance(second, ConfigError) and {first, third} == {1, 2}
    assert (desk.value("a"), desk.value("b")) == (2, 0)


def test_what_was_left_for_later_and_fails_is_the_trouble_of_who_asked(desk: Desk):
    def twice(connection: Any) -> None:
        for _ in range(2):
            later(connection, _PUT, {"name": "same", "value": 1})

    first, second, third = desk.together(count("a"), twice, count("a"))
    assert isinstance(second, PenstockError) and {first, third} == {1, 2}
    assert (desk.value("a"), desk.value("same")) == (2, 0)


def test_a_write_left_for_later_is_seen_by_the_next_statement(desk: Desk):
    def work(connection: Any) -> int:
        later(connection, _PUT, {"name": "x", "value": 7})
        return current_value(connection, "x")

    assert desk.together(work, lambda connection: current_value(connection, "x")) == [7, 7]


@pytest.mark.parametrize(
    ("point", "error"),
    [("begin", StoreUnavailable), ("commit", StoreUnavailable), ("committed", OutcomeUnknown)],
)
def test_a_store_that_goes_away_is_told_to_all_and_nothing_is_written_twice(
    database: Database, point: str, error: type[StoreUnavailable], monkeypatch
):
    desk, points = Desk(database), list[str]()

    def fault(now: str) -> None:
        points.append(now)
        # The first transaction holds the others; the second is theirs.
        if now == point and points.count(point) == 2:
            raise error("away", why="a test", fix="wait")

    monkeypatch.setattr(database, "_fault", fault)
    found = desk.together(count("a"), count("a"), count("a"))
    assert [type(item) for item in found] == [error] * 3
    assert desk.value("a") == (3 if point == "committed" else 0)
    desk.threads.shutdown()


def test_a_refusal_is_not_told_when_what_it_was_decided_on_was_not_written(database: Database, monkeypatch):
    desk, points = Desk(database), list[str]()

    def fault(now: str) -> None:
        points.append(now)
        if now == "commit" and points.count(now) == 2:
            raise StoreUnavailable("away", why="a test", fix="wait")

    def refuse_what_is_there(connection: Any) -> None:
        raise ConfigError(f"it is {current_value(connection, 'a')}", why="a test", fix="none")

    monkeypatch.setattr(database, "_fault", fault)
    found = desk.together(count("a"), refuse_what_is_there)
    assert [type(item) for item in found] == [StoreUnavailable] * 2
    desk.threads.shutdown()


def test_a_single_writer_has_its_own_transaction(desk: Desk):
    assert desk.writes.run(count("a")) == 1
    with pytest.raises(ConfigError):
        desk.writes.run(refuse("no", after="a"))
    assert desk.writes.run(count("a")) == 2


def test_statements_through_sqlalchemy_count_as_writes(desk: Desk):
    def work(connection: Any) -> None:
        connection.execute(sa.insert(COUNTERS).values(name="x", value=1))
        raise ConfigError("no", why="a test", fix="none")

    first, _ = desk.together(count("a"), work)
    assert (first, desk.value("a"), desk.value("x")) == (1, 1, 0)


def put(name: str, value: int) -> Work:
    return lambda connection: later(connection, _PUT, {"name": name, "value": value})


def test_what_a_server_prepared_outlives_a_transaction_that_is_undone(database: Database, desk: Desk):
    assert desk.together(put("one", 1), put("two", 2)) == [None, None]
    with pytest.raises(ConfigError), database.transaction() as connection:
        later(connection, _PUT, {"name": "never", "value": 1})
        raise ConfigError("no", why="a test", fix="nothing")
    assert desk.together(put("three", 3), put("four", 4)) == [None, None]
    assert [desk.value(name) for name in ("one", "two", "three", "four", "never")] == [1, 2, 3, 4, 0]


def test_behind_a_pooler_statements_are_sent_whole(postgres: Any, monkeypatch: pytest.MonkeyPatch):
    """Plan: the server connection forgets between two transactions, as if it were another one."""
    monkeypatch.setattr(QuickConnection, "prepares", True)
    database = Database(postgres.new_database())
    desk = Desk(database)
    desk.writes.run(put("one", 1))
    with database.transaction() as connection:
        connection.exec_driver_sql("DEALLOCATE ALL")
    with pytest.raises(StoreUnavailable, match="does not exist"):
        desk.writes.run(put("two", 2))
    for name in ("two", "three"):
        desk.writes.run(put(name, 2))
    assert [desk.value(name) for name in ("one", "two", "three")] == [1, 2, 2]
    desk.threads.shutdown()
    database.close()


def test_a_row_that_must_be_changed_and_is_not_undoes_everything(database: Database, desk: Desk):
    change = (
        sa.update(COUNTERS)
        .where(COUNTERS.c.name == sa.bindparam("this"))
        .values(value=sa.bindparam("to"))
        .execution_options(made_once=True)
    )

    def raise_to(name: str, value: int) -> Work:
        def work(connection: Any) -> None:
            lost = ConfigError(f"{name} is not there", why="a test", fix="nothing")
            later(connection, change, {"this": name, "to": value}, otherwise=lambda: lost)

        return work

    desk.writes.run(count("there"))
    found = desk.together(raise_to("there", 5), raise_to("missing", 6), count("other"))
    assert found[0] is None and found[2] == 1
    assert isinstance(found[1], ConfigError) and found[1].what == "missing is not there"
    assert desk.value("there") == 5 and desk.value("other") == 1


def test_what_was_read_ahead_is_given_once_and_not_after_a_change(database: Database):
    with database.transaction() as connection:
        keep_ahead(connection, ("kind", "name"), 7)
        assert taken_ahead(connection, ("kind", "name")) == (7,)
        assert taken_ahead(connection, ("kind", "name")) is None
