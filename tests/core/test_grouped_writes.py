"""Claims about writes that share a transaction: each succeeds or fails by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from penstock.core.errors import ConfigError, OutcomeUnknown, PenstockError, StoreUnavailable
from penstock.db.database import COUNTERS, Database, GroupedWrites, current_value, next_value
from tests.waiting import LIMIT_S, until

Work = Callable[[Any], Any]


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
    assert isinstance(second, ConfigError) and (first, third) == (1, 2)
    assert (desk.value("a"), desk.value("b")) == (2, 0)


def test_a_statement_that_the_store_refuses_is_the_error_of_its_caller_alone(desk: Desk):
    def twice(connection: Any) -> None:
        for _ in range(2):
            connection.execute(sa.insert(COUNTERS), {"name": "same", "value": 1})

    first, second, third = desk.together(count("a"), twice, count("a"))
    assert isinstance(second, StoreUnavailable) and (first, third) == (1, 2)
    assert (desk.value("a"), desk.value("same")) == (2, 0)


def test_a_bug_in_one_write_is_raised_to_its_caller_alone(desk: Desk):
    def broken(connection: Any) -> None:
        next_value(connection, "b")
        raise ZeroDivisionError

    first, second, third = desk.together(count("a"), broken, count("a"))
    assert isinstance(second, ZeroDivisionError) and (first, third) == (1, 2)
    assert desk.value("b") == 0


def test_a_store_that_undoes_the_whole_transaction_fails_all_of_them(tmp_path: Path):
    """Plan: a statement that rolls the transaction back, as SQLite does by itself when the disk is full."""
    database = Database(tmp_path / "store.db")
    desk = Desk(database)

    def undo(connection: Any) -> None:
        connection.exec_driver_sql("INSERT OR ROLLBACK INTO counters VALUES ('a', 1)")

    found = desk.together(count("a"), undo, count("b"))
    assert all(isinstance(item, PenstockError) for item in found)
    assert (desk.value("a"), desk.value("b")) == (0, 0)
    assert desk.writes.run(count("a")) == 1
    desk.threads.shutdown()
    database.close()


def test_a_connection_that_ends_fails_all_of_them(postgres: Any):
    database = Database(postgres.new_database())
    desk = Desk(database)

    def end(connection: Any) -> None:
        connection.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")

    found = desk.together(count("a"), end, count("b"))
    assert all(isinstance(item, StoreUnavailable) for item in found)
    assert (desk.value("a"), desk.value("b")) == (0, 0)
    assert desk.writes.run(count("a")) == 1
    desk.threads.shutdown()
    database.close()


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
