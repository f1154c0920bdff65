"""The journal as a table of the control plane's database."""

from __future__ import annotations

import json
from dataclasses import replace

import sqlalchemy as sa

from penstock.core.errors import PenstockError
from penstock.core.journal import ENTRIES_MAX, Entry
from penstock.core.sql_store import METADATA, Database, next_value

JOURNAL = sa.Table(
    "journal",
    METADATA,
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
    sa.Column("actor", sa.String, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("subject", sa.String, nullable=False),
    sa.Column("decision", sa.String, nullable=False),
    sa.Column("reason", sa.String, nullable=False),
    sa.Column("data", sa.String, nullable=False),
    sa.Index("journal_by_subject", "subject", "id"),
)


class JournalStore:
    """A `Journal` next to the tables whose changes it explains."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def append(self, connection: sa.Connection | None, entry: Entry) -> Entry:
        """Write one entry inside the caller's transaction, or in one of its own when there is none."""
        data = _encode(entry)
        if connection is None:
            with self._database.transaction() as own:
                return _insert(own, entry, data)
        return _insert(connection, entry, data)

    def entries(
        self, subject: str | None = None, since: int = 0, limit: int = 100, *, kind: str | None = None
    ) -> tuple[Entry, ...]:
        """Entries with id > `since`, oldest first; without `since` the newest ones, oldest first."""
        query = sa.select(JOURNAL).where(JOURNAL.c.id > since).limit(max(0, min(limit, ENTRIES_MAX)))
        if subject is not None:
            query = query.where(JOURNAL.c.subject == subject)
        if kind is not None:
            query = query.where(JOURNAL.c.kind == kind)
        # Following on must not skip anything; a first look wants the latest.
        query = query.order_by(JOURNAL.c.id if since > 0 else JOURNAL.c.id.desc())
        with self._database.transaction() as connection:
            found = [_entry(row) for row in connection.execute(query)]
        return tuple(sorted(found, key=lambda entry: entry.id))


def _encode(entry: Entry) -> str:
    try:
        return json.dumps(dict(entry.data), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PenstockError(
            f"the journal entry about {entry.subject!r} cannot be written",
            why=f"its data is not JSON: {error}",
            fix="put only strings, finite numbers, booleans, lists and maps into `data`",
        ) from error


def _insert(connection: sa.Connection, entry: Entry, data: str) -> Entry:
    entry_id = next_value(connection, "journal")
    connection.execute(
        sa.insert(JOURNAL).values(
            id=entry_id,
            at_ms=entry.at_ms,
            actor=entry.actor,
            kind=entry.kind,
            subject=entry.subject,
            decision=entry.decision,
            reason=entry.reason,
            data=data,
        )
    )
    return replace(entry, id=entry_id)


def _entry(row: sa.Row[tuple[object, ...]]) -> Entry:
    values = dict(row._mapping)
    return Entry(**{**values, "data": json.loads(values["data"])})
