"""Routes of lending: container hosts poll for orders; the lender makes clusters give and take containers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from penstock.db.tokens import Caller
from penstock.fleet.loan_service import HostOrder, Loan, LoanState, describe_loan
from penstock.jobs.layer_writer import REASON_MAX
from penstock.jobs.text_rules import check_line
from penstock.server.bodies import INT_MAX, Line, Name, NameText, Reason
from penstock.server.pools import LONG, WRITES
from penstock.server.replies import Reply, problems
from penstock.server.security import Guard
from penstock.server.services import Control

Cluster = Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.\-]{0,199})?$", max_length=200)]
Url = Annotated[str, Field(pattern=r"^https?://[!-~]+$", max_length=500)]
Token = Annotated[str, Field(pattern=r"^[!-~]+$", max_length=200)]
Version = Annotated[int, Field(ge=0, le=INT_MAX)]
ASKING = (404, 409, 507)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AskOrder(_Body):
    """A host polls for orders; `owner`: as the host was told when the container came."""

    owner: Cluster = ""


class AnswerOrder(_Body):
    """A host's answer to an order."""

    number: Version
    accepted: bool
    why: Line = ""


class LendBody(_Body):
    """The cluster that gets a container, and its URL; `home`: that cluster's name for this one."""

    home: NameText
    to: NameText
    url: Url
    token: Token
    why: Reason = ""


class ExpectBody(_Body):
    """The cluster from which a container comes, and its owner; no owner: this cluster."""

    lender: NameText
    owner: Cluster = ""
    version: Version = 0
    why: Reason = ""


class LoanChangeBody(_Body):
    """The version of the record that is changed, and the reason."""

    version: Version
    why: Reason = ""


class LoanLine(Reply):
    """One container's lending record."""

    container: str
    state: LoanState
    owner: str
    peer: str
    refused_by: str
    reason: str
    age_s: float
    version: int
    says: str

    @classmethod
    def of(cls, loan: Loan, age_s: float) -> LoanLine:
        return LoanLine(
            container=loan.container,
            state=loan.state,
            owner=loan.owner,
            peer=loan.peer,
            refused_by=loan.refused_by,
            reason=loan.reason,
            age_s=age_s,
            version=loan.version,
            says=describe_loan(loan),
        )


class Loans(Reply):
    """Every container that can be lent, is lent, or is expected."""

    loans: list[LoanLine]


class OrderLine(Reply):
    """An order for a host."""

    kind: Literal["check", "go"]
    number: int
    to: str
    owner: str
    url: str
    token: str

    @classmethod
    def of(cls, order: HostOrder) -> OrderLine:
        return OrderLine(
            kind=order.kind,
            number=order.number,
            to=order.to,
            owner=order.owner,
            url=order.url,
            token=order.token,
        )


class Ordered(Reply):
    """A container's lending state, and its order if there is one."""

    state: LoanState | Literal[""]
    order: OrderLine | None


class Expected(Reply):
    """The token for a container that is expected."""

    version: int
    token: str


def add_lending_routes(router: APIRouter, plane: Control, guard: Guard) -> None:
    """Routes to lend, keep, expect and forget containers."""

    @router.get("/loans", responses=problems())
    @LONG
    def list_loans(caller: Caller = guard.allow("container.read")) -> Loans:
        """Containers that can be lent, are lent, borrowed, or on their way."""
        ages = plane.lending.ages_s()
        loans = plane.lending.loans()
        return Loans(loans=[LoanLine.of(loan, ages.get(loan.container, 0.0)) for loan in loans])

    @router.post("/containers/{name}/order", responses=problems(*ASKING))
    @WRITES
    def ask_order(name: Name, body: AskOrder, caller: Caller = guard.allow("container.beat")) -> Ordered:
        """Poll of the container's host for an order; a host that polls makes its container lendable."""
        loan, order = plane.lending.ask(name, owner=body.owner)
        return Ordered(
            state="" if loan is None else loan.state, order=None if order is None else OrderLine.of(order)
        )

    @router.post("/containers/{name}/order/answer", responses=problems(*ASKING))
    @WRITES
    def answer_order(
        name: Name, body: AnswerOrder, caller: Caller = guard.allow("container.beat")
    ) -> Ordered:
        """The host's answer to an order."""
        why = " ".join(body.why.split())[:REASON_MAX]
        loan = plane.lending.answer(name, number=body.number, accepted=body.accepted, why=why)
        plane.wake_shard_manager()
        return Ordered(state=LoanState.GONE if loan is None else loan.state, order=None)

    @router.post("/containers/{name}/lend", responses=problems(*ASKING))
    @WRITES
    def lend_container(
        name: Name, body: LendBody, caller: Caller = guard.allow("container.lend")
    ) -> LoanLine:
        """Begin to lend a container: its host is asked, then it is drained, then it moves."""
        loan = plane.lending.lend(
            name, home=body.home, to=body.to, url=body.url, token=body.token, **_arguments(caller, body.why)
        )
        assert loan is not None
        return LoanLine.of(loan, 0.0)

    @router.post("/containers/{name}/keep", responses=problems(*ASKING))
    @WRITES
    def keep_container(
        name: Name, body: LoanChangeBody, caller: Caller = guard.allow("container.lend")
    ) -> LoanLine:
        """Cancel lending: the container stays and takes shards."""
        loan = plane.lending.keep(name, version=body.version, **_arguments(caller, body.why))
        assert loan is not None
        plane.wake_shard_manager()
        return LoanLine.of(loan, 0.0)

    @router.post("/containers/{name}/expect", responses=problems(*ASKING))
    @WRITES
    def expect_container(
        name: Name, body: ExpectBody, caller: Caller = guard.allow("container.lend")
    ) -> Expected:
        """Announce a container from another cluster; returns the token that it must use."""
        arguments = _arguments(caller, body.why)
        loan, token = plane.lending.expect(
            name, lender=body.lender, owner=body.owner, version=body.version, **arguments
        )
        return Expected(version=loan.version, token=token)

    @router.post("/containers/{name}/forget", responses=problems(*ASKING))
    @WRITES
    def forget_container(
        name: Name, body: LoanChangeBody, caller: Caller = guard.allow("container.lend")
    ) -> Loans:
        """Delete the record of a container that did not come or has left; returns what remains of it."""
        loan = plane.lending.forget(name, version=body.version, **_arguments(caller, body.why))
        return Loans(loans=[] if loan is None else [LoanLine.of(loan, 0.0)])


def _arguments(caller: Caller, why: str) -> dict[str, Any]:
    check_line("the reason", why, length_max=REASON_MAX)
    return {"reason": why, "actor": caller.name}
