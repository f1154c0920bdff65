"""Leader election by leases: of the control planes on one database, one holds each role.

The lease only decides which instance is active. A former leader is fenced by its term, which every write of
the role checks in its transaction. So clock skew costs availability, never correctness.
"""

from __future__ import annotations

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.db.database import TERMS, Database, upsert


class RoleLease:
    """One instance's lease of a role. `holder` must be unique for each start of each instance."""

    def __init__(self, database: Database, role: str, holder: str, *, lease_ms: Millis) -> None:
        self._database, self._role, self._holder, self._lease_ms = database, role, holder, lease_ms
        self._term: int | None = None
        self._renew_ms: Millis = 0

    @property
    def term(self) -> int | None:
        """The term of the last `renew`; None while another instance is the leader."""
        return self._term

    def renew(self, now_ms: Millis, *, seize: bool = False) -> int | None:
        """Renew the lease, or acquire it if it has expired; returns the term, or None for standby.

        `seize` acquires it from a holder that is known to be dead.
        """
        # Renewed after two thirds of the lease. When the clock goes back, the store is read.
        if self._term is not None and 0 < self._renew_ms - now_ms <= self._lease_ms:
            return self._term
        with self._database.transaction() as connection:
            self._term = self._renew(connection, now_ms, seize)
        self._renew_ms = now_ms + self._lease_ms * 2 // 3
        return self._term

    def invalidate(self) -> None:
        """Read the store at the next `renew`, because a write of this term was refused."""
        self._renew_ms = -1

    def _renew(self, connection: sa.Connection, now_ms: Millis, seize: bool) -> int | None:
        row = connection.execute(sa.select(TERMS).where(TERMS.c.role == self._role)).first()
        # An expiry further away than any lease is invalid: it was written with a wrong clock.
        is_expired = row is None or not now_ms < row.expires_ms <= now_ms + 100 * self._lease_ms
        if row is not None and row.holder == self._holder and row.term == self._term:
            term = int(row.term)
        elif seize or is_expired:
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
        """Let another instance take over at once. The term is kept, so that it is not used again."""
        if self._term is None:
            return
        with self._database.transaction() as connection:
            connection.execute(
                sa.update(TERMS)
                .where(TERMS.c.role == self._role, TERMS.c.holder == self._holder, TERMS.c.term == self._term)
                .values(expires_ms=0)
            )
        self._term = None
