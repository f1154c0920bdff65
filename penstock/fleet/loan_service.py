"""One cluster's side of lending containers: hosts poll for orders, the lending loop decides who goes.

A change is applied to the container's shards before its record is written: after a crash in between it is
applied again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, Protocol

import sqlalchemy as sa

from penstock.core.clock import Clock, Millis
from penstock.core.errors import NotFound, Refused, VersionConflict
from penstock.core.journal import Entry
from penstock.db.database import METADATA, NAME, Database, upsert, values_of
from penstock.db.journal_store import JournalStore
from penstock.db.tokens import TokenStore, insert_token, revoke_token
from penstock.fleet.shard_store import FleetView


class LoanState(StrEnum):
    """The state of a container's loan record in one cluster."""

    HERE = "here"
    ASKED = "asked"
    DRAINING = "draining"
    ORDERED = "ordered"
    GONE = "gone"
    EXPECTED = "expected"


EXPECT_REPEAT_MS: Millis = 30_000  # within this time nobody else may announce the same container
LEAVING = frozenset({LoanState.ASKED, LoanState.DRAINING, LoanState.ORDERED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """One container's record in one cluster. Each container whose host polls for orders has one."""

    container: str
    state: LoanState = LoanState.HERE
    owner: str = ""  # the cluster it belongs to; "": this one
    peer: str = ""  # the other cluster: its destination or its source
    home: str = ""  # the peer's name for this cluster, while the container leaves
    url: str = ""  # of the peer, while the container leaves
    token: str = ""  # for the peer, until the container has left
    token_id: str = ""  # of the token that this cluster issued for it
    refused_by: str = ""  # the peer that it could not join
    reason: str = ""
    at_ms: Millis = 0
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOrder:
    """An order to a host: `check` whether the container could join the peer, or `go` there."""

    kind: Literal["check", "go"]
    number: int
    to: str
    owner: str  # the owner in the destination's records; "": the container returns home
    url: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerStatus:
    """The current status of a container in its cluster."""

    is_live: bool = False
    is_draining: bool = False
    shards: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoanChange:
    """The new record (None: delete it), its journal entry, and whether to drain or uncordon the container."""

    loan: Loan | None
    decision: str = ""  # "": no journal entry
    reason: str = ""
    mark: Literal["", "drain", "uncordon"] = ""


def on_order_request(
    loan: Loan | None, seen: ContainerStatus, *, container: str, owner: str, now_ms: Millis
) -> LoanChange | None:
    """The container's host polls for orders, so the container is here. None: nothing changes."""
    if not seen.is_live:
        return None  # not registered yet
    if loan is None:
        # A version that no earlier record of this name used.
        return LoanChange(loan=Loan(container=container, owner=owner, at_ms=now_ms, version=now_ms))
    match loan.state:
        case LoanState.EXPECTED:
            if loan.owner:
                decision, came = f"borrowed from {loan.owner}", _here(loan, now_ms)
            else:
                # It has a token of its own here.
                decision, came = f"back from {loan.peer}", replace(_here(loan, now_ms), token_id="")
            return LoanChange(loan=came, decision=decision, reason=loan.reason, mark="uncordon")
        case LoanState.GONE:
            reason = f"it left {loan.peer} on its own, or its host was restarted"
            return LoanChange(loan=_here(loan, now_ms), decision="back", reason=reason, mark="uncordon")
        case LoanState.DRAINING if not seen.is_draining:
            return LoanChange(loan=_here(loan, now_ms), decision="stays", reason="it accepts shards again")
        case LoanState.DRAINING if not seen.shards:
            ordered = _next(loan, LoanState.ORDERED, now_ms)
            return LoanChange(
                loan=ordered, decision=f"empty: ordered to go to {loan.peer}", reason=loan.reason
            )
    return None


def order_of(loan: Loan | None) -> HostOrder | None:
    """The current order for the container's host, None if there is none."""
    if loan is None or loan.state not in (LoanState.ASKED, LoanState.ORDERED):
        return None
    return HostOrder(
        kind="check" if loan.state is LoanState.ASKED else "go",
        number=loan.version,
        to=loan.peer,
        owner="" if loan.owner else loan.home,
        url=loan.url,
        token=loan.token,
    )


def on_order_reply(
    loan: Loan | None, *, number: int, accepted: bool, why: str, now_ms: Millis
) -> LoanChange | None:
    """A host's reply to an order; NotFound if that order is no longer current."""
    if loan is not None and loan.state is LoanState.GONE and loan.version == number + 1 and accepted:
        return None  # the reply was repeated
    if loan is None or loan.version != number or loan.state not in (LoanState.ASKED, LoanState.ORDERED):
        raise NotFound(
            f"there is no order {number}",
            why="it was cancelled, or replaced by another order",
            fix="poll for the current order",
        )
    if not accepted:
        stays = replace(_here(loan, now_ms), refused_by=loan.peer, reason=why)
        return LoanChange(loan=stays, decision=f"cannot go to {loan.peer}", reason=why, mark="uncordon")
    if loan.state is LoanState.ASKED:
        draining = _next(loan, LoanState.DRAINING, now_ms)
        return LoanChange(
            loan=draining, decision=f"drained for {loan.peer}", reason=loan.reason, mark="drain"
        )
    went = replace(_next(loan, LoanState.GONE, now_ms), home="", url="", token="")
    # No record stays here of a container that another cluster owns.
    is_own = not loan.owner
    decision = f"lent to {loan.peer}" if is_own else f"returned to {loan.peer}"
    return LoanChange(loan=went if is_own else None, decision=decision, reason=loan.reason)


def lend(
    loan: Loan | None,
    seen: ContainerStatus,
    *,
    container: str,
    home: str,
    to: str,
    url: str,
    token: str,
    reason: str,
    now_ms: Millis,
) -> LoanChange:
    """Begin to lend a container to another cluster, or to return it."""
    if loan is None or loan.state is not LoanState.HERE or not seen.is_live:
        raise Refused(
            f"container {container} cannot be lent now",
            why=_why_not(loan, seen),
            fix="`penstock container ls` shows containers; those that joined with --join can be lent",
        )
    if loan.owner and loan.owner != to:
        raise Refused(
            f"container {container} cannot go to {to}",
            why=f"it belongs to {loan.owner}, and a borrowed container cannot be lent again",
            fix=f"return it to {loan.owner}",
        )
    asked = replace(
        _next(loan, LoanState.ASKED, now_ms),
        home=home,
        peer=to,
        url=url,
        token=token,
        reason=reason,
        refused_by="",
    )
    return LoanChange(loan=asked, decision=f"asked to go to {to}", reason=reason)


def keep(loan: Loan | None, *, container: str, version: int, reason: str, now_ms: Millis) -> LoanChange:
    """Cancel a loan that has begun: the container stays."""
    if loan is None or loan.version != version or loan.state not in LEAVING:
        raise VersionConflict(
            f"container {container}", expected=version, actual=0 if loan is None else loan.version
        )
    return LoanChange(loan=_here(loan, now_ms), decision="stays", reason=reason, mark="uncordon")


def expect(
    loan: Loan | None,
    seen: ContainerStatus,
    *,
    container: str,
    lender: str,
    owner: str,
    version: int,
    reason: str,
    now_ms: Millis,
) -> LoanChange:
    """Announce a container that will come from another cluster; `version`: of the record the caller has read.

    An announcement made a moment ago is not replaced: the token it issued would become invalid.
    """
    known = 0 if loan is None else loan.version
    is_new = loan is not None and loan.state is LoanState.EXPECTED and now_ms - loan.at_ms < EXPECT_REPEAT_MS
    if version != known or is_new:
        raise VersionConflict(f"container {container}", expected=version, actual=known)
    is_free = loan is None or loan.state in (LoanState.GONE, LoanState.EXPECTED)
    if seen.is_live or not is_free:
        raise Refused(
            f"container {container} already exists here",
            why="a container with this name has a lease or a record in this cluster",
            fix="start one of the two under another name: `penstock container --join … --name NAME`",
        )
    if loan is not None and loan.state is LoanState.GONE and owner:
        raise Refused(
            f"container {container} is this cluster's own",
            why=f"it was lent to {loan.peer}, and now {owner} claims to own a container of that name",
            fix="start one of the two under another name: `penstock container --join … --name NAME`",
        )
    expected = Loan(
        container=container,
        state=LoanState.EXPECTED,
        owner=owner,
        peer=lender,
        reason=reason,
        at_ms=now_ms,
        version=now_ms if loan is None else loan.version + 1,
    )
    return LoanChange(loan=expected, decision=f"expected from {lender}", reason=reason)


def forget(
    loan: Loan | None, seen: ContainerStatus, *, container: str, version: int, reason: str, now_ms: Millis
) -> LoanChange:
    """Drop the record of a container that did not come or has left. An own container's record
    becomes `gone`.
    """
    if loan is None or loan.version != version:
        raise VersionConflict(
            f"container {container}", expected=version, actual=0 if loan is None else loan.version
        )
    if seen.is_live and loan.state is not LoanState.EXPECTED:
        raise Refused(
            f"container {container} is here", why="it has a lease", fix="drain it and wait until it has left"
        )
    if loan.owner:
        return LoanChange(loan=None, decision=f"left: {loan.owner} has it back or will get it", reason=reason)
    return LoanChange(
        loan=_next(loan, LoanState.GONE, now_ms), decision="did not come back yet", reason=reason
    )


def _why_not(loan: Loan | None, seen: ContainerStatus) -> str:
    if loan is None:
        return "there is no such container, or its host does not poll for orders"
    return "it has no lease" if not seen.is_live else f"its state is {loan.state} {loan.peer}".rstrip()


def _next(loan: Loan, state: LoanState, now_ms: Millis) -> Loan:
    return replace(loan, state=state, at_ms=now_ms, version=loan.version + 1)


def _here(loan: Loan, now_ms: Millis) -> Loan:
    return replace(_next(loan, LoanState.HERE, now_ms), home="", peer="", url="", token="")


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
# Maximum length of a loan: then the token expires and the container goes home
TOKEN_MS: Millis = 30 * 86_400_000


class LoanStore:
    """The table of loans, with optimistic locking: of two concurrent changes one fails."""

    def __init__(self, database: Database, journal: JournalStore) -> None:
        self._database, self._journal = database, journal

    def loans(self) -> tuple[Loan, ...]:
        """All loans, by container."""
        with self._database.reading() as connection:
            return tuple(_loan(row) for row in connection.execute(_ORDERED))

    def loan(self, container: str) -> Loan | None:
        """The loan of one container."""
        with self._database.reading() as connection:
            return _read(connection, container)

    def write(self, before: Loan | None, change: LoanChange, entry: Entry | None) -> bool:
        """Write a change unless the record changed since it was read; revokes a token that the record no
        longer has.
        """
        with self._database.transaction() as connection:
            if not self._write(connection, before, change.loan, entry):
                return False
            issued = "" if before is None else before.token_id
            if issued and (change.loan is None or change.loan.token_id != issued):
                assert entry is not None, "every arrival and departure has a journal entry"
                revoke_token(connection, issued, now_ms=entry.at_ms)
            return True

    def write_with_token(self, before: Loan | None, loan: Loan, entry: Entry) -> str | None:
        """The same, with a new token for a container that will come; None: the record has changed."""
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


HOST_ACTOR = "its host"


class DrainControl(Protocol):
    """The part of the Shard Manager that lending needs."""

    def drain(self, container: str, now_ms: Millis, *, reason: str, actor: str) -> None:
        """Move all shards away."""

    def uncordon(self, container: str, now_ms: Millis, *, reason: str, actor: str) -> None:
        """Let it take shards again."""


class ControlPlanePort(Protocol):
    """The part of the control plane that lending needs."""

    @property
    def clock(self) -> Clock:
        """The control plane's clock."""

    @property
    def shard_manager(self) -> DrainControl:
        """The Shard Manager, if it is active in this process."""


class LendingService:
    """One cluster's side of lending. Any instance of the control plane can serve it."""

    def __init__(
        self, store: LoanStore, fleet: FleetView, tokens: TokenStore, plane: ControlPlanePort
    ) -> None:
        self._store, self._fleet, self._tokens, self._plane = store, fleet, tokens, plane

    def _clock(self) -> Clock:
        return self._plane.clock

    def _drain_control(self) -> DrainControl:
        return self._plane.shard_manager

    def loans(self) -> tuple[Loan, ...]:
        """Every loan record."""
        return self._store.loans()

    def ages_s(self) -> dict[str, float]:
        """By container: the age of its record's state in seconds, by this cluster's clock."""
        now_ms = self._clock().now_ms()
        return {loan.container: max(0, now_ms - loan.at_ms) / 1000 for loan in self._store.loans()}

    def summary(self) -> dict[str, list[str]]:
        """The names of the containers that are lent and borrowed."""
        loans = self._store.loans()
        return {
            "lent": [loan.container for loan in loans if loan.state is LoanState.GONE],
            "borrowed": [loan.container for loan in loans if loan.owner],
        }

    # -- containers --------------------------------------------------------------------------------------

    def ask(self, container: str, *, owner: str = "") -> tuple[Loan | None, HostOrder | None]:
        """A host polls for orders of its container; the poll also shows that the container is here."""
        loan, now_ms = self._store.loan(container), self._clock().now_ms()
        change = on_order_request(
            loan, self._status(container), container=container, owner=owner, now_ms=now_ms
        )
        if change is not None:
            loan = self._write(container, loan, change, actor=HOST_ACTOR)
        return loan, order_of(loan)

    def answer(self, container: str, *, number: int, accepted: bool, why: str) -> Loan | None:
        """A host's reply to an order."""
        loan, now_ms = self._store.loan(container), self._clock().now_ms()
        change = on_order_reply(loan, number=number, accepted=accepted, why=why, now_ms=now_ms)
        return loan if change is None else self._write(container, loan, change, actor=HOST_ACTOR)

    # -- the lending loop --------------------------------------------------------------------------------

    def lend(
        self, container: str, *, home: str, to: str, url: str, token: str, reason: str, actor: str
    ) -> Loan | None:
        """Begin to lend a container to another cluster, or to return it."""
        loan, now_ms = self._store.loan(container), self._clock().now_ms()
        change = lend(
            loan,
            self._status(container),
            container=container,
            home=home,
            to=to,
            url=url,
            token=token,
            reason=reason,
            now_ms=now_ms,
        )
        return self._write(container, loan, change, actor=actor)

    def keep(self, container: str, *, version: int, reason: str, actor: str) -> Loan | None:
        """Cancel a loan that has begun: the container stays."""
        loan, now_ms = self._store.loan(container), self._clock().now_ms()
        change = keep(loan, container=container, version=version, reason=reason, now_ms=now_ms)
        return self._write(container, loan, change, actor=actor)

    def expect(
        self, container: str, *, lender: str, owner: str, version: int, reason: str, actor: str
    ) -> tuple[Loan, str]:
        """Announce a container that will come; returns the token for it, which is shown only once."""
        loan, now_ms = self._store.loan(container), self._clock().now_ms()
        change = expect(
            loan,
            self._status(container),
            container=container,
            lender=lender,
            owner=owner,
            version=version,
            reason=reason,
            now_ms=now_ms,
        )
        assert change.loan is not None
        entry = _entry(container, change, actor, now_ms)
        token = self._store.write_with_token(loan, change.loan, entry)
        if token is None:
            raise self._conflict(container, loan)
        self._tokens.revoked()  # a token issued before is no longer valid
        return change.loan, token

    def forget(self, container: str, *, version: int, reason: str, actor: str) -> Loan | None:
        """Drop the record of a container that did not come or has left."""
        loan, now_ms = self._store.loan(container), self._clock().now_ms()
        seen = self._status(container)
        change = forget(loan, seen, container=container, version=version, reason=reason, now_ms=now_ms)
        return self._write(container, loan, change, actor=actor)

    # ----------------------------------------------------------------------------------------------------

    def _write(self, container: str, before: Loan | None, change: LoanChange, *, actor: str) -> Loan | None:
        clock = self._clock()
        if change.mark:
            reason = f"lending: {change.decision}"
            mark = self._drain_control().drain if change.mark == "drain" else self._drain_control().uncordon
            mark(container, clock.boot_ms(), reason=reason, actor=actor)
        entry = _entry(container, change, actor, clock.now_ms()) if change.decision else None
        if not self._store.write(before, change, entry):
            raise self._conflict(container, before)
        if change.loan is None or (before is not None and before.token_id != change.loan.token_id):
            self._tokens.revoked()
        return change.loan

    def _conflict(self, container: str, before: Loan | None) -> VersionConflict:
        now = self._store.loan(container)
        versions = [0 if loan is None else loan.version for loan in (before, now)]
        return VersionConflict(f"container {container}", expected=versions[0], actual=versions[1])

    def _status(self, container: str) -> ContainerStatus:
        row = next((row for row in self._fleet.containers() if row.name == container), None)
        if row is None:
            return ContainerStatus()
        return ContainerStatus(
            is_live=row.may_run,
            is_draining=row.draining,
            shards=sum(container in (shard.container, shard.target) for shard in self._fleet.shards()),
        )


def without_secrets(loan: Loan) -> Loan:
    """A loan without its tokens, for display."""
    return replace(loan, token="", token_id="")


def describe_loan(loan: Loan | None) -> str:
    """A short text: the owner of a container, and where it goes."""
    if loan is None:
        return ""
    origin = f"borrowed from {loan.owner}" if loan.owner else ""
    match loan.state:
        case LoanState.GONE:
            return f"lent to {loan.peer}"
        case LoanState.EXPECTED:
            return f"{origin or 'back'}, on its way"
        case LoanState.ASKED | LoanState.DRAINING | LoanState.ORDERED:
            return f"{origin}, goes to {loan.peer}" if origin else f"goes to {loan.peer}"
    return origin


def _entry(container: str, change: LoanChange, actor: str, now_ms: Millis) -> Entry:
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
