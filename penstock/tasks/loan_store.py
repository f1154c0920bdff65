"""Loans as a table: one row for each container whose host listens, under a version."""

from __future__ import annotations

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.core.journal import Entry
from penstock.core.journal_store import JournalStore
from penstock.core.sql_store import METADATA, NAME, Database, upsert, values_of
from penstock.core.token_store import insert_token, revoke_token
from penstock.tasks.lending import Change, Loan, LoanState

LOANS = sa.Table(
    "loans",
    METADATA,
    sa.Column("container", NAME, primary_key=True),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("peer", sa.String, nullable=False),
    sa.Column("home", sa.String, nullable=False),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("token", sa.String, nullable=False),
    sa.Column("token_id", sa.String, nullable=False),
    sa.Column("refused_by", sa.String, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("at_ms", sa.BigInteger, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
)
_COLUMNS = tuple(column.name for column in LOANS.c)
_ORDERED = sa.select(*LOANS.c).order_by(LOANS.c.container)
TOKEN_MS: Millis = 30 * 86_400_000  # a loan longer than this ends by itself: the container goes home


class LoanStore:
    """What a cluster knows of its loans. Of two that change one, one is told that it lost."""

    def __init__(self, database: Database, journal: JournalStore) -> None:
        self._database, self._journal = database, journal

    def loans(self) -> tuple[Loan, ...]:
        """All of them, by container."""
        with self._database.reading() as connection:
            return tuple(_loan(row) for row in connection.execute(_ORDERED))

    def loan(self, container: str) -> Loan | None:
        """That of one container."""
        with self._database.reading() as connection:
            return _read(connection, container)

    def keep(self, before: Loan | None, change: Change, entry: Entry | None) -> bool:
        """Write what a change says if nobody wrote since; a token that its record lost is taken back."""
        with self._database.transaction() as connection:
            if not self._write(connection, before, change.loan, entry):
                return False
            issued = "" if before is None else before.token_id
            if issued and (change.loan is None or change.loan.token_id != issued):
                assert entry is not None, "who comes or goes is told"
                revoke_token(connection, issued, now_ms=entry.at_ms)
            return True

    def keep_with_token(self, before: Loan | None, loan: Loan, entry: Entry) -> str | None:
        """The same, with a new token for a container that will come; None: somebody else wrote."""
        with self._database.transaction() as connection:
            token, row = insert_token(
                connection,
                f"lent {loan.container}",
                "container",
                now_ms=entry.at_ms,
                lifetime_ms=TOKEN_MS,
                issued_by=entry.actor,
                container=loan.container,
            )
            with_id = Loan(**{**values_of(loan), "state": loan.state, "token_id": row.id})
            if not self._write(connection, before, with_id, entry):
                revoke_token(connection, row.id, now_ms=entry.at_ms)
                return None
            if before is not None and before.token_id:
                revoke_token(connection, before.token_id, now_ms=entry.at_ms)
            return token

    def _write(
        self, connection: sa.Connection, before: Loan | None, after: Loan | None, entry: Entry | None
    ) -> bool:
        container = before.container if before is not None else after.container if after is not None else ""
        found = _read(connection, container)
        if (0 if found is None else found.version) != (0 if before is None else before.version):
            return False
        if after is None:
            connection.execute(sa.delete(LOANS).where(LOANS.c.container == container))
        else:
            values = values_of(after) | {"state": str(after.state)}
            upsert(connection, LOANS, [values], replace=_COLUMNS[1:])
        if entry is not None:
            self._journal.append(connection, entry)
        return True


def _read(connection: sa.Connection, container: str) -> Loan | None:
    row = connection.execute(sa.select(*LOANS.c).where(LOANS.c.container == container)).first()
    return None if row is None else _loan(row)


def _loan(row: sa.Row[tuple[object, ...]]) -> Loan:
    values = dict(zip(_COLUMNS, row, strict=True))
    return Loan(**{**values, "state": LoanState(str(values["state"]))})  # type: ignore[arg-type]
