"""The journal keeps what was decided, in order, and only if the change it explains was made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import PenstockError
from penstock.core.journal import ENTRIES_MAX, Entry, Journal
from penstock.db.database import Database, current_value, next_value
from penstock.db.journal_store import JournalStore


def an_entry(**changes: Any) -> Entry:
    values: dict[str, Any] = {
        "at_ms": 1_000,
        "actor": "autoscaler",
        "kind": "rescale",
        "subject": "zeitgeist.count",
        "decision": "1 -> 3 tasks",
        "reason": "lag 120 s is over the SLO of 90 s",
        "data": {"lag_s": 120.0},
    }
    return Entry(**{**values, **changes})


@pytest.fixture
def database() -> Iterator[Database]:
    database = Database(None)
    yield database
    database.close()


@pytest.fixture
def journal(database: Database) -> Journal:
    return JournalStore(database)


def test_an_entry_comes_back_as_it_was_written_with_the_next_id(journal):
    journal.append(None, an_entry())
    journal.append(None, an_entry(actor="maria"))
    assert journal.entries() == (an_entry(id=1), an_entry(actor="maria", id=2))


def test_an_entry_stands_or_falls_with_the_callers_transaction(journal, database):
    with pytest.raises(ZeroDivisionError), database.transaction() as connection:
        next_value(connection, "jobs")
        journal.append(connection, an_entry())
        raise ZeroDivisionError
    assert journal.entries() == ()
    with database.transaction() as connection:
        next_value(connection, "jobs")
        journal.append(connection, an_entry())
    with database.transaction() as connection:
        assert current_value(connection, "jobs") == 1
    assert [entry.id for entry in journal.entries()] == [1]


def test_entries_are_found_by_subject_and_kind(journal):
    for subject, kind in (("a", "sync"), ("b", "sync"), ("a", "rescale")):
        journal.append(None, an_entry(subject=subject, kind=kind))
    assert [entry.id for entry in journal.entries("a")] == [1, 3]
    assert [entry.id for entry in journal.entries(kind="sync")] == [1, 2]
    assert [entry.id for entry in journal.entries("a", kind="sync")] == [1]
    assert journal.entries("nobody") == ()


def test_a_first_look_gives_the_newest_oldest_first(journal):
    for _ in range(5):
        journal.append(None, an_entry())
    assert [entry.id for entry in journal.entries(limit=2)] == [4, 5]


def test_following_on_skips_nothing(journal):
    for _ in range(7):
        journal.append(None, an_entry())
    seen, since = [], 1
    while page := journal.entries(since=since, limit=2):
        seen += [entry.id for entry in page]
        since = seen[-1]
    assert seen == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_below_one_gives_nothing(journal, limit):
    journal.append(None, an_entry())
    assert journal.entries(limit=limit) == ()


def test_one_answer_has_an_upper_bound(journal, database):
    with database.transaction() as connection:
        for _ in range(ENTRIES_MAX + 5):
            journal.append(connection, an_entry())
    assert len(journal.entries(limit=10**9)) == ENTRIES_MAX


def test_the_journal_is_there_after_reopening(tmp_path: Path):
    first = Database(tmp_path / "control.db")
    JournalStore(first).append(None, an_entry())
    first.close()
    second = Database(tmp_path / "control.db")
    assert JournalStore(second).entries() == (an_entry(id=1),)
    second.close()


@pytest.mark.parametrize("data", [{"x": object()}, {"x": float("nan")}, {"x": {1, 2}}])
def test_data_that_is_not_json_is_refused_and_nothing_is_written(journal, data):
    with pytest.raises(PenstockError, match="not JSON"):
        journal.append(None, an_entry(data=data))
    assert journal.entries() == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(data=st.dictionaries(st.text(), JSON, max_size=4), reason=st.text(st.characters(codec="utf-8")))
def test_any_json_and_any_text_come_back_unchanged(data, reason):
    database = Database(None)
    journal = JournalStore(database)
    journal.append(None, an_entry(data=data, reason=reason))
    (entry,) = journal.entries()
    database.close()
    assert entry.data == data and entry.reason == reason


def test_the_json_form_has_every_field():
    assert an_entry(id=7).to_json() == {
        "id": 7,
        "at_ms": 1_000,
        "actor": "autoscaler",
        "kind": "rescale",
        "subject": "zeitgeist.count",
        "decision": "1 -> 3 tasks",
        "reason": "lag 120 s is over the SLO of 90 s",
        "data": {"lag_s": 120.0},
    }
