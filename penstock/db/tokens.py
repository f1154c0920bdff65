"""API tokens: stored as hashes, each with a name, a role and an expiry."""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from penstock.core.clock import Millis
from penstock.core.errors import NotFound, Refused
from penstock.db.database import METADATA, Database

TOKENS = sa.Table(
    "tokens",
    METADATA,
    sa.Column("hash", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("role", sa.String, nullable=False),
    sa.Column("expires_ms", sa.BigInteger, nullable=False),
    sa.Column("issued_ms", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("issued_by", sa.String, nullable=False, server_default=""),
    sa.Column("revoked_ms", sa.BigInteger, nullable=False, server_default="0"),  # 0: not revoked
    sa.Column("container", sa.String, nullable=False, server_default=""),  # the container it belongs to
)
ROLES = frozenset({"reader", "developer", "oncall", "scaler", "container", "admin"})
YEAR_MS: Millis = 365 * 24 * 3_600_000
# How long a valid token is cached. A revocation by another instance takes effect within this time.
CACHE_MS: Millis = 900
CACHE_MAX = 10_000
KNOWN_MAX = 20_000
ID_LENGTH = 16
_TOKEN = re.compile(r"pk_[A-Za-z0-9_-]{43}")

_ONE = sa.select(TOKENS).where(TOKENS.c.hash == sa.bindparam("of_hash"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The holder of a token."""

    name: str
    role: str
    token_id: str = ""  # the public id of the token
    container: str = ""  # the container it is bound to; "": issued by an earlier version, not bound yet


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """The stored facts of a token, without the token."""

    id: str
    name: str
    role: str
    expires_ms: Millis
    issued_ms: Millis
    issued_by: str
    revoked_ms: Millis  # 0: not revoked
    container: str  # the container it is bound to; "": none, or not bound yet


@dataclass(frozen=True, slots=True)
class _CachedCaller:
    caller: Caller
    expires_ms: Millis
    seen_ms: Millis


@dataclass(slots=True)
class _TokenCache:
    """A cache of valid tokens. Thread-safe."""

    callers: dict[str, _CachedCaller] = field(default_factory=dict)
    # Hashes that were valid at their last lookup, the latest last; used for rate limits only, not for access.
    known: OrderedDict[str, None] = field(default_factory=OrderedDict)
    revocations: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, digest: str, cached: _CachedCaller, revocations: int) -> None:
        with self.lock:
            # The row was read before a revocation, perhaps of this token.
            if revocations != self.revocations:
                return
            if len(self.callers) >= CACHE_MAX:
                self.callers.clear()
            self.callers[digest] = cached
            self.known[digest] = None
            self.known.move_to_end(digest)
            if len(self.known) > KNOWN_MAX:
                self.known.popitem(last=False)

    def remove(self, digest: str) -> None:
        with self.lock:
            self.known.pop(digest, None)

    def clear(self) -> None:
        with self.lock:
            self.revocations += 1
            self.callers.clear()


class TokenStore:
    """Issues tokens and finds their holders."""

    def __init__(self, database: Database) -> None:
        self._database, self._cache = database, _TokenCache()

    def issue(
        self,
        name: str,
        role: str,
        *,
        now_ms: Millis,
        lifetime_ms: Millis = YEAR_MS,
        issued_by: str = "",
        container: str = "",
    ) -> str:
        """Issue a token. It is returned once: only its hash is stored."""
        with self._database.transaction() as connection:
            token, _ = insert_token(
                connection,
                name,
                role,
                now_ms=now_ms,
                lifetime_ms=lifetime_ms,
                issued_by=issued_by,
                container=container,
            )
        return token

    def bind(self, token_id: str, container: str) -> str:
        """Bind a token to a container unless it is bound already; returns the container it is bound to."""
        found = sa.func.substr(TOKENS.c.hash, 1, ID_LENGTH) == token_id
        with self._database.transaction() as connection:
            free = sa.update(TOKENS).where(found, TOKENS.c.container == "").values(container=container)
            connection.execute(free)
            bound = connection.execute(sa.select(TOKENS.c.container).where(found)).scalar_one()
        self._cache.clear()
        return str(bound)

    def rows(self) -> tuple[TokenRow, ...]:
        """Every token ever issued, by name and age."""
        query = sa.select(TOKENS).order_by(TOKENS.c.name, TOKENS.c.issued_ms, TOKENS.c.hash)
        with self._database.reading() as connection:
            return tuple(_row(row) for row in connection.execute(query))

    def revoked(self) -> None:
        """Clear the cache. To be called after the commit of a revocation."""
        self._cache.clear()

    def cached_caller(self, token: str, *, now_ms: Millis) -> Caller | None:
        """The holder of a token if it is in the cache; does not read the store."""
        found = self._cache.callers.get(_hash(token))
        if found is None or not 0 <= now_ms - found.seen_ms < CACHE_MS or found.expires_ms <= now_ms:
            return None
        return found.caller

    def can_be_token(self, token: str) -> bool:
        """Whether the text has the form of a token; others are not looked up."""
        return _TOKEN.fullmatch(token) is not None

    def is_familiar(self, token: str) -> bool:
        """Whether the token was valid at its last lookup in this process; does not read the store."""
        return _hash(token) in self._cache.known

    def caller(self, token: str, *, now_ms: Millis) -> Caller:
        """The holder of a token; Refused if it is unknown, revoked or expired."""
        caller = self.cached_caller(token, now_ms=now_ms)
        if caller is not None:
            return caller
        digest, revocations = _hash(token), self._cache.revocations
        row = self._find(digest) if self.can_be_token(token) else None
        if row is None or row.revoked_ms or row.expires_ms <= now_ms:
            self._cache.remove(digest)
        if row is None or row.revoked_ms:
            raise Refused(
                "this token is not known",
                why="this installation did not issue it, or it was revoked",
                fix="name the folder of your `penstock up` with --folder, or set PENSTOCK_TOKEN",
            )
        if row.expires_ms <= now_ms:
            raise Refused(
                "this token has expired",
                why="each token has an expiry time",
                fix="ask an admin for a new one",
            )
        caller = Caller(name=row.name, role=row.role, token_id=row.id, container=row.container)
        self._cache.put(digest, _CachedCaller(caller, row.expires_ms, now_ms), revocations)
        return caller

    def _find(self, digest: str) -> TokenRow | None:
        with self._database.reading() as connection:
            row = connection.execute(_ONE, {"of_hash": digest}).first()
        return None if row is None else _row(row)


def insert_token(
    connection: sa.Connection,
    name: str,
    role: str,
    *,
    now_ms: Millis,
    lifetime_ms: Millis,
    issued_by: str,
    container: str = "",
) -> tuple[str, TokenRow]:
    """Issue a token in the caller's transaction."""
    assert role in ROLES, role
    assert not container or role == "container", role
    token = "pk_" + secrets.token_urlsafe(32)
    values = {
        "hash": _hash(token),
        "name": name,
        "role": role,
        "expires_ms": now_ms + lifetime_ms,
        "issued_ms": now_ms,
        "issued_by": issued_by,
        "revoked_ms": 0,
        "container": container,
    }
    connection.execute(sa.insert(TOKENS).values(values))
    return token, _from_values(values)


def revoke_token(connection: sa.Connection, token_id: str, *, now_ms: Millis) -> TokenRow:
    """Revoke a token in the caller's transaction; NotFound if there is none. Idempotent."""
    found = sa.func.substr(TOKENS.c.hash, 1, ID_LENGTH) == token_id
    row = connection.execute(sa.select(TOKENS).where(found)).first()
    if row is None:
        raise NotFound(
            f"there is no token {token_id!r}",
            why="this installation issued no token with this id",
            fix="`penstock token ls` lists the ids",
        )
    if not row.revoked_ms:
        connection.execute(sa.update(TOKENS).where(found).values(revoked_ms=now_ms))
        return _from_values({**row._mapping, "revoked_ms": now_ms})
    return _row(row)


def _row(row: sa.Row[Any]) -> TokenRow:
    return _from_values(dict(row._mapping))


def _from_values(values: dict[str, Any]) -> TokenRow:
    rest = {name: value for name, value in values.items() if name != "hash"}
    return TokenRow(id=values["hash"][:ID_LENGTH], **rest)


def _hash(token: str) -> str:
    # 256 random bits need no salt and no slow hash. Hashes are compared, so timing reveals nothing.
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()
