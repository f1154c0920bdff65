"""What a SQLite failure means to us. Without SQLAlchemy: Spark's Python workers need this, and start often.
Pure.
"""

from __future__ import annotations

from penstock.core.errors import CorruptData, DiskFull, OutcomeUnknown, PenstockError, StoreUnavailable


def translate_sqlite(error: BaseException | None, text: str) -> PenstockError:
    """Name what a SQLite failure means to us."""
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL"):
        return DiskFull(
            "the disk is full",
            why=text,
            fix="free some space; nothing was half-written and work goes on by itself",
        )
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return CorruptData("a database file is damaged", why=text, fix="restore the file from a backup")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreUnavailable("the database is busy", why=text, fix="try again")
    if name.startswith("SQLITE_IOERR"):
        return OutcomeUnknown(
            "the database could not be written", why=text, fix="look at the disk, then try again"
        )
    return StoreUnavailable(
        "the database refused the request", why=text, fix="try again, and report it if it stays"
    )
