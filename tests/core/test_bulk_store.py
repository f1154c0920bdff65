from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from penstock.core.errors import StoreUnavailable
from penstock.db.bulk import ByName, insert_rows, is_one_of, update_rows, update_rows_if
from penstock.db.database import COUNTERS, Database
from penstock.jobs.running_store import PLANS, RUNNING

ODD = ["tab\tline\nback\\slash", "quote'\"", "\\N", "é\U0001f600", "%s $1 ?", "", "\x1f", "a\rb"]
COLUMNS = tuple(column.name for column in RUNNING.columns)


@pytest.fixture
def database(place: Path | str | None) -> Iterator[Database]:
    database = Database(place)
    yield database
    database.close()


def running(job: str, version: int, text: str = "{}") -> tuple[object, ...]:
    return (job, "birth", version, 1, 1, text, 1, "[0]", 0, "running", 0)


def counters(database: Database) -> dict[str, int]:
    with database.reading() as connection:
        return dict(connection.execute(sa.select(COUNTERS.c.name, COUNTERS.c.value)).all())


def test_rows_arrive_as_they_were_given(database: Database) -> None:
    rows = [(name, number) for number, name in enumerate(ODD)]
    with database.transaction() as connection:
        insert_rows(connection, COUNTERS, ("name", "value"), rows)
        insert_rows(connection, COUNTERS, ("name", "value"), [])
    assert counters(database) == dict(rows)


@pytest.mark.parametrize("names", [[odd] for odd in ODD] + [["plain", odd] for odd in ODD], ids=repr)
def test_one_odd_value_among_plain_ones_arrives_as_it_is(database: Database, names: list[str]) -> None:
    with database.transaction() as connection:
        insert_rows(connection, COUNTERS, ("name", "value"), [(name, 1) for name in names])
        update_rows(connection, COUNTERS, ("name", "value"), [(name, 2**62) for name in names])
    assert counters(database) == dict.fromkeys(names, 2**62)


def test_rows_are_updated_by_their_key_and_others_stay(database: Database) -> None:
    columns = ("job", "version", "config")
    with database.transaction() as connection:
        insert_rows(connection, RUNNING, COLUMNS, [running(f"j{n}", n) for n in range(1000)])
    with database.transaction() as connection:
        rows = [("j7", 7777, '{"a":"é\\n \'%s\' \\u0000 ?"}'), ("j8", 2**62, "{}"), ("nobody", 5, "{}")]
        update_rows(connection, RUNNING, columns, rows)
        update_rows(connection, RUNNING, columns, [])
    with database.reading() as connection:
        query = sa.select(RUNNING.c.job, RUNNING.c.version, RUNNING.c.config, RUNNING.c.birth)
        found = {job: tuple(rest) for job, *rest in connection.execute(query)}
    assert len(found) == 1000
    assert found["j7"] == (7777, {"a": "é\n '%s' \x00 ?"}, "birth")
    assert (found["j8"], found["j9"]) == ((2**62, {}, "birth"), (9, {}, "birth"))


def test_many_names_are_one_parameter_whatever_is_in_them(database: Database) -> None:
    with database.transaction() as connection:
        insert_rows(connection, COUNTERS, ("name", "value"), [(name, 1) for name in [*ODD, "other"]])
    for names in (ODD, [], ["nobody"], [f"n{number}" for number in range(20_000)] + ["other"]):
        with database.reading() as connection:
            query = sa.select(COUNTERS.c.name).where(is_one_of(connection, COUNTERS.c.name, names))
            found = set(connection.execute(query).scalars())
            rows = ByName(sa.select(COUNTERS.c.name), COUNTERS.c.name).rows(connection, names)
        assert found == {*ODD, "other"} & set(names) == {row[0] for row in rows}


def test_one_name_is_found_too(database: Database) -> None:
    query = ByName(sa.select(COUNTERS), COUNTERS.c.name)
    with database.transaction() as connection:
        insert_rows(connection, COUNTERS, ("name", "value"), [(name, 1) for name in ODD])
    for name in (*ODD, "nobody"):
        with database.reading() as connection:
            assert [row[0] for row in query.rows(connection, [name])] == [name] * (name in ODD)


def test_a_refused_row_refuses_all_of_them_and_says_so(database: Database) -> None:
    with database.transaction() as connection:
        insert_rows(connection, COUNTERS, ("name", "value"), [("a", 1)])
    with pytest.raises(StoreUnavailable), database.transaction() as connection:
        insert_rows(connection, COUNTERS, ("name", "value"), [("b", 1), ("a", 2)])
    assert counters(database) == {"a": 1}


def test_rows_that_moved_or_are_in_another_table_are_left_as_they_are(database: Database) -> None:
    if not database.is_shared:
        pytest.skip("only PostgreSQL looks and writes in one statement")
    plan = {name: 0 for name in ("id", "generation", "expected_version", "running_version", "attempts")}
    plan |= {name: "" for name in ("job", "birth", "step", "error", "reason")}
    plan |= {"mapping": [], "abandoned": [], "started_ms": 0, "updated_ms": 0}
    with database.transaction() as connection:
        insert_rows(connection, RUNNING, COLUMNS, [running(name, 1) for name in ("same", "planned", *ODD)])
        insert_rows(connection, RUNNING, COLUMNS, [running("moved", 2)])
        connection.execute(sa.insert(PLANS), plan | {"job": "planned"})
    columns, names = ("job", "version"), ["same", "moved", "planned", "nobody", *ODD]
    with database.transaction() as connection:
        rows = [(name, 9) for name in names]
        had = [1] * len(names)
        assert update_rows_if(connection, RUNNING, columns, rows, at=("version", had), unless_in=PLANS) == {
            "same",
            *ODD,
        }
        assert update_rows_if(connection, RUNNING, columns, [], at=("version", []), unless_in=PLANS) == set()
    with database.reading() as connection:
        found = dict(connection.execute(sa.select(RUNNING.c.job, RUNNING.c.version)).all())
    assert found == dict.fromkeys(["same", *ODD], 9) | {"moved": 2, "planned": 1}
