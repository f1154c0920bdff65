"""A container between two clusters: what its record says, what its host is told, what comes next. Pure.

    here ── lend ──► asked ── its host can ──► draining ── it is empty ──► ordered ── it went ──► gone
                       └─ it cannot: here         └────────── kept: here ──────┘                   │
    (elsewhere) expected ── its host asks there ──► here, with an owner          it asks again: here

Each cluster has a record of its own. A host asks only the cluster that its container works for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from penstock.core.clock import Millis
from penstock.core.errors import NotFound, Refused, VersionConflict


class LoanState(StrEnum):
    """Where a container is, as its cluster knows it; the drawing above."""

    HERE = "here"
    ASKED = "asked"
    DRAINING = "draining"
    ORDERED = "ordered"
    GONE = "gone"
    EXPECTED = "expected"


AGAIN_MS: Millis = 30_000  # so soon nobody else says that the same container comes
LEAVING = frozenset({LoanState.ASKED, LoanState.DRAINING, LoanState.ORDERED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """One container's record in one cluster. There is one for each whose host listens."""

    container: str
    state: LoanState = LoanState.HERE
    owner: str = ""  # the cluster it belongs to; "": this one
    peer: str = ""  # where it goes, went or comes from
    home: str = ""  # what the peer calls this cluster, while it leaves
    url: str = ""  # of the peer, while it leaves
    token: str = ""  # for the peer, until it went
    token_id: str = ""  # of the token that was issued here for it
    refused_by: str = ""  # the peer that it could not go to
    reason: str = ""
    at_ms: Millis = 0
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a host is told: look whether you can join there, or go."""

    kind: Literal["check", "go"]
    number: int
    to: str
    owner: str  # as the cluster it goes to has it; "": it goes home
    url: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A container as its cluster sees it now."""

    is_live: bool = False
    is_draining: bool = False
    shards: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The record from now on (None: none), what the journal says, and what becomes of its shards."""

    loan: Loan | None
    decision: str = ""  # "": nothing to tell
    reason: str = ""
    mark: Literal["", "drain", "uncordon"] = ""


def on_ask(loan: Loan | None, seen: Seen, *, container: str, owner: str, now_ms: Millis) -> Change | None:
    """Its host asks: it is here. None: nothing is new."""
    if not seen.is_live:
        return None  # not registered yet
    if loan is None:
        # A version that no earlier record of this name had.
        return Change(loan=Loan(container=container, owner=owner, at_ms=now_ms, version=now_ms))
    match loan.state:
        case LoanState.EXPECTED:
            if loan.owner:
                decision, came = f"borrowed from {loan.owner}", _here(loan, now_ms)
            else:
                # It has a token of its own here.
                decision, came = f"back from {loan.peer}", replace(_here(loan, now_ms), token_id="")
            return Change(loan=came, decision=decision, reason=loan.reason, mark="uncordon")
        case LoanState.GONE:
            reason = f"it left {loan.peer} by itself, or its host was started again"
            return Change(loan=_here(loan, now_ms), decision="back", reason=reason, mark="uncordon")
        case LoanState.DRAINING if not seen.is_draining:
            return Change(loan=_here(loan, now_ms), decision="stays", reason="it takes shards again")
        case LoanState.DRAINING if not seen.shards:
            ordered = _next(loan, LoanState.ORDERED, now_ms)
            return Change(loan=ordered, decision=f"empty: told to go to {loan.peer}", reason=loan.reason)
    return None


def order_of(loan: Loan | None) -> Order | None:
    """What its host is told now."""
    if loan is None or loan.state not in (LoanState.ASKED, LoanState.ORDERED):
        return None
    return Order(
        kind="check" if loan.state is LoanState.ASKED else "go",
        number=loan.version,
        to=loan.peer,
        owner="" if loan.owner else loan.home,
        url=loan.url,
        token=loan.token,
    )


def on_answer(loan: Loan | None, *, number: int, accepted: bool, why: str, now_ms: Millis) -> Change | None:
    """What a host says to an order; to one that does not stand any more: NotFound."""
    if loan is not None and loan.state is LoanState.GONE and loan.version == number + 1 and accepted:
        return None  # said twice
    if loan is None or loan.version != number or loan.state not in (LoanState.ASKED, LoanState.ORDERED):
        raise NotFound(
            f"there is no order {number}",
            why="it was taken back, or another one stands now",
            fix="ask again what is to be done",
        )
    if not accepted:
        stays = replace(_here(loan, now_ms), refused_by=loan.peer, reason=why)
        return Change(loan=stays, decision=f"cannot go to {loan.peer}", reason=why, mark="uncordon")
    if loan.state is LoanState.ASKED:
        draining = _next(loan, LoanState.DRAINING, now_ms)
        return Change(loan=draining, decision=f"drained for {loan.peer}", reason=loan.reason, mark="drain")
    went = replace(_next(loan, LoanState.GONE, now_ms), home="", url="", token="")
    # What is another's leaves nothing behind.
    is_own = not loan.owner
    decision = f"lent to {loan.peer}" if is_own else f"returned to {loan.peer}"
    return Change(loan=went if is_own else None, decision=decision, reason=loan.reason)


def lend(
    loan: Loan | None,
    seen: Seen,
    *,
    container: str,
    home: str,
    to: str,
    url: str,
    token: str,
    reason: str,
    now_ms: Millis,
) -> Change:
    """Begin to give a container to another cluster."""
    if loan is None or loan.state is not LoanState.HERE or not seen.is_live:
        raise Refused(
            f"container {container} cannot be lent now",
            why=_why_not(loan, seen),
            fix="`penstock container ls` shows containers; those that joined with --join can be lent",
        )
    if loan.owner and loan.owner != to:
        raise Refused(
            f"container {container} cannot go to {to}",
            why=f"it belongs to {loan.owner}, and what is borrowed is not lent on",
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
    return Change(loan=asked, decision=f"asked to go to {to}", reason=reason)


def keep(loan: Loan | None, *, container: str, version: int, reason: str, now_ms: Millis) -> Change:
    """It stays after all."""
    if loan is None or loan.version != version or loan.state not in LEAVING:
        raise VersionConflict(
            f"container {container}", expected=version, actual=0 if loan is None else loan.version
        )
    return Change(loan=_here(loan, now_ms), decision="stays", reason=reason, mark="uncordon")


def expect(
    loan: Loan | None,
    seen: Seen,
    *,
    container: str,
    lender: str,
    owner: str,
    version: int,
    reason: str,
    now_ms: Millis,
) -> Change:
    """A container of that name will come from another cluster; `version`: of the record this was decided on.

    Whoever said so a moment ago is not overruled: that one's token would be void.
    """
    known = 0 if loan is None else loan.version
    is_new = loan is not None and loan.state is LoanState.EXPECTED and now_ms - loan.at_ms < AGAIN_MS
    if version != known or is_new:
        raise VersionConflict(f"container {container}", expected=version, actual=known)
    is_free = loan is None or loan.state in (LoanState.GONE, LoanState.EXPECTED)
    if seen.is_live or not is_free:
        raise Refused(
            f"there is a container {container} already",
            why="it lives here, and a name belongs to one container",
            fix="start one of the two under another name: `penstock container --join … --name NAME`",
        )
    if loan is not None and loan.state is LoanState.GONE and owner:
        raise Refused(
            f"container {container} is this cluster's own",
            why=f"it was lent to {loan.peer}, and is now said to belong to {owner}",
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
    return Change(loan=expected, decision=f"expected from {lender}", reason=reason)


def forget(
    loan: Loan | None, seen: Seen, *, container: str, version: int, reason: str, now_ms: Millis
) -> Change:
    """It did not come, or is not here any more. One's own is known to be gone all the same."""
    if loan is None or loan.version != version:
        raise VersionConflict(
            f"container {container}", expected=version, actual=0 if loan is None else loan.version
        )
    if seen.is_live and loan.state is not LoanState.EXPECTED:
        raise Refused(
            f"container {container} is here", why="it has a lease", fix="drain it and let it go first"
        )
    if loan.owner:
        return Change(loan=None, decision=f"not here any more: {loan.owner} has it or will", reason=reason)
    return Change(loan=_next(loan, LoanState.GONE, now_ms), decision="did not come back yet", reason=reason)


def _why_not(loan: Loan | None, seen: Seen) -> str:
    if loan is None:
        return "its host does not ask for such orders, or there is no such container"
    return "it has no lease" if not seen.is_live else f"its record says: {loan.state} {loan.peer}".rstrip()


def _next(loan: Loan, state: LoanState, now_ms: Millis) -> Loan:
    return replace(loan, state=state, at_ms=now_ms, version=loan.version + 1)


def _here(loan: Loan, now_ms: Millis) -> Loan:
    return replace(_next(loan, LoanState.HERE, now_ms), home="", peer="", url="", token="")
