"""Issues and revokes tokens: admins only, audited and with idempotency keys, as all changes."""

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
    """Changes tokens, one transaction per call."""

    def __init__(self, store: JobStore, tokens: TokenStore) -> None:
        self._writer, self._tokens = IdempotentWriter(store), tokens

    def issue(
        self, name: str, role: str, *, lifetime_ms: Millis, **options: Unpack[CallOptions]
    ) -> tuple[TokenRow, str | None]:
        """Issue a token. A retry of the request returns None instead: stored responses contain no token.

        A token of role `container` is bound to the container with its name.
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
                "the lifetime of the token is not valid",
                why=f"it is {lifetime_ms} ms, and 1 to {LIFETIME_MS_MAX} ms are allowed",
                fix="use a lifetime of at most ten years",
            )
        container = name if role == "container" else ""
        if container and re.fullmatch(NAME_PATTERN, container) is None:
            raise ConfigError(
                f"{shown(container)} cannot be the name of a container",
                why="a token of role `container` has the name of its container",
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

        _admins_only(options, "issue tokens")
        request = {"issue": name, "role": role, "lifetime_ms": lifetime_ms}
        response = self._writer.once(options, request, write)
        return _row(response), issued[0] if issued else None

    def revoke(self, token_id: str, **options: Unpack[CallOptions]) -> TokenRow:
        """Revoke a token: at once in this process, within a second in others."""

        def write(writer: LayerWriter) -> dict[str, Any]:
            row = revoke_token(writer.connection, token_id, now_ms=writer.call.now_ms)
            writer.record("token.revoked", token_id, {"name": row.name, "role": row.role})
            return asdict(row)

        _admins_only(options, "revoke tokens")
        response = self._writer.once(options, {"revoke": token_id}, write)
        self._tokens.revoked()
        return _row(response)


def _row(response: dict[str, Any]) -> TokenRow:
    # Responses that a former version stored have no container.
    return TokenRow(**{"container": "", **response})


def _admins_only(options: CallOptions, what: str) -> None:
    actor = options["actor"]
    if actor.role != "admin":
        raise Refused(
            f"{actor.name} may not {what}", why=f"the role {actor.role!r} is not 'admin'", fix="ask an admin"
        )
