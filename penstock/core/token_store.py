"""Who may call: tokens, kept only as hashes, each with a name, a role and an end."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.core.errors import Refused
from penstock.core.sql_store import METADATA, Database

TOKENS = sa.Table(
    "tokens",
    METADATA,
    sa.Column("hash", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("role", sa.String, nullable=False),
    sa.Column("expires_ms", sa.BigInteger, nullable=False),
)
ROLES = frozenset({"reader", "developer", "oncall", "scaler", "container", "admin"})
YEAR_MS: Millis = 365 * 24 * 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whoever holds a token."""

    name: str
    role: str
    token_id: str = ""  # tells tokens apart without being one


class TokenStore:
    """Issues tokens and tells whose they are."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def issue(self, name: str, role: str, *, now_ms: Millis, lifetime_ms: Millis = YEAR_MS) -> str:
        """A new token; this is the only time it is seen."""
        assert role in ROLES, role
        token = "pk_" + secrets.token_urlsafe(32)
        row = {"hash": _hash(token), "name": name, "role": role, "expires_ms": now_ms + lifetime_ms}
        with self._database.transaction() as connection:
            connection.execute(sa.insert(TOKENS).values(row))
        return token

    def caller(self, token: str, *, now_ms: Millis) -> Caller:
        """Whose token it is; Refused if nobody's."""
        digest = _hash(token)
        with self._database.transaction() as connection:
            row = connection.execute(sa.select(TOKENS).where(TOKENS.c.hash == digest)).first()
        if row is None:
            raise Refused(
                "this token is not known",
                why="it was never issued here, or was taken back",
                fix="use the token that `penstock up` wrote into its folder (or set PENSTOCK_TOKEN)",
            )
        if row.expires_ms <= now_ms:
            raise Refused(
                "this token has expired", why="every token has an end", fix="ask an admin for a new one"
            )
        return Caller(name=row.name, role=row.role, token_id=digest[:16])


def _hash(token: str) -> str:
    # 256 random bits need no salt and no slow hash; the index compares hashes, so time tells nothing.
    return hashlib.sha256(token.encode()).hexdigest()
