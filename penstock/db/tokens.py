"""Who may call: tokens, kept only as hashes, each with a name, a role and an end."""

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
    sa.Column("revoked_ms", sa.BigInteger, nullable=False, server_default="0"),  # 0: it was not
    sa.Column("container", sa.String, nullable=False, server_default=""),  # whom it speaks for, if one
)
ROLES = frozenset({"reader", "developer", "oncall", "scaler", "container", "admin"})
YEAR_MS: Millis = 365 * 24 * 3_600_000
# How long a token that was found good is believed. Another instance's revocation takes effect within this.
BELIEVED_MS: Millis = 900
BELIEVED_MAX = 10_000
FAMILIAR_MAX = 20_000
ID_LENGTH = 16
_TOKEN = re.compile(r"pk_[A-Za-z0-9_-]{43}")

_ONE = sa.select(TOKENS).where(TOKENS.c.hash == sa.bindparam("of_hash"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whoever holds a token."""

    name: str
    role: str
    token_id: str = ""  # tells tokens apart without being one
    container: str = ""  # the only one that it speaks for; "": of a former version, and not used yet


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """What is known of a token; not the token."""

    id: str
    name: str
    role: str
    expires_ms: Millis
    issued_ms: Millis
    issued_by: str
    revoked_ms: Millis  # 0: it was not
    container: str  # the only one that it speaks for; "": none, or not known yet


@dataclass(frozen=True, slots=True)
class _Believed:
    caller: Caller
    expires_ms: Millis
    seen_ms: Millis


@dataclass(slots=True)
class _Memory:
    """Tokens that were found good a moment ago. Thread-safe."""

    callers: dict[str, _Believed] = field(default_factory=dict)
    # Hashes of those that were ever good here, the latest last; before they are believed they are looked up.
    familiar: OrderedDict[str, None] = field(default_factory=OrderedDict)
    revocations: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, digest: str, believed: _Believed, revocations: int) -> None:
        with self.lock:
            # What was read before a revocation may be the token that was revoked.
            if revocations != self.revocations:
                return
            if len(self.callers) >= BELIEVED_MAX:
                self.callers.clear()
            self.callers[digest] = believed
            self.familiar[digest] = None
            self.familiar.move_to_end(digest)
            if len(self.familiar) > FAMILIAR_MAX:
                self.familiar.popitem(last=False)

    def is_bad(self, digest: str) -> None:
        with self.lock:
            self.familiar.pop(digest, None)

    def forget(self) -> None:
        with self.lock:
            self.revocations += 1
            self.callers.clear()


class TokenStore:
    """Issues tokens and tells whose they are."""

    def __init__(self, database: Database) -> None:
        self._database, self._memory = database, _Memory()

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
        """A new token; this is the only time it is seen."""
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
        """Let a token that speaks for no container yet speak for this one; returns for which it does now."""
        found = sa.func.substr(TOKENS.c.hash, 1, ID_LENGTH) == token_id
        with self._database.transaction() as connection:
            free = sa.update(TOKENS).where(found, TOKENS.c.container == "").values(container=container)
            connection.execute(free)
            bound = connection.execute(sa.select(TOKENS.c.container).where(found)).scalar_one()
        self._memory.forget()
        return str(bound)

    def rows(self) -> tuple[TokenRow, ...]:
        """Every token ever issued, by name and age."""
        query = sa.select(TOKENS).order_by(TOKENS.c.name, TOKENS.c.issued_ms, TOKENS.c.hash)
        with self._database.reading() as connection:
            return tuple(_row(row) for row in connection.execute(query))

    def revoked(self) -> None:
        """To be called after the commit of a revocation: from now on this process asks the store again."""
        self._memory.forget()

    def believed(self, token: str, *, now_ms: Millis) -> Caller | None:
        """Whose token it is, if it was looked up a moment ago; asks nobody."""
        found = self._memory.callers.get(_hash(token))
        if found is None or not 0 <= now_ms - found.seen_ms < BELIEVED_MS or found.expires_ms <= now_ms:
            return None
        return found.caller

    def can_be_token(self, token: str) -> bool:
        """Whether there could be such a token: nothing else is looked up."""
        return _TOKEN.fullmatch(token) is not None

    def is_familiar(self, token: str) -> bool:
        """Whether it was good when it was last looked up here, however long ago; asks nobody."""
        return _hash(token) in self._memory.familiar

    def caller(self, token: str, *, now_ms: Millis) -> Caller:
        """Whose token it is; Refused if nobody's."""
        caller = self.believed(token, now_ms=now_ms)
        if caller is not None:
            return caller
        digest, revocations = _hash(token), self._memory.revocations
        row = self._find(digest) if self.can_be_token(token) else None
        if row is None or row.revoked_ms or row.expires_ms <= now_ms:
            self._memory.is_bad(digest)
        if row is None or row.revoked_ms:
            raise Refused(
                "this token is not known",
                why="it was never issued here, or was taken back",
                fix="name the folder of your `penstock up` with --folder, or set PENSTOCK_TOKEN",
            )
        if row.expires_ms <= now_ms:
            raise Refused(
                "this token has expired", why="every token has an end", fix="ask an admin for a new one"
            )
        caller = Caller(name=row.name, role=row.role, token_id=row.id, container=row.container)
        self._memory.keep(digest, _Believed(caller, row.expires_ms, now_ms), revocations)
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
    """A new token inside the caller's transaction."""
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
    """Take a token back inside the caller's transaction; NotFound if there is none. May be repeated."""
    found = sa.func.substr(TOKENS.c.hash, 1, ID_LENGTH) == token_id
    row = connection.execute(sa.select(TOKENS).where(found)).first()
    if row is None:
        raise NotFound(
            f"there is no token {token_id!r}",
            why="no token with this id was issued here",
            fix="look at `penstock token ls` for their ids",
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
    # 256 random bits need no salt and no slow hash; the index compares hashes, so time tells nothing.
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()
