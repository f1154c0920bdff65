"""What a PostgreSQL server must be like to be trusted, and what its failures mean to us.

Without SQLAlchemy: Spark's Python workers need this, and start often.
"""

from __future__ import annotations

from typing import Any

import psycopg

from penstock.core.errors import DiskFull, EnvironmentProblem, OutcomeUnknown, PenstockError, StoreUnavailable

MUST_BE_ON = ("fsync", "full_page_writes", "synchronous_commit")
VERSION_MIN = 140000


def refuse_what_is_not_durable(connection: psycopg.Connection[Any]) -> None:
    """EnvironmentProblem if this server, as this connection sees it, is too old or may lose a write."""
    version = connection.info.server_version
    if version < VERSION_MIN:
        raise EnvironmentProblem(
            f"this PostgreSQL is too old: {version // 10000}",
            why=f"version {VERSION_MIN // 10000} or newer is needed",
            fix="use a newer server",
        )
    names = ", ".join(f"current_setting('{name}')" for name in MUST_BE_ON)
    with connection.cursor() as cursor:
        values = cursor.execute(f"SELECT {names}").fetchone()
    connection.rollback()
    off = [name for name, value in zip(MUST_BE_ON, values or (), strict=True) if value == "off"]
    if off:
        raise EnvironmentProblem(
            "this PostgreSQL may lose what it acknowledges",
            why=f"{', '.join(off)} is off",
            fix="switch it on in postgresql.conf (and for the role and the database), then start again",
        )


def translate_postgres(error: BaseException | None, text: str, *, committing: bool) -> PenstockError:
    """Name what a failure of PostgreSQL means to us. Pure."""
    state = getattr(error, "sqlstate", None) or ""
    if state in ("53100", "53200"):
        return DiskFull(
            "the database server has no room left",
            why=text,
            fix="free some space there; nothing was half-written",
        )
    if state == "55P03":
        return StoreUnavailable("the database is busy", why=text, fix="try again")
    # Once COMMIT is under way only the server knows; a clear refusal has a state that is no connection's end.
    if committing and (not state or state.startswith(("08", "57"))):
        return OutcomeUnknown(
            "the database did not say whether it has written",
            why=text,
            fix="repeat the request with the same idempotency key: what was done is not done twice",
        )
    if isinstance(error, psycopg.OperationalError):
        return StoreUnavailable("the database did not answer", why=text, fix="look at the server; try again")
    return StoreUnavailable(
        "the database refused the request", why=text, fix="try again, and report it if it stays"
    )
