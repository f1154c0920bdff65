"""Issuing tokens and taking them back: admins only, audited and once per key, as every other change is."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any, Unpack

from penstock.core.clock import Millis
from penstock.core.errors import ConfigError, Refused
from penstock.db.tokens import ROLES, TokenRow, TokenStore, insert_token, revoke_token
from penstock.jobs.config import NAME_PATTERN
from penstock.jobs.job_store import JobStore
from penstock.jobs.layer_writer import NAME_MAX, CallOptions, IdempotentWriter, LayerWriter
from penstock.jobs.text_rules import check_line, shown

LIFETIME_MS_MAX: Millis = 10 * 365 * 24 * 3_600_000


class TokenService:
    """Changes who may call, one transaction per call."""

    def __init__(self, store: JobStore, tokens: TokenStore) -> None:
        self._desk, self._tokens = IdempotentWriter(store), tokens

    def issue(
        self, name: str, role: str, *, lifetime_ms: Millis, **asked: Unpack[CallOptions]
    ) -> tuple[TokenRow, str | None]:
        """A new token. A repeat of the request gets None in its place: what is kept must not hold a token.

        One of role `container` speaks for the container that it is named after.
        """
        check_line("the name of a token", name, length_max=NAME_MAX)
        if role not in ROLES:
            raise ConfigError(
                f"there is no role {shown(role)}",
                why=f"the roles are {', '.join(sorted(ROLES))}",
                fix="use one of these",
            )
        if not 0 < lifetime_ms <= LIFETIME_MS_MAX:
            raise ConfigError(
                "a token cannot live so long",
                why=f"it is {lifetime_ms} ms, where 1 to {LIFETIME_MS_MAX} are allowed",
                fix="name an end within ten years",
            )
        container = name if role == "container" else ""
        if container and re.fullmatch(NAME_PATTERN, container) is None:
            raise ConfigError(
                f"no container can be called {shown(container)}",
                why="a container's token is named after the container, and speaks for no other",
                fix="use letters, digits, `_`, `.` and `-`, as `penstock container --join` does",
            )
        issued: list[str] = []

        def write(writer: LayerWriter) -> dict[str, Any]:
            token, row = insert_token(
                writer.connection,
                name,
                role,
                now_ms=writer.call.now_ms,
                lifetime_ms=lifetime_ms,
                issued_by=writer.call.actor.name,
                container=container,
            )
            issued.append(token)
            data = {"name": name, "role": role, "expires_ms": row.expires_ms}
            writer.record("token.issued", row.id, data)
            return asdict(row)

        _admins_only(asked, "issue tokens")
        request = {"issue": name, "role": role, "lifetime_ms": lifetime_ms}
        answer = self._desk.once(asked, request, write)
        return _row(answer), issued[0] if issued else None

    def revoke(self, token_id: str, **asked: Unpack[CallOptions]) -> TokenRow:
        """Take a token back: at once in this process, soon in others."""

        def write(writer: LayerWriter) -> dict[str, Any]:
            row = revoke_token(writer.connection, token_id, now_ms=writer.call.now_ms)
            writer.record("token.revoked", token_id, {"name": row.name, "role": row.role})
            return asdict(row)

        _admins_only(asked, "take tokens back")
        answer = self._desk.once(asked, {"revoke": token_id}, write)
        self._tokens.revoked()
        return _row(answer)


def _row(answer: dict[str, Any]) -> TokenRow:
    return TokenRow(**{"container": "", **answer})  # answers that a former version kept have none


def _admins_only(asked: CallOptions, what: str) -> None:
    actor = asked["actor"]
    if actor.role != "admin":
        raise Refused(
            f"{actor.name} may not {what}", why=f"the role {actor.role!r} is not 'admin'", fix="ask an admin"
        )
