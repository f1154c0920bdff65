"""Lending as one control plane does its part: hosts ask what to do, a lending loop says who goes.

What becomes of a container's shards is done first and its record written then, so that a crash in between
repeats it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from penstock.core.clock import Clock, Millis
from penstock.core.errors import VersionConflict
from penstock.core.journal import Entry
from penstock.core.token_store import TokenStore
from penstock.tasks import lending
from penstock.tasks.fleet_view import FleetView
from penstock.tasks.lending import Change, Loan, LoanState, Order, Seen, on_answer, on_ask, order_of
from penstock.tasks.loan_store import LoanStore

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
