"""The simulator's quick way to SQLite does what the real one does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from penstock.core.errors import Fenced, StoreUnavailable
from penstock.core.journal_store import JournalStore
from penstock.core.sql_store import Database, check_term, current_value, next_values, take_term
from penstock.sim.quick_store import QuickDatabase
from penstock.tasks.container_store import CONTAINERS
from penstock.tasks.messages import Heartbeat
from penstock.tasks.placement import Move, Placement
from penstock.tasks.shard_store import ShardStore


@pytest.fixture(params=[QuickDatabase, lambda: Database(None)], ids=["quick", "real"])
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    found = request.param()
    yield found
    found.close()


def life_of(database: Database) -> list[object]:
    """Registrations, beats, moves and a fail-over, and all that can be read in between."""
    store, seen = ShardStore(database, JournalStore(database)), list[object]()
    term = take_term(database, "shard_manager", "me")
    store.ensure_shards(4, term=term)
    for name in ("c1", "c2"):
        how = {"folder_id": "f", "host": "h", "pid": 7, "term": term, "at_ms": 5}
        seen.append(store.register(name, f"{name}-1", **how))
    gives = Placement(moves=tuple(Move(shard=n, source=None, target="c1", reason="new") for n in range(4)))
    seen.append(store.rearrange(lambda shards, containers: gives, term=term, at_ms=6))
    beat = Heartbeat(container="c1", incarnation="c1-1", sequence=1, capacity=(1.5, 2.0), engine_ready=True)
    seen += [store.beats([beat], term=term, at_ms=7), store.read(), store.containers()]
    seen += [store.renew("c1", "c1-1"), store.renew("c1", "other"), store.cordon(
        "c2", cordoned=True, draining=True, term=term, at_ms=8, reason="work")]  # fmt: skip
    renewals = next(row.renewals for row in store.containers() if row.name == "c1")
    nothing = Placement()
    seen.append(
        store.fail_over(
            "c1", "c1-1", renewals=renewals, plan=lambda *_: nothing, term=term, at_ms=9, reason="silent"
        )
    )
    return [*seen, store.read(), store.containers()]


def test_a_store_on_it_lives_as_on_the_real_one():
    assert life_of(QuickDatabase()) == life_of(Database(None))


def test_everything_in_a_transaction_or_nothing(database: Database):
    with database.transaction() as connection:
        assert list(next_values(connection, "n", 3)) == [1, 2, 3]
    with pytest.raises(ZeroDivisionError), database.transaction() as connection:
        next_values(connection, "n", 3)
        connection.execute(sa.delete(CONTAINERS))  # through SQLAlchemy, in the same transaction
        1 / 0  # noqa: B018
    with database.reading() as connection:
        assert current_value(connection, "n") == 3
    term = take_term(database, "role", "me")
    with database.transaction() as connection:
        check_term(connection, "role", term)
    take_term(database, "role", "another")
    with pytest.raises(Fenced), database.transaction() as connection:
        check_term(connection, "role", term)


@pytest.mark.parametrize("point", ["begin", "commit", "committed"])
def test_faults_strike_where_they_do_in_the_real_one(point: str):
    def values(kind: str) -> tuple[list[str], list[str], int]:
        met, heard, armed = list[str](), list[str](), list[bool]()

        def fault(at: str) -> None:
            met.append(at)
            if armed and at == point:
                raise StoreUnavailable("down")

        database = QuickDatabase(fault=fault) if kind == "quick" else Database(None, fault=fault)
        database.on_statement(lambda text: heard.append(text.split()[0]))
        armed.append(True)
        with pytest.raises(StoreUnavailable), database.transaction() as connection:
            next_values(connection, "n", 1)
        armed.clear()
        with database.reading() as connection:
            return (
                met,
                [word for word in heard if word in ("INSERT", "UPDATE")],
                current_value(connection, "n"),
            )

    assert values("quick") == values("real")
    assert values("quick")[2] == (1 if point == "committed" else 0)
