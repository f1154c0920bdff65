"""How tests ask the Job Service, and everything a store holds, to be compared."""

from __future__ import annotations

from typing import Any

from penstock.db.database import METADATA, Database
from penstock.jobs.job_service import Actor
from penstock.jobs.layer_writer import CallOptions


def asked(actor: Actor, key: str | None = None, *, now_ms: int = 1, why: str = "because") -> CallOptions:
    """Who asks, why, under which key and when."""
    return {"actor": actor, "reason": why, "idempotency_key": key, "now_ms": now_ms}


def everything(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table."""
    with database.reading() as connection:
        return {
            name: sorted(map(tuple, connection.exec_driver_sql(f"SELECT * FROM {name}")), key=repr)
            for name in METADATA.tables
        }
