from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from penstock.core.bulk_store import insert_rows, is_one_of, replace_rows
from penstock.core.errors import StoreUnavailable
from penstock.core.sql_store import COUNTERS, Database
from penstock.jobs.running_store import RUNNING

ODD = ["tab\tline\nback\\slash", "quote'\"", "\\N", "é\U0001f600", "%s $1 ?", ""]
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


def test_rows_are_replaced_by_their_key_and_others_stay(database: Database) -> None:
    with database.transaction() as connection:
        replace_rows(connection, RUNNING, COLUMNS, [running(f"j{n}", n) for n in range(1000)])
    with database.transaction() as connection:
        replace_rows(connection, RUNNING, COLUMNS, [running("j7", 7777, '{"a":"é\\n"}'), running("new", 5)])
        replace_rows(connection, RUNNING, COLUMNS, [])
    with database.reading() as connection:
        query = sa.select(RUNNING.c.job, RUNNING.c.version, RUNNING.c.config)
        found = {job: (version, config) for job, version, config in connection.execute(query)}
    assert len(found) == 1001
    assert (found["j7"], found["new"], found["j8"]) == ((7777, {"a": "é\n"}), (5, {}), (8, {}))


def test_many_names_are_one_parameter_whatever_is_in_them(database: Database) -> None:
    with database.transaction() as connection:
        insert_rows(connection, COUNTERS, ("name", "value"), [(name, 1) for name in [*ODD, "other"]])
    for names in (ODD, [], ["nobody"], [f"n{number}" for number in range(20_000)] + ["other"]):
        with database.reading() as connection:
            query = sa.select(COUNTERS.c.name).where(is_one_of(connection, COUNTERS.c.name, names))
            found = set(connection.execute(query).scalars())
        assert found == {*ODD, "other"} & set(names)


def test_a_refused_row_refuses_all_of_them_and_says_so(database: Database) -> None:
    with database.transaction() as connection:
        insert_rows(connection, COUNTERS, ("name", "value"), [("a", 1)])
    with pytest.raises(StoreUnavailable), database.transaction() as connection:
        insert_rows(connection, COUNTERS, ("name", "value"), [("b", 1), ("a", 2)])
    assert counters(database) == {"a": 1}
