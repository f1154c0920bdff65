"""Claims about a container's record: what leads where, and that nothing else does."""

from __future__ import annotations

import pytest

from penstock.core.errors import NotFound, Refused, VersionConflict
from penstock.fleet.loan_service import (
    EXPECT_REPEAT_MS,
    ContainerStatus,
    Loan,
    LoanState,
    expect,
    forget,
    keep,
    lend,
    on_order_reply,
    on_order_request,
    order_of,
)

NOW = 10**12
HERE = ContainerStatus(is_live=True)
ASKED = {"container": "c1", "owner": "", "now_ms": NOW}
GIVEN = {"container": "c1", "home": "a", "to": "b", "url": "http://b:1", "token": "pk_x", "reason": "short"}


def a_loan(state: str = "here", **changes: object) -> Loan:
    values = {"container": "c1", "state": LoanState(state), "at_ms": NOW - 1000, "version": 7, **changes}
    return Loan(**values)  # type: ignore[arg-type]


def test_whoever_asks_is_known_from_then_on_but_only_once_it_has_a_lease():
    assert on_order_request(None, ContainerStatus(), **ASKED) is None
    change = on_order_request(None, HERE, **ASKED)
    assert change is not None and change.loan is not None and change.loan.state == "here"
    assert on_order_request(change.loan, HERE, **ASKED) is None, "nothing is new"


def test_it_is_asked_drained_and_goes_when_it_is_empty():
    loan = lend(a_loan(), HERE, **GIVEN, now_ms=NOW).loan
    order = order_of(loan)
    assert (
        loan is not None
        and order is not None
        and (order.kind, order.owner, order.token) == ("check", "a", "pk_x")
    )
    assert on_order_request(loan, HERE, **ASKED) is None
    change = on_order_reply(loan, number=loan.version, accepted=True, why="", now_ms=NOW)
    assert change is not None and change.loan is not None and change.mark == "drain"
    full, empty = (
        ContainerStatus(is_live=True, is_draining=True, shards=3),
        ContainerStatus(is_live=True, is_draining=True),
    )
    assert on_order_request(change.loan, full, **ASKED) is None and order_of(change.loan) is None
    ordered = on_order_request(change.loan, empty, **ASKED)
    assert ordered is not None and ordered.loan is not None
    order = order_of(ordered.loan)
    assert order is not None and order.kind == "go"
    gone = on_order_reply(ordered.loan, number=order.number, accepted=True, why="", now_ms=NOW)
    assert gone is not None and gone.loan is not None
    assert (gone.loan.state, gone.loan.peer, gone.loan.token) == ("gone", "b", "")
    assert on_order_reply(gone.loan, number=order.number, accepted=True, why="", now_ms=NOW) is None, (
        "said twice"
    )


def test_what_is_anothers_leaves_nothing_behind_and_goes_home_only():
    borrowed = a_loan(owner="b")
    with pytest.raises(Refused, match="cannot go to c"):
        lend(borrowed, HERE, **{**GIVEN, "to": "c"}, now_ms=NOW)
    order = order_of(lend(borrowed, HERE, **GIVEN, now_ms=NOW).loan)
    assert order is not None and order.owner == "", "it goes home"
    gone = on_order_reply(a_loan("ordered", owner="b", peer="b"), number=7, accepted=True, why="", now_ms=NOW)
    assert gone is not None and gone.loan is None and gone.decision == "returned to b"


def test_a_host_that_cannot_says_so_and_it_stays():
    for state in ("asked", "ordered"):
        change = on_order_reply(
            a_loan(state, peer="b", token="pk_x"), number=7, accepted=False, why="no way", now_ms=NOW
        )
        assert change is not None and change.loan is not None and change.mark == "uncordon"
        assert (change.loan.state, change.loan.refused_by, change.loan.token) == ("here", "b", "")


@pytest.mark.parametrize("state", ["here", "draining", "gone", "expected"])
def test_an_answer_to_nothing_is_not_taken(state: str):
    with pytest.raises(NotFound):
        on_order_reply(a_loan(state), number=7, accepted=True, why="", now_ms=NOW)
    with pytest.raises(NotFound):
        on_order_reply(None, number=7, accepted=True, why="", now_ms=NOW)
    with pytest.raises(NotFound):
        on_order_reply(a_loan("asked"), number=6, accepted=True, why="", now_ms=NOW)


@pytest.mark.parametrize("state", ["asked", "draining", "ordered", "gone", "expected"])
def test_only_what_is_here_is_lent(state: str):
    with pytest.raises(Refused):
        lend(a_loan(state), HERE, **GIVEN, now_ms=NOW)
    with pytest.raises(Refused):
        lend(None, HERE, **GIVEN, now_ms=NOW)
    with pytest.raises(Refused, match="c1"):
        lend(a_loan(), ContainerStatus(), **GIVEN, now_ms=NOW)


def test_it_is_kept_while_it_leaves_and_not_after():
    for state in ("asked", "draining", "ordered"):
        change = keep(a_loan(state), container="c1", version=7, reason="late", now_ms=NOW)
        assert change.loan is not None and change.loan.state == "here" and change.mark == "uncordon"
    for loan, version in ((a_loan("gone"), 7), (a_loan("asked"), 6), (None, 7)):
        with pytest.raises(VersionConflict):
            keep(loan, container="c1", version=version, reason="late", now_ms=NOW)


def test_a_name_has_one_container():
    given = {"container": "c1", "lender": "a", "owner": "a", "reason": "x", "now_ms": NOW}
    assert expect(None, ContainerStatus(), version=0, **given).loan is not None
    with pytest.raises(Refused, match="container c1 already exists"):
        expect(None, HERE, version=0, **given)
    with pytest.raises(Refused, match="is this cluster's own"):
        expect(a_loan("gone", peer="b"), ContainerStatus(), version=7, **given)
    with pytest.raises(VersionConflict):
        expect(a_loan("gone"), ContainerStatus(), version=6, **given)
    with pytest.raises(VersionConflict):  # somebody else said so a moment ago
        expect(a_loan("expected", owner="a"), ContainerStatus(), version=7, **given)
    later = expect(
        a_loan("expected", owner="a", at_ms=NOW - EXPECT_REPEAT_MS), ContainerStatus(), version=7, **given
    )
    assert later.loan is not None and later.loan.version == 8


def test_what_did_not_come_is_forgotten_but_ones_own_is_known_to_be_away():
    given = {"container": "c1", "version": 7, "reason": "late", "now_ms": NOW}
    assert forget(a_loan("expected", owner="a"), ContainerStatus(), **given).loan is None
    own = forget(a_loan("expected", peer="b"), ContainerStatus(), **given).loan
    assert own is not None and own.state == "gone"
    with pytest.raises(Refused):
        forget(a_loan("here", owner="a"), HERE, **given)


@pytest.mark.parametrize(("state", "told"), [("gone", "back"), ("expected", "back from b")])
def test_one_that_asks_again_is_back(state: str, told: str):
    change = on_order_request(a_loan(state, peer="b", token_id="t"), HERE, **ASKED)
    assert change is not None and change.loan is not None
    assert (change.loan.state, change.decision, change.mark) == ("here", told, "uncordon")


def test_one_that_takes_shards_again_stays():
    change = on_order_request(a_loan("draining"), ContainerStatus(is_live=True, shards=2), **ASKED)
    assert change is not None and change.loan is not None and change.loan.state == "here"
