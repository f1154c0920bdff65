"""Exclusions as a table: any control plane writes them, the active Shard Manager reads them every round."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.core.journal import Entry
from penstock.core.journal_store import JournalStore
from penstock.core.quick_store import MADE_ONCE
from penstock.core.sql_store import METADATA, NAME, Database, upsert, values_of
from penstock.tasks.exclusions import LONGEST_MS, Exclusion

EXCLUSIONS = sa.Table(
    "exclusions",
    METADATA,
    sa.Column("subject", NAME, primary_key=True),
    sa.Column("container", NAME, primary_key=True),
    sa.Column("birth", sa.String, nullable=False),
    sa.Column("until_ms", sa.BigInteger, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
)
_COLUMNS = ("subject", "container", "birth", "until_ms", "reason")
_READ = (
    sa.select(*(EXCLUSIONS.c[name] for name in _COLUMNS))
    .order_by(EXCLUSIONS.c.subject, EXCLUSIONS.c.container)
    .execution_options(**MADE_ONCE)
)


class ExclusionStore:
    """What jobs are kept away from. What is over is swept with the next write."""

    def __init__(self, database: Database, journal: JournalStore) -> None:
        self._database, self._journal = database, journal

    def put(self, exclusions: Sequence[Exclusion], entry: Entry) -> None:
        """Begin or prolong exclusions; the entry says why, in the same transaction."""
        with self._database.transaction() as connection:
            connection.execute(sa.delete(EXCLUSIONS).where(EXCLUSIONS.c.until_ms <= entry.at_ms))
            rows = [values_of(exclusion) for exclusion in exclusions]
            upsert(connection, EXCLUSIONS, rows, replace=("birth", "until_ms", "reason"))
            self._journal.append(connection, entry)

    def lift(self, job: str, entry: Entry) -> int:
        """End all of a job and of its tasks now; returns how many there were."""
        with self._database.transaction() as connection:
            mine = [item for item in _read(connection) if item.job == job]
            for item in mine:
                is_it = (EXCLUSIONS.c.subject == item.subject) & (EXCLUSIONS.c.container == item.container)
                connection.execute(sa.delete(EXCLUSIONS).where(is_it))
            if mine:
                self._journal.append(connection, entry)
            return len(mine)

    def current(self, now_ms: Millis) -> tuple[Exclusion, ...]:
        """Those that hold now. One that ends later than any may was written by a wrong clock."""
        with self._database.reading() as connection:
            found = _read(connection)
        return tuple(item for item in found if now_ms < item.until_ms <= now_ms + LONGEST_MS)


def _read(connection: sa.Connection) -> tuple[Exclusion, ...]:
    return tuple(Exclusion(**dict(zip(_COLUMNS, row, strict=True))) for row in connection.execute(_READ))
