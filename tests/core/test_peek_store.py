"""Claims about a look without a transaction: what was acknowledged is seen, and a broken connection is replaced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from penstock.core.errors import StoreUnavailable
from penstock.core.peek_store import Peek
from penstock.core.sql_store import COUNTERS, Database, next_value
from tests.postgres import PostgresServer

VALUE = Peek(sa.select(COUNTERS.c.name, COUNTERS.c.value).where(COUNTERS.c.name == sa.bindparam("name")))
ODD = ["tab\tline\n", "quote'\"", "%s $1 ? :x", "é\U0001f600", ""]


@pytest.fixture
def database(place: Path | str | None) -> Iterator[Database]:
    database = Database(place)
    yield database
    database.close()


def count(database: Database, name: str) -> int:
    with database.transaction() as connection:
        return next_value(connection, name)


@pytest.mark.parametrize("name", ODD)
def test_what_was_acknowledged_is_seen(database: Database, name: str):
    assert list(database.peek(VALUE, name)) == []
    for _ in range(3):
        value = count(database, name)
        assert [tuple(row) for row in database.peek(VALUE, name)] == [(name, value)]


def test_threads_that_come_and_go_leave_no_connections(postgres: PostgresServer):
    database = Database(postgres.new_database())
    count(database, "a")
    for _ in range(150):  # more than a server lets in
        thread = threading.Thread(target=lambda: database.peek(VALUE, "a"))
        thread.start()
        thread.join()
    assert database.peek(VALUE, "a")[0][1] == 1
    database.close()


def test_threads_look_beside_each_other(database: Database):
    count(database, "a")
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(tuple(database.peek(VALUE, "a")[0]))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [("a", 1)] * 8


def test_a_look_never_sees_half_of_a_write(database: Database):
    with database.transaction() as connection:
        next_value(connection, "a")
        if database.is_shared:  # elsewhere a look may wait for the write, or has memory's only connection
            assert list(database.peek(VALUE, "a")) == []
    assert database.peek(VALUE, "a")[0][1] == 1


def test_a_connection_that_was_ended_is_replaced(postgres: PostgresServer):
    database = Database(postgres.new_database())
    count(database, "a")
    assert database.peek(VALUE, "a")[0][1] == 1
    postgres.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 'test_%' "
        "AND pid <> pg_backend_pid() AND state = 'idle'"
    )
    assert database.peek(VALUE, "a")[0][1] == 1
    database.close()


def test_a_store_that_is_away_is_named(tmp_path: Path):
    database = Database(tmp_path / "store.db")
    with database.transaction() as connection:
        connection.exec_driver_sql("DROP TABLE counters")
    with pytest.raises(StoreUnavailable) as caught:
        database.peek(VALUE, "a")
    assert caught.value.why and caught.value.fix
    database.close()
