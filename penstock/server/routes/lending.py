"""Routes of lending: container hosts poll for orders; the lender makes clusters give and take containers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from penstock.db.tokens import Caller
from penstock.fleet.loan_service import Loan, LoanState, describe_loan
from penstock.jobs.layer_writer import REASON_MAX
from penstock.jobs.text_rules import check_line
from penstock.server.answers import answer
from penstock.server.bodies import INT_MAX, Line, Name, NameText, Reason
from penstock.server.pools import LONG, WRITES
from penstock.server.replies import problems
from penstock.server.security import Guard
from penstock.server.services import Control

Cluster = Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.\-]{0,199})?$", max_length=200)]
Url = Annotated[str, Field(pattern=r"^https?://[!-~]+$", max_length=500)]
Token = Annotated[str, Field(pattern=r"^[!-~]+$", max_length=200)]
Version = Annotated[int, Field(ge=0, le=INT_MAX)]
ASKING = (404, 409, 507)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AskOrder(_Model):
    """A host polls for orders; `owner`: as the host was told when the container came."""

    owner: Cluster = ""


class AnswerOrder(_Model):
    """A host's answer to an order."""

    number: Version
    accepted: bool
    why: Line = ""


class LendBody(_Model):
    """The cluster that gets a container, and its URL; `home`: that cluster's name for this one."""

    home: NameText
    to: NameText
    url: Url
    token: Token
    why: Reason = ""


class ExpectBody(_Model):
    """The cluster from which a container comes, and its owner; no owner: this cluster."""

    lender: NameText
    owner: Cluster = ""
    version: Version = 0
    why: Reason = ""


class LoanChangeBody(_Model):
    """The version of the record that is changed, and the reason."""

    version: Version
    why: Reason = ""


class LoanLine(_Model):
    """One container's lending record."""

    container: str
    state: Literal["here", "asked", "draining", "ordered", "gone", "expected"]
    owner: str
    peer: str
    refused_by: str
    reason: str
    age_s: float
    version: int
    says: str


class Loans(_Model):
    """Every container that can be lent, is lent, or is expected."""

    loans: list[LoanLine]


class OrderLine(_Model):
    """An order for a host."""

    kind: Literal["check", "go"]
    number: int
    to: str
    owner: str
    url: str
    token: str


class Ordered(_Model):
    """A container's lending state, and its order if there is one."""

    state: Literal["", "here", "asked", "draining", "ordered", "gone", "expected"]
    order: OrderLine | None


class Expected(_Model):
    """The token for a container that is expected."""

    version: int
    token: str


def add_lending_routes(router: APIRouter, plane: Control, guard: Guard) -> None:
    """Routes to lend, keep, expect and forget containers."""

    @router.get("/loans", response_model=Loans, responses=problems())
    @LONG
    def list_loans(caller: Caller = guard.allow("container.read")) -> Response:
        """Containers that can be lent, are lent, borrowed, or on their way."""
        ages = plane.lending.ages_s()
        return answer(
            {"loans": [_line(loan, ages.get(loan.container, 0.0)) for loan in plane.lending.loans()]}
        )

    @router.post("/containers/{name}/order", response_model=Ordered, responses=problems(*ASKING))
    @WRITES
    def ask_order(name: Name, body: AskOrder, caller: Caller = guard.allow("container.beat")) -> Response:
        """Poll of the container's host for an order; a host that polls makes its container lendable."""
        loan, order = plane.lending.ask(name, owner=body.owner)
        found = {"state": "" if loan is None else str(loan.state)}
        return answer({**found, "order": None if order is None else asdict(order)})

    @router.post("/containers/{name}/order/answer", response_model=Ordered, responses=problems(*ASKING))
    @WRITES
    def answer_order(
        name: Name, body: AnswerOrder, caller: Caller = guard.allow("container.beat")
    ) -> Response:
        """The host's answer to an order."""
        why = " ".join(body.why.split())[:REASON_MAX]
        loan = plane.lending.answer(name, number=body.number, accepted=body.accepted, why=why)
        plane.wake_shard_manager()
        state = LoanState.GONE if loan is None else loan.state
        return answer({"state": str(state), "order": None})

    @router.post("/containers/{name}/lend", response_model=LoanLine, responses=problems(*ASKING))
    @WRITES
    def lend_container(
        name: Name, body: LendBody, caller: Caller = guard.allow("container.lend")
    ) -> Response:
        """Begin to lend a container: its host is asked, then it is drained, then it moves."""
        loan = plane.lending.lend(
            name, home=body.home, to=body.to, url=body.url, token=body.token, **_arguments(caller, body.why)
        )
        assert loan is not None
        return answer(_line(loan, 0.0))

    @router.post("/containers/{name}/keep", response_model=LoanLine, responses=problems(*ASKING))
    @WRITES
    def keep_container(
        name: Name, body: LoanChangeBody, caller: Caller = guard.allow("container.lend")
    ) -> Response:
        """Cancel lending: the container stays and takes shards."""
        loan = plane.lending.keep(name, version=body.version, **_arguments(caller, body.why))
        assert loan is not None
        plane.wake_shard_manager()
        return answer(_line(loan, 0.0))

    @router.post("/containers/{name}/expect", response_model=Expected, responses=problems(*ASKING))
    @WRITES
    def expect_container(
        name: Name, body: ExpectBody, caller: Caller = guard.allow("container.lend")
    ) -> Response:
        """Announce a container from another cluster; returns the token that it must use."""
        arguments = _arguments(caller, body.why)
        loan, token = plane.lending.expect(
            name, lender=body.lender, owner=body.owner, version=body.version, **arguments
        )
        return answer({"version": loan.version, "token": token})

    @router.post("/containers/{name}/forget", response_model=Loans, responses=problems(*ASKING))
    @WRITES
    def forget_container(
        name: Name, body: LoanChangeBody, caller: Caller = guard.allow("container.lend")
    ) -> Response:
        """Delete the record of a container that did not come or has left; returns what remains of it."""
        loan = plane.lending.forget(name, version=body.version, **_arguments(caller, body.why))
        return answer({"loans": [] if loan is None else [_line(loan, 0.0)]})


def _arguments(caller: Caller, why: str) -> dict[str, Any]:
    check_line("the reason", why, length_max=REASON_MAX)
    return {"reason": why, "actor": caller.name}


def _line(loan: Loan, age_s: float) -> dict[str, Any]:
    names = ("container", "owner", "peer", "refused_by", "reason", "version")
    found = {name: getattr(loan, name) for name in names}
    return {**found, "state": str(loan.state), "age_s": age_s, "says": describe_loan(loan)}
