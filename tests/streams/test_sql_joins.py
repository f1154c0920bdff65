"""Joins written in SQL give the rows that SQLite gives for the same text, whichever side BETWEEN speaks of."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import testing
from penstock.core.errors import PipelineError
from penstock.streams.dsl.sql import pipeline_from_sql

CATEGORIES = [
    {"name": name, "partitions": 2, "columns": [["k", "string"], ["n", "bigint"]], "watermark": "injector"}
    for name in ("a", "b", "c")
]
Records = list[tuple[int, str | None, int]]  # time, key, number


def rows_of(sql: str, **records: Records) -> Counter[tuple[Any, ...]]:
    run = testing.PipelineRun(pipeline_from_sql(sql, file="p.sql", name="p"), *CATEGORIES)
    with run.batch():
        for category, found in records.items():
            for ts, key, number in found:
                run.record(category, ts, key, k=key, n=number)
    run.close()
    return Counter(tuple(row.values()) for row in run.outputs("out"))


def rows_of_sqlite(select: str, **records: Records) -> Counter[tuple[Any, ...]]:
    """The same text, with its intervals as numbers of milliseconds."""
    connection = sqlite3.connect(":memory:")
    for name, found in records.items():
        connection.execute(f"CREATE TABLE {name} (event_time INTEGER, k TEXT, n INTEGER)")
        connection.executemany(f"INSERT INTO {name} VALUES (?, ?, ?)", found)
    text = re.sub(r"INTERVAL (\d+) SECONDS", lambda found: str(int(found[1]) * 1000), select)
    found = Counter(connection.execute(text.replace("FULL JOIN", "LEFT JOIN")).fetchall())
    if "FULL JOIN" in text:  # written out: older versions of SQLite have none
        right = text[text.index("(") : text.index(" ON ")]
        turned = f"SELECT a.n, bn FROM {right} LEFT JOIN a {text[text.index(' ON ') :]}"
        found.update(row for row in connection.execute(turned) if row[0] is None)
    connection.close()
    return found


def a_join(condition: str, kind: str = "JOIN", columns: str = "a.n AS a, bn") -> str:
    return f"SELECT {columns} FROM a {kind} (SELECT k, n AS bn FROM b) b ON {condition}"


def for_sqlite(select: str) -> str:
    """SQLite has no event time beside the columns: a query in FROM hands it on."""
    return select.replace("(SELECT k, n AS bn FROM b)", "(SELECT event_time, k, n AS bn FROM b)")


def test_between_speaks_of_the_side_that_it_names():
    """a at 10 s is between b and b + 10 s for b at 4 s, not for b at 14 s; and the other way round."""
    records: dict[str, Records] = {"a": [(10_000, "x", 10)], "b": [(4_000, "x", 4), (14_000, "x", 14)]}
    left = a_join("a.k = b.k AND a.event_time BETWEEN b.event_time AND b.event_time + INTERVAL 10 SECONDS")
    right = a_join("a.k = b.k AND b.event_time BETWEEN a.event_time AND a.event_time + INTERVAL 10 SECONDS")
    assert rows_of(f"INSERT INTO out {left}", **records) == {(10, 4): 1}
    assert rows_of(f"INSERT INTO out {right}", **records) == {(10, 14): 1}
    assert rows_of_sqlite(for_sqlite(left), **records) == {(10, 4): 1}


def test_of_two_betweens_in_one_on_both_hold():
    """Plan: one of the two alone pairs 4 s, the other alone 14 s; 9 s and 11 s are within both."""
    times = (4_000, 9_000, 11_000, 14_000)
    records: dict[str, Records] = {"a": [(10_000, "x", 10)], "b": [(ts, "x", ts) for ts in times]}
    wide = "BETWEEN a.event_time - INTERVAL 8 SECONDS AND a.event_time + INTERVAL 1 SECONDS"
    late = "BETWEEN b.event_time - INTERVAL 8 SECONDS AND b.event_time + INTERVAL 1 SECONDS"
    parts = (f"b.event_time {wide}", f"a.event_time {late}")
    for first, second in (parts, parts[::-1]):
        select = a_join(f"a.k = b.k AND {first} AND {second}")
        assert rows_of(f"INSERT INTO out {select}", **records) == {(10, 9_000): 1, (10, 11_000): 1}
        assert rows_of_sqlite(for_sqlite(select), **records) == {(10, 9_000): 1, (10, 11_000): 1}


REFUSED = {
    "one side with itself": (
        "a.event_time BETWEEN a.event_time AND a.event_time + INTERVAL 10 SECONDS",
        "does not bound the time of one side by the time of the other",
    ),
    "bounds of two sides": (
        "a.event_time BETWEEN b.event_time AND a.event_time + INTERVAL 10 SECONDS",
        "does not bound the time of one side by the time of the other",
    ),
    "a table that is not there": (
        "x.event_time BETWEEN b.event_time AND b.event_time + INTERVAL 10 SECONDS",
        "x.event_time is not the time of a side: write a.event_time or b.event_time",
    ),
    "no table": (
        "event_time BETWEEN b.event_time AND b.event_time + INTERVAL 10 SECONDS",
        "event_time is not the time of a side: write a.event_time or b.event_time",
    ),
    "a range that begins later": (
        "a.event_time BETWEEN b.event_time + INTERVAL 5 SECONDS AND b.event_time + INTERVAL 10 SECONDS",
        "is on the wrong side: the lower bound is an event time minus an INTERVAL",
    ),
    "a range that ends before": (
        "a.event_time BETWEEN b.event_time - INTERVAL 5 SECONDS AND b.event_time - INTERVAL 1 SECONDS",
        "is on the wrong side",
    ),
    "an ordinary column": (
        "a.n BETWEEN b.event_time AND b.event_time + INTERVAL 1 SECONDS",
        "event times of",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bounds_that_cannot_be_used_are_told(case: str):
    between, said = REFUSED[case]
    with pytest.raises(PipelineError) as caught:
        rows_of(f"INSERT INTO out {a_join(f'a.k = b.k AND {between}')}")
    assert said in caught.value.why
    assert caught.value.fix


def test_two_sides_of_one_name_are_told():
    with pytest.raises(PipelineError, match="both sides are called a") as caught:
        rows_of(
            "INSERT INTO out SELECT a.n AS n FROM a JOIN a ON a.k = a.k AND a.event_time BETWEEN a.event_time "
            "AND a.event_time + INTERVAL 1 SECONDS"
        )
    assert "AS b" in caught.value.fix


def test_after_a_join_the_time_of_one_table_is_not_known_and_a_query_in_from_gives_the_later_one():
    records: dict[str, Records] = {
        "a": [(10_000, "x", 1)], "b": [(14_000, "x", 2)], "c": [(17_000, "x", 3), (23_000, "x", 4)]
    }  # fmt: skip
    near = "BETWEEN {0}.event_time AND {0}.event_time + INTERVAL 5 SECONDS"
    pair = a_join(f"a.k = b.k AND b.event_time {near.format('a')}", columns="a.k AS k, a.n AS an, bn")
    third = "JOIN (SELECT k, n AS cn FROM c) c ON {0}.k = c.k AND c.event_time " + near
    with pytest.raises(PipelineError, match=r"a\.event_time is not known after a join") as caught:
        rows_of(f"INSERT INTO out {pair.replace('a.k AS k, a.n AS an, bn', 'cn')} {third.format('a')}")
    assert "FROM (SELECT" in caught.value.fix
    nested = f"INSERT INTO out SELECT an, bn, cn FROM ({pair}) ab {third.format('ab')}"
    assert rows_of(nested, **records) == {(1, 2, 3): 1}


@st.composite
def conditions(draw: st.DrawFn) -> str:
    """Equal keys and one to three BETWEENs, each of either side, in any order."""
    parts = [draw(st.sampled_from(["a.k = b.k", "b.k = a.k"]))]
    for _ in range(draw(st.integers(1, 3))):
        one, other = draw(st.permutations(["a", "b"]))
        low, high = draw(st.integers(0, 6)), draw(st.integers(0, 6))
        lowest = f"{other}.event_time - INTERVAL {low} SECONDS" if low else f"{other}.event_time"
        highest = f"{other}.event_time + INTERVAL {high} SECONDS" if high else f"{other}.event_time"
        parts.append(f"{one}.event_time BETWEEN {lowest} AND {highest}")
    return " AND ".join(draw(st.permutations(parts)))


def some_records(first: int) -> st.SearchStrategy[Records]:
    """Times by half a second around the bounds; keys with NULL and '' among them."""
    pairs = st.lists(st.tuples(st.integers(0, 24), st.sampled_from(["x", "y", "", None])), max_size=7)
    return pairs.map(
        lambda found: [(half * 500, key, first + number) for number, (half, key) in enumerate(found)]
    )


@given(
    condition=conditions(),
    kind=st.sampled_from(["JOIN", "LEFT JOIN", "FULL JOIN"]),
    a=some_records(0),
    b=some_records(100),
)
@settings(max_examples=150, deadline=None)
def test_joins_give_the_rows_of_sqlite(condition: str, kind: str, a: Records, b: Records):
    select = a_join(condition, kind)
    assert rows_of(f"INSERT INTO out {select}", a=a, b=b) == rows_of_sqlite(for_sqlite(select), a=a, b=b)
