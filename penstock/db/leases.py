"""Leases of roles: of several control planes on one database, one at a time runs each loop.

The lease only decides who tries. What keeps a former holder from writing is its term, which every write of
its role checks in its own transaction; so clocks that disagree cost time, never correctness.
"""

from __future__ import annotations

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.db.database import TERMS, Database, upsert


class RoleLease:
    """One instance's claim to a role. `holder` must be different for every start of every instance."""

    def __init__(self, database: Database, role: str, holder: str, *, lease_ms: Millis) -> None:
        self._database, self._role, self._holder, self._lease_ms = database, role, holder, lease_ms
        self._term: int | None = None
        self._renew_ms: Millis = 0

    @property
    def term(self) -> int | None:
        """The term of the last `keep`; None while another instance is active."""
        return self._term

    def keep(self, now_ms: Millis, *, seize: bool = False) -> int | None:
        """Hold on to the role, or take it when its holder's time is over; the term, or None for standby.

        `seize` takes it from a holder that is known to be gone.
        """
        # A third of the time is kept in reserve; a clock that went back asks the store.
        if self._term is not None and 0 < self._renew_ms - now_ms <= self._lease_ms:
            return self._term
        with self._database.transaction() as connection:
            self._term = self._keep(connection, now_ms, seize)
        self._renew_ms = now_ms + self._lease_ms * 2 // 3
        return self._term

    def doubt(self) -> None:
        """Ask the store at the next `keep`: a write of this term was refused."""
        self._renew_ms = -1

    def _keep(self, connection: sa.Connection, now_ms: Millis, seize: bool) -> int | None:
        row = connection.execute(sa.select(TERMS).where(TERMS.c.role == self._role)).first()
        # A time further away than any lease is not one: the clock of whoever wrote it was wrong.
        is_over = row is None or not now_ms < row.expires_ms <= now_ms + 100 * self._lease_ms
        if row is not None and row.holder == self._holder and row.term == self._term:
            term = int(row.term)
        elif seize or is_over:
            term = 1 if row is None else int(row.term) + 1
        else:
            return None
        values = {
            "role": self._role,
            "term": term,
            "holder": self._holder,
            "expires_ms": now_ms + self._lease_ms,
        }
        upsert(connection, TERMS, [values], replace=("term", "holder", "expires_ms"))
        return term

    def release(self) -> None:
        """Let the next instance take over at once. The term stays, so that nobody gets it again."""
        if self._term is None:
            return
        with self._database.transaction() as connection:
            connection.execute(
                sa.update(TERMS)
                .where(TERMS.c.role == self._role, TERMS.c.holder == self._holder, TERMS.c.term == self._term)
                .values(expires_ms=0)
            )
        self._term = None
