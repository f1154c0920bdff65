"""The journal and the audit as tables of the control plane's database."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.core.errors import PenstockError
from penstock.core.journal import ENTRIES_MAX, Entry
from penstock.db.bulk import insert_rows
from penstock.db.database import METADATA, ROW_ID, Database, next_value, next_values

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


COUNTER = "journal"
_INSERT = sa.insert(JOURNAL)
_WRITTEN = ("at_ms", "actor", "kind", "subject", "decision", "reason")


class JournalStore:
    """The `Journal` in the same database as the tables whose changes it explains."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def append(self, connection: sa.Connection | None, entry: Entry) -> None:
        """Write one entry in the caller's transaction; without `connection` in one of its own."""
        data = _encode(entry)
        if connection is None:
            with self._database.transaction() as own:
                _insert(own, entry, data)
        else:
            _insert(connection, entry, data)

    def append_entries(self, connection: sa.Connection, entries: Sequence[Entry]) -> None:
        """Write entries of any kind in bulk, in the caller's transaction."""
        if not entries:
            return
        numbers = next_values(connection, COUNTER, len(entries))
        rows = [
            (number, *(getattr(entry, name) for name in _WRITTEN), _encode(entry))
            for number, entry in zip(numbers, entries, strict=True)
        ]
        insert_rows(connection, JOURNAL, ("id", *_WRITTEN, "data"), rows)

    def append_all(
        self,
        connection: sa.Connection,
        entries: Sequence[tuple[str, str, str, str]],
        *,
        at_ms: Millis,
        actor: str,
        kind: str,
    ) -> None:
        """Write (decision, subject, reason, data as JSON text) in bulk, in the caller's transaction."""
        if not entries:
            return
        columns = ("id", "at_ms", "actor", "kind", "decision", "subject", "reason", "data")
        numbers = next_values(connection, COUNTER, len(entries))
        rows = [(number, at_ms, actor, kind, *entry) for number, entry in zip(numbers, entries, strict=True)]
        insert_rows(connection, JOURNAL, columns, rows)

    def entries(
        self, subject: str | None = None, since: int = 0, limit: int = 100, *, kind: str | None = None
    ) -> tuple[Entry, ...]:
        """Entries with id > `since`, oldest first; without `since` the newest ones, oldest first."""
        query = sa.select(JOURNAL).where(JOURNAL.c.id > since).limit(max(0, min(limit, ENTRIES_MAX)))
        if subject is not None:
            query = query.where(JOURNAL.c.subject == subject)
        if kind is not None:
            query = query.where(JOURNAL.c.kind == kind)
        # Paging must not skip entries; without `since` the newest are wanted.
        query = query.order_by(JOURNAL.c.id if since > 0 else JOURNAL.c.id.desc())
        with self._database.reading() as connection:
            found = [_entry(row) for row in connection.execute(query)]
        return tuple(sorted(found, key=lambda entry: entry.id))

    def after(self, since: int, *, limit: int = ENTRIES_MAX) -> tuple[Entry, ...]:
        """The entries with id > `since` (0: all), oldest first, for readers that follow the journal."""
        query = sa.select(JOURNAL).where(JOURNAL.c.id > since).order_by(JOURNAL.c.id)
        with self._database.reading() as connection:
            return tuple(_entry(row) for row in connection.execute(query.limit(min(limit, ENTRIES_MAX))))

    def about(
        self, subjects: Collection[str], *, before: int | None = None, limit: int = ENTRIES_MAX
    ) -> tuple[Entry, ...]:
        """Entries with any of these subjects, newest first; `before`: only with smaller ids."""
        query = sa.select(JOURNAL).where(JOURNAL.c.subject.in_(sorted(subjects)))
        if before is not None:
            query = query.where(JOURNAL.c.id < before)
        query = query.order_by(JOURNAL.c.id.desc()).limit(max(0, min(limit, ENTRIES_MAX)))
        with self._database.reading() as connection:
            return tuple(_entry(row) for row in connection.execute(query))

    def last_id(self) -> int:
        """The id of the newest entry, 0 if there is none."""
        with self._database.reading() as connection:
            return int(connection.execute(sa.select(sa.func.max(JOURNAL.c.id))).scalar() or 0)


def _encode(entry: Entry) -> str:
    try:
        return json.dumps(dict(entry.data), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PenstockError(
            f"the journal entry about {entry.subject!r} cannot be written",
            why=f"its data is not JSON: {error}",
            fix="use only strings, finite numbers, booleans, lists and maps in `data`",
        ) from error


def _insert(connection: sa.Connection, entry: Entry, data: str) -> None:
    values = {name: getattr(entry, name) for name in _WRITTEN}
    connection.execute(_INSERT, {**values, "data": data, "id": next_value(connection, COUNTER)})


def _entry(row: sa.Row[tuple[object, ...]]) -> Entry:
    values = dict(row._mapping)
    return Entry(**{**values, "data": json.loads(values["data"])})


AUDIT = sa.Table(
    "audit",
    METADATA,
    sa.Column("id", ROW_ID, primary_key=True, autoincrement=True),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
    sa.Column("actor", sa.String, nullable=False),
    sa.Column("role", sa.String, nullable=False),
    sa.Column("action", sa.String, nullable=False),
    sa.Column("subject", sa.String, nullable=False),
    sa.Column("reason", sa.String, nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
    sa.Index("audit_by_subject", "subject", "id"),
)
_INSERT_AUDIT = sa.insert(AUDIT).inline()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One audited change."""

    at_ms: Millis
    actor: str
    role: str
    action: str
    subject: str
    reason: str
    data: Mapping[str, Any] = field(default_factory=dict)
    id: int = 0  # assigned by the store; increasing


def append_audits(
    connection: sa.Connection,
    changes: Sequence[tuple[str, str, str, str]],
    *,
    at_ms: Millis,
    actor: str,
    role: str,
) -> None:
    """Write (action, subject, reason, data as JSON text) in bulk, in the transaction of the changes."""
    columns = ("at_ms", "actor", "role", "action", "subject", "reason", "data")
    insert_rows(connection, AUDIT, columns, [(at_ms, actor, role, *change) for change in changes])


def append_audit(connection: sa.Connection, row: AuditRow) -> None:
    """Write one row. Requires: inside the transaction that makes the change."""
    values = {name: getattr(row, name) for name in AuditRow.__slots__ if name != "id"}
    connection.execute(_INSERT_AUDIT, {**values, "data": dict(row.data)})


def read_audit(
    connection: sa.Connection, *, subject: str | None = None, before: int | None = None, limit: int = 1000
) -> tuple[AuditRow, ...]:
    """The newest `limit` changes, oldest first; `before`: only with smaller ids."""
    query = sa.select(AUDIT).order_by(AUDIT.c.id.desc()).limit(limit)
    if subject is not None:
        query = query.where(AUDIT.c.subject == subject)
    if before is not None:
        query = query.where(AUDIT.c.id < before)
    return tuple(AuditRow(**row._mapping) for row in reversed(connection.execute(query).all()))
