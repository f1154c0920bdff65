"""Who changed what, when and why: one row per state change, in the transaction of the change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.core.sql_store import METADATA, ROW_ID

AUDIT = sa.Table(
    "audit",
    METADATA,
    sa.Column("id", ROW_ID, primary_key=True, autoincrement=True),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
    sa.Column("actor", sa.String, nullable=False),
    sa.Column("role", sa.String, nullable=False),
    sa.Column("action", sa.String, nullable=False),
    sa.Column("subject", sa.String, nullable=False, index=True),
    sa.Column("reason", sa.String, nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
)


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


def append_audit(connection: sa.Connection, row: AuditRow) -> None:
    """Requires: inside the transaction that makes the change."""
    connection.execute(
        sa.insert(AUDIT).values(
            at_ms=row.at_ms,
            actor=row.actor,
            role=row.role,
            action=row.action,
            subject=row.subject,
            reason=row.reason,
            data=dict(row.data),
        )
    )


def read_audit(
    connection: sa.Connection, *, subject: str | None = None, limit: int = 1000
) -> tuple[AuditRow, ...]:
    """The newest `limit` changes, oldest first."""
    query = sa.select(AUDIT).order_by(AUDIT.c.id.desc()).limit(limit)
    if subject is not None:
        query = query.where(AUDIT.c.subject == subject)
    rows = [
        AuditRow(
            at_ms=row.at_ms,
            actor=row.actor,
            role=row.role,
            action=row.action,
            subject=row.subject,
            reason=row.reason,
            data=row.data,
        )
        for row in connection.execute(query)
    ]
    return tuple(reversed(rows))
