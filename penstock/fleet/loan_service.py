"""Lending as one control plane does its part: hosts ask what to do, a lending loop says who goes.

What becomes of a container's shards is done first and its record written then, so that a crash in between
repeats it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import sqlalchemy as sa

from penstock.core.clock import Clock, Millis
from penstock.core.errors import VersionConflict
from penstock.core.journal import Entry
from penstock.db.database import METADATA, NAME, Database, upsert, values_of
from penstock.db.journal_store import JournalStore
from penstock.db.tokens import TokenStore, insert_token, revoke_token
from penstock.fleet import loans as lending
from penstock.fleet.fleet_view import FleetView
from penstock.fleet.loans import Change, Loan, LoanState, Order, Seen, on_answer, on_ask, order_of

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


HOST = "its host"


class Marks(Protocol):
    """The Shard Manager's word on what a container may have."""

    def drain(self, container: str, now_ms: Millis, *, reason: str, actor: str) -> None:
        """Move everything away."""

    def uncordon(self, container: str, now_ms: Millis, *, reason: str, actor: str) -> None:
        """Take it back."""


class Plane(Protocol):
    """The control plane, as far as this needs it."""

    @property
    def clock(self) -> Clock:
        """Its time."""

    @property
    def shard_manager(self) -> Marks:
        """Its Shard Manager, if it is the active one."""


class LendingService:
    """One cluster's side of lending, on any instance."""

    def __init__(self, store: LoanStore, fleet: FleetView, tokens: TokenStore, plane: Plane) -> None:
        self._store, self._fleet, self._tokens, self._plane = store, fleet, tokens, plane

    def _clock(self) -> Clock:
        return self._plane.clock

    def _marks(self) -> Marks:
        return self._plane.shard_manager

    def loans(self) -> tuple[Loan, ...]:
        """Every record."""
        return self._store.loans()

    def ages_s(self) -> dict[str, float]:
        """By container: since when its record says what it says, by this cluster's clock."""
        now_ms = self._clock().now_ms()
        return {loan.container: max(0, now_ms - loan.at_ms) / 1000 for loan in self._store.loans()}

    def summary(self) -> dict[str, list[str]]:
        """Who is away, and who is here on loan."""
        loans = self._store.loans()
        return {
            "lent": [loan.container for loan in loans if loan.state is LoanState.GONE],
            "borrowed": [loan.container for loan in loans if loan.owner],
        }

    # -- containers --------------------------------------------------------------------------------------

    def ask(self, container: str, *, owner: str = "") -> tuple[Loan | None, Order | None]:
        """A host asks what its container should do; that it asks is a fact."""
        loan, now_ms = self._store.loan(container), self._clock().now_ms()
        change = on_ask(loan, self._seen(container), container=container, owner=owner, now_ms=now_ms)
        if change is not None:
            loan = self._keep(container, loan, change, actor=HOST)
        return loan, order_of(loan)

    def answer(self, container: str, *, number: int, accepted: bool, why: str) -> Loan | None:
        """What it says to an order."""
        loan, now_ms = self._store.loan(container), self._clock().now_ms()
        change = on_answer(loan, number=number, accepted=accepted, why=why, now_ms=now_ms)
        return loan if change is None else self._keep(container, loan, change, actor=HOST)

    # -- the lending loop --------------------------------------------------------------------------------

    def lend(
        self, container: str, *, home: str, to: str, url: str, token: str, reason: str, actor: str
    ) -> Loan | None:
        """Begin to give a container to another cluster."""
        loan, now_ms = self._store.loan(container), self._clock().now_ms()
        change = lending.lend(
            loan,
            self._seen(container),
            container=container,
            home=home,
            to=to,
            url=url,
            token=token,
            reason=reason,
            now_ms=now_ms,
        )
        return self._keep(container, loan, change, actor=actor)

    def keep(self, container: str, *, version: int, reason: str, actor: str) -> Loan | None:
        """It stays after all."""
        loan, now_ms = self._store.loan(container), self._clock().now_ms()
        change = lending.keep(loan, container=container, version=version, reason=reason, now_ms=now_ms)
        return self._keep(container, loan, change, actor=actor)

    def expect(
        self, container: str, *, lender: str, owner: str, version: int, reason: str, actor: str
    ) -> tuple[Loan, str]:
        """A container will come; returns the token it comes with, which is seen this once."""
        loan, now_ms = self._store.loan(container), self._clock().now_ms()
        change = lending.expect(
            loan,
            self._seen(container),
            container=container,
            lender=lender,
            owner=owner,
            version=version,
            reason=reason,
            now_ms=now_ms,
        )
        assert change.loan is not None
        entry = _entry(container, change, actor, now_ms)
        token = self._store.keep_with_token(loan, change.loan, entry)
        if token is None:
            raise self._lost(container, loan)
        self._tokens.revoked()  # one that was issued before is void
        return change.loan, token

    def forget(self, container: str, *, version: int, reason: str, actor: str) -> Loan | None:
        """It did not come, or is not here any more."""
        loan, now_ms = self._store.loan(container), self._clock().now_ms()
        seen = self._seen(container)
        change = lending.forget(
            loan, seen, container=container, version=version, reason=reason, now_ms=now_ms
        )
        return self._keep(container, loan, change, actor=actor)

    # ----------------------------------------------------------------------------------------------------

    def _keep(self, container: str, before: Loan | None, change: Change, *, actor: str) -> Loan | None:
        clock = self._clock()
        if change.mark:
            reason = f"lending: {change.decision}"
            mark = self._marks().drain if change.mark == "drain" else self._marks().uncordon
            mark(container, clock.boot_ms(), reason=reason, actor=actor)
        entry = _entry(container, change, actor, clock.now_ms()) if change.decision else None
        if not self._store.keep(before, change, entry):
            raise self._lost(container, before)
        if change.loan is None or (before is not None and before.token_id != change.loan.token_id):
            self._tokens.revoked()
        return change.loan

    def _lost(self, container: str, before: Loan | None) -> VersionConflict:
        now = self._store.loan(container)
        versions = [0 if loan is None else loan.version for loan in (before, now)]
        return VersionConflict(f"container {container}", expected=versions[0], actual=versions[1])

    def _seen(self, container: str) -> Seen:
        row = next((row for row in self._fleet.containers() if row.name == container), None)
        if row is None:
            return Seen()
        return Seen(
            is_live=row.may_run,
            is_draining=row.draining,
            shards=sum(container in (shard.container, shard.target) for shard in self._fleet.shards()),
        )


def without_secrets(loan: Loan) -> Loan:
    """What everybody may see of it."""
    return replace(loan, token="", token_id="")


def whose(loan: Loan | None) -> str:
    """In a few words: whose it is, and where it goes."""
    if loan is None:
        return ""
    said = f"borrowed from {loan.owner}" if loan.owner else ""
    match loan.state:
        case LoanState.GONE:
            return f"lent to {loan.peer}"
        case LoanState.EXPECTED:
            return f"{said or 'back'}, on its way"
        case LoanState.ASKED | LoanState.DRAINING | LoanState.ORDERED:
            return f"{said}, goes to {loan.peer}" if said else f"goes to {loan.peer}"
    return said


def _entry(container: str, change: Change, actor: str, now_ms: Millis) -> Entry:
    loan = change.loan
    data = {} if loan is None else {"state": str(loan.state), "owner": loan.owner, "peer": loan.peer}
    return Entry(
        at_ms=now_ms,
        actor=actor,
        kind="lending",
        subject=container,
        decision=change.decision,
        reason=change.reason,
        data=data,
    )
