"""Claims about a round of lending: what is on its way counts, what is late is called off, who cannot take part."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.scaling.lending import (
    ARRIVE_S,
    REFUSED_S,
    SETTLE_S,
    STAYS_S,
    STEP_S,
    ClusterStatus,
    ListedContainer,
    LoanStatus,
    cluster_room,
    plan_lending,
    read_cluster,
)

SIZE = {"cpu": 10.0, "memory_mb": 8000.0}


def a_container(name: str, **changes: Any) -> ListedContainer:
    return ListedContainer(**({"name": name, "is_live": True, "takes_shards": True, "size": SIZE} | changes))


def a_loan(container: str, state: str = "here", **changes: Any) -> LoanStatus:
    plain = {"owner": "", "peer": "", "refused_by": "", "age_s": 5000.0, "version": 1}
    return LoanStatus(container=container, state=state, **(plain | changes))


def a_cluster(name: str, cpu: float, *loans: LoanStatus, **changes: Any) -> ClusterStatus:
    """A container for each record that is here, with so many cores reserved."""
    containers = tuple(
        a_container(loan.container) for loan in loans if loan.state not in ("gone", "expected")
    )
    plain = {"containers": containers, "reserved": {"cpu": cpu}, "is_short": False}
    return ClusterStatus(
        name=name, url=f"http://{name}:1", loans={one.container: one for one in loans}, **(plain | changes)
    )


ROOMY = a_cluster("a", 1.0, a_loan("a1"), a_loan("a2"))
FULL = a_cluster("b", 9.9, a_loan("b1"))


def moves(*clusters: ClusterStatus) -> list[tuple[str, str, str]]:
    return [(move.container, move.source, move.target) for move in plan_lending(clusters).transfers]


def test_a_cluster_that_is_short_gets_one():
    assert len(moves(ROOMY, FULL)) == 1 and moves(ROOMY, FULL)[0][1:] == ("a", "b")
    refused = a_cluster("b", 5.0, a_loan("b1"), is_short=True)
    assert len(moves(ROOMY, refused)) == 1
    assert moves(ROOMY, a_cluster("b", 5.0, a_loan("b1"))) == []


@pytest.mark.parametrize("state", ["asked", "draining", "ordered"])
def test_what_is_on_its_way_is_not_asked_for_twice(state: str):
    leaving = a_cluster("a", 1.0, a_loan("a1"), a_loan("a2", state, peer="b", age_s=1.0), a_loan("a3"))
    expecting = a_cluster(
        "b", 9.9, a_loan("b1"), a_loan("a2", "expected", peer="a", owner="a", age_s=1.0), is_short=True
    )
    assert moves(leaving, expecting) == []


def test_one_that_went_counts_until_it_should_have_come():
    gone = a_loan("a2", "gone", peer="b", age_s=1.0)
    lender = a_cluster(
        "a", 1.0, a_loan("a1"), gone, a_loan("a3"),
        containers=(a_container("a1"), a_container("a2", is_live=False), a_container("a3")),
    )  # fmt: skip
    coming = a_cluster("b", 9.9, a_loan("b1"), a_loan("a2", "expected", peer="a", owner="a", age_s=1.0))
    late = a_cluster("b", 9.9, a_loan("b1"), a_loan("a2", "expected", peer="a", owner="a", age_s=ARRIVE_S))
    assert moves(lender, coming) == [] and len(moves(lender, late)) == 1
    (forget,) = plan_lending([lender, late]).drops
    assert (forget.cluster, forget.container) == ("b", "a2") and "did not arrive" in forget.reason


def test_one_that_came_is_given_time():
    """Plan: b was refused something and got one; it is neither given more nor is that one taken back at once."""
    lender = a_cluster("a", 1.0, a_loan("a1"), a_loan("a2"), a_loan("a3", "gone", peer="b"))
    new = a_cluster("b", 5.0, a_loan("b1"), a_loan("a3", owner="a", age_s=1.0), is_short=True)
    assert SETTLE_S < STAYS_S and moves(lender, new) == []
    calm = a_cluster("b", 1.0, a_loan("b1"), a_loan("a3", owner="a", age_s=STAYS_S - 1))
    assert moves(lender, calm) == []
    calm = a_cluster("b", 1.0, a_loan("b1"), a_loan("a3", owner="a", age_s=STAYS_S))
    assert moves(lender, calm) == [("a3", "b", "a")]


@pytest.mark.parametrize("state", ["asked", "draining", "ordered"])
def test_a_step_that_takes_too_long_is_called_off(state: str):
    limit = STEP_S[state]
    for age_s, count in ((limit - 1, 0), (limit, 1)):
        cluster = a_cluster("a", 1.0, a_loan("a1"), a_loan("a2", state, peer="b", age_s=age_s, version=9))
        keeps = plan_lending([cluster, FULL]).cancels
        assert len(keeps) == count and all(keep.version == 9 for keep in keeps)


def test_one_that_is_home_again_is_forgotten_elsewhere():
    away = a_cluster("b", 1.0, a_loan("b1"), a_loan("a1", owner="a"), containers=(a_container("b1"),))
    (forget,) = plan_lending([ROOMY, away]).drops
    assert (forget.cluster, forget.container) == ("b", "a1")
    empty = a_cluster("a", 1.0, a_loan("a2"), a_loan("a1", "gone", peer="b"))
    assert plan_lending([empty, away]).drops == (), "nobody knows where it is: it may come back"


def test_who_is_left_alone():
    """Containers whose host does not listen, that could not go, that are drained, or whose name is there twice."""
    plain = a_cluster("a", 1.0, containers=(a_container("a1"), a_container("a2")))
    assert moves(plain, FULL) == []
    refused = [a_loan(name, refused_by="b", age_s=REFUSED_S - 1) for name in ("a1", "a2")]
    assert moves(a_cluster("a", 1.0, *refused), FULL) == []
    drained = a_cluster(
        "a", 1.0, a_loan("a1"), a_loan("a2"),
        containers=(a_container("a1", takes_shards=False), a_container("a2")),
    )  # fmt: skip
    assert moves(drained, FULL) == [], "the other one is all that is left"
    twice = a_cluster("b", 9.9, a_loan("a1"))
    assert moves(ROOMY, twice) == [("a2", "a", "b")]
    assert "a1" in plan_lending([ROOMY, twice]).left_out


def test_clusters_without_limits_or_needs_take_no_part():
    boundless = a_cluster("a", 1.0, a_loan("a1"), a_loan("a2"), boundless=("a1",))
    plan = plan_lending([boundless, FULL])
    assert plan.transfers == () and "no capacity: a1" in plan.left_out["a"]
    nothing = a_cluster("c", 0.0, reserved={})
    plan = plan_lending([ROOMY, nothing])
    assert plan.transfers == () and "c" in plan.left_out
    assert cluster_room(boundless).rooms == ()


def test_a_cluster_with_jobs_and_no_container_gets_one():
    waiting = a_cluster("b", 2.0, reserved={"cpu": 2.0, "disk_mb": 5.0})
    assert len(moves(ROOMY, waiting)) == 1


def test_a_kind_that_nobody_has_is_not_limited():
    other = a_cluster("b", 5.0, a_loan("b1"), reserved={"cpu": 5.0, "disk_mb": 5.0})
    assert moves(ROOMY, other) == []


def test_answers_of_the_api_become_facts():
    containers = [
        {"name": "a1", "state": "live", "cordoned": False, "draining": False, "capacity": {"cpu": 4.0, "disk_mb": 0.0}},
        {"name": "a2", "state": "gone", "cordoned": True, "draining": True, "capacity": {}},
    ]  # fmt: skip
    loan = {
        "container": "a1",
        "state": "here",
        "owner": "",
        "peer": "",
        "refused_by": "",
        "age_s": 1.5,
        "version": 3,
    }
    kinds = [{"kind": "cpu", "reserved": 2.0}, {"kind": "disk_mb", "reserved": 0.0}]
    capacity = {"kinds": kinds, "short_of": [], "refused": ["demo.x"], "stopped": [], "boundless": []}
    seen = read_cluster(
        "a",
        "http://a:1",
        containers=containers,
        loans=[{**loan, "says": "", "reason": ""}],
        capacity=capacity,
    )
    assert seen.is_short and seen.reserved == {"cpu": 2.0} and seen.containers[0].size == {"cpu": 4.0}
    assert seen.is_live("a1") and not seen.is_live("a2") and seen.loans["a1"].version == 3
