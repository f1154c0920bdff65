"""The database under the control plane: all or nothing, counters without gaps, one active term per role."""

from __future__ import annotations

import sqlite3
import threading

import pytest
import sqlalchemy as sa

from penstock.core.errors import (
    CorruptData,
    DiskFull,
    Fenced,
    OutcomeUnknown,
    StoreUnavailable,
    translate_sqlite,
)
from penstock.db.database import Database, check_term, current_value, next_value, take_term


class Fault:
    """Raises once, at the point it is armed for."""

    def __init__(self) -> None:
        self.point: str | None = None
        self.seen: list[str] = []

    def __call__(self, point: str) -> None:
        self.seen.append(point)
        if point == self.point:
            self.point = None
            raise StoreUnavailable(f"fault at {point}")


def value_of(database: Database, counter: str) -> int:
    with database.transaction() as connection:
        return current_value(connection, counter)


def advance(database: Database, counter: str) -> int:
    with database.transaction() as connection:
        return next_value(connection, counter)


def test_a_counter_starts_at_one_and_never_skips(place):
    database = Database(place)
    assert value_of(database, "a") == 0
    assert [advance(database, "a") for _ in range(3)] == [1, 2, 3]
    assert advance(database, "b") == 1
    assert value_of(database, "a") == 3
    database.close()


def test_a_number_dies_with_its_transaction(place):
    database = Database(place)
    with pytest.raises(ZeroDivisionError), database.transaction() as connection:
        next_value(connection, "a")
        raise ZeroDivisionError
    assert advance(database, "a") == 1
    database.close()


@pytest.mark.parametrize(("point", "written"), [("begin", 0), ("commit", 0), ("committed", 1)])
def test_a_fault_before_the_commit_writes_nothing_and_one_after_it_everything(place, point, written):
    fault = Fault()
    database = Database(place, fault=fault)
    fault.point = point
    with pytest.raises(StoreUnavailable, match=point):
        advance(database, "a")
    assert value_of(database, "a") == written
    assert advance(database, "a") == written + 1  # and the database is usable afterwards
    database.close()


def test_the_fault_points_come_in_order(place):
    fault = Fault()
    database = Database(place, fault=fault)
    advance(database, "a")
    assert fault.seen == ["begin", "commit", "committed"]
    database.close()


def test_threads_never_get_the_same_number(place):
    database = Database(place)
    numbers: list[int] = []

    def work() -> None:
        numbers.extend(advance(database, "a") for _ in range(25))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 101))
    database.close()


def test_what_was_committed_is_there_after_reopening(tmp_path):
    first = Database(tmp_path / "control.db")
    advance(first, "a")
    first.close()
    second = Database(tmp_path / "control.db")
    assert value_of(second, "a") == 1
    second.close()


def test_two_processes_worth_of_connections_write_one_after_another(tmp_path):
    one, two = Database(tmp_path / "control.db"), Database(tmp_path / "control.db")
    assert [advance(one, "a"), advance(two, "a"), advance(one, "a")] == [1, 2, 3]
    one.close()
    two.close()


def test_an_acknowledged_write_is_on_disk(tmp_path):
    database = Database(tmp_path / "control.db")
    with database.transaction() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    database.close()


def test_the_newest_term_fences_every_older_one(place):
    database = Database(place)
    old = take_term(database, "shard_manager", "host-a")
    new = take_term(database, "shard_manager", "host-b")
    assert (old, new) == (1, 2)
    with database.transaction() as connection:
        check_term(connection, "shard_manager", new)
    with pytest.raises(Fenced) as caught, database.transaction() as connection:
        next_value(connection, "a")
        check_term(connection, "shard_manager", old)
    assert caught.value.what == "this shard_manager is no longer the active instance"
    assert "term is 1" in caught.value.why and "current term is 2" in caught.value.why
    assert value_of(database, "a") == 0  # what the fenced instance wrote is gone
    database.close()


def test_terms_of_different_roles_do_not_meet(place):
    database = Database(place)
    syncer = take_term(database, "state_syncer", "host-a")
    take_term(database, "shard_manager", "host-a")
    take_term(database, "shard_manager", "host-b")
    with database.transaction() as connection:
        check_term(connection, "state_syncer", syncer)
    database.close()


def test_a_term_nobody_took_is_fenced(place):
    database = Database(place)
    with pytest.raises(Fenced, match="syncer"), database.transaction() as connection:
        check_term(connection, "syncer", 1)
    database.close()


def test_a_refused_statement_is_a_store_error_and_writes_nothing(place):
    database = Database(place)
    with pytest.raises(StoreUnavailable), database.transaction() as connection:
        next_value(connection, "a")
        connection.execute(sa.text("INSERT INTO no_such_table VALUES (1)"))
    assert value_of(database, "a") == 0
    database.close()


def test_a_file_that_is_no_database_is_named_as_damage(tmp_path):
    path = tmp_path / "control.db"
    path.write_bytes(b"this is no database, " * 100)
    with pytest.raises(CorruptData) as caught:
        Database(path)
    assert caught.value.fix == "restore the file from a backup"


def test_a_full_disk_is_named_and_nothing_is_half_written(tmp_path):
    database = Database(tmp_path / "control.db")
    advance(database, "a")
    with database.transaction() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
    with database.transaction() as connection:
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
    with pytest.raises(DiskFull), database.transaction() as connection:
        next_value(connection, "a")
        connection.execute(sa.text("INSERT INTO counters VALUES (:name, 1)"), {"name": "x" * 100_000})
    assert value_of(database, "a") == 1
    database.close()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("SQLITE_FULL", DiskFull),
        ("SQLITE_CORRUPT_INDEX", CorruptData),
        ("SQLITE_NOTADB", CorruptData),
        ("SQLITE_BUSY_SNAPSHOT", StoreUnavailable),
        ("SQLITE_LOCKED", StoreUnavailable),
        ("SQLITE_IOERR_FSYNC", OutcomeUnknown),
        ("SQLITE_ERROR", StoreUnavailable),
    ],
)
def test_every_failure_of_sqlite_has_our_name_and_three_parts(name, kind):
    error = sqlite3.OperationalError("as SQLite says it")
    error.sqlite_errorname = name
    translated = translate_sqlite(error, "as SQLite says it")
    assert type(translated) is kind
    assert translated.what and translated.why == "as SQLite says it" and translated.fix


def test_only_a_failed_write_to_disk_leaves_the_outcome_open():
    busy = sqlite3.OperationalError("busy")
    busy.sqlite_errorname = "SQLITE_BUSY"
    assert not isinstance(translate_sqlite(busy, "busy"), OutcomeUnknown)
