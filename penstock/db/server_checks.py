"""Requirements of a PostgreSQL server, and the PenstockErrors for its failures.

Without SQLAlchemy, so that Spark's Python workers, which import this, start fast.
"""

from __future__ import annotations

from typing import Any

import psycopg

from penstock.core.errors import DiskFull, EnvironmentProblem, OutcomeUnknown, PenstockError, StoreUnavailable

MUST_BE_ON = ("fsync", "full_page_writes", "synchronous_commit")
VERSION_MIN = 140000


def require_durable_server(connection: psycopg.Connection[Any]) -> None:
    """EnvironmentProblem if this server is too old, or has a setting with which it may lose commits."""
    version = connection.info.server_version
    if version < VERSION_MIN:
        raise EnvironmentProblem(
            f"this PostgreSQL server is too old: version {version // 10000}",
            why=f"version {VERSION_MIN // 10000} or newer is needed",
            fix="use a newer PostgreSQL server",
        )
    names = ", ".join(f"current_setting('{name}')" for name in MUST_BE_ON)
    with connection.cursor() as cursor:
        values = cursor.execute(f"SELECT {names}").fetchone()
    connection.rollback()
    off = [name for name, value in zip(MUST_BE_ON, values or (), strict=True) if value == "off"]
    if off:
        raise EnvironmentProblem(
            "this PostgreSQL server may lose committed data",
            why=f"{', '.join(off)} is off",
            fix="switch it on in postgresql.conf (and for the role and the database), then start again",
        )


def translate_postgres(error: BaseException | None, text: str, *, committing: bool) -> PenstockError:
    """The PenstockError for a PostgreSQL error. Pure."""
    state = getattr(error, "sqlstate", None) or ""
    if state in ("53100", "53200"):
        return DiskFull(
            "the disk of the database server is full",
            why=text,
            fix="free disk space there; nothing was partially written",
        )
    if state == "55P03":
        return StoreUnavailable("the database is busy", why=text, fix="try again")
    # After COMMIT was sent, a lost connection leaves the outcome unknown; a refusal has another SQLSTATE.
    if committing and (not state or state.startswith(("08", "57"))):
        return OutcomeUnknown(
            "the database did not confirm the commit",
            why=text,
            fix="repeat the request with the same idempotency key: it is not executed twice",
        )
    if isinstance(error, psycopg.OperationalError):
        return StoreUnavailable(
            "the database did not respond", why=text, fix="check the database server, then try again"
        )
    return StoreUnavailable(
        "the database refused the request", why=text, fix="try again; if it happens again, report it"
    )
