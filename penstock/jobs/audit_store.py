"""Who changed what, when and why: one row per state change, in the transaction of the change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.db.bulk import insert_rows
from penstock.db.database import METADATA, ROW_ID

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
_INSERT = sa.insert(AUDIT).inline()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One change of state."""

    at_ms: Millis
    actor: str
    role: str
    action: str
    subject: str
    reason: str
    data: Mapping[str, Any] = field(default_factory=dict)
    id: int = 0  # as stored; later changes have larger ones


def append_audits(
    connection: sa.Connection,
    changes: Sequence[tuple[str, str, str, str]],
    *,
    at_ms: Millis,
    actor: str,
    role: str,
) -> None:
    """Many at once, as (action, subject, reason, data as JSON text); in the transaction of the changes."""
    columns = ("at_ms", "actor", "role", "action", "subject", "reason", "data")
    insert_rows(connection, AUDIT, columns, [(at_ms, actor, role, *change) for change in changes])


def append_audit(connection: sa.Connection, row: AuditRow) -> None:
    """Requires: inside the transaction that makes the change."""
    values = {name: getattr(row, name) for name in AuditRow.__slots__ if name != "id"}
    connection.execute(_INSERT, {**values, "data": dict(row.data)})


def read_audit(
    connection: sa.Connection, *, subject: str | None = None, before: int | None = None, limit: int = 1000
) -> tuple[AuditRow, ...]:
    """The newest `limit` changes (of those with an id below `before`), oldest first."""
    query = sa.select(AUDIT).order_by(AUDIT.c.id.desc()).limit(limit)
    if subject is not None:
        query = query.where(AUDIT.c.subject == subject)
    if before is not None:
        query = query.where(AUDIT.c.id < before)
    return tuple(AuditRow(**row._mapping) for row in reversed(connection.execute(query).all()))
