"""Claims about lending: two real control planes, a loop between them that may die at any step, hosts that obey."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.client import Client
from penstock.container.host import HOME_AFTER_MS
from penstock.core.errors import NotFound, PenstockError, Refused
from penstock.fleet.loan_service import EXPECT_REPEAT_MS
from penstock.scaling.lending import ARRIVE_S, STAYS_S, STEP_S, plan_lending
from tests.builders import ADMIN, a_body
from tests.cli.clusters import Clusters, two_clusters
from tests.waiting import until

# Whole ways there and back, and two that write at once, on both stores; the rest is decided before anything is written.
on_both_stores = pytest.mark.parametrize("clusters", ["sqlite", "postgres"], indirect=True)


@pytest.fixture
def clusters(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Clusters]:
    databases = ("", "")
    if getattr(request, "param", "sqlite") == "postgres":
        server = request.getfixturevalue("postgres")
        databases = server.new_database(), server.new_database()
    with two_clusters(tmp_path, databases) as found:
        yield found


def need(clusters: Clusters, cluster: str, cpu: float, name: str = "demo.need") -> None:
    """A job that reserves so many cores."""
    plane = clusters.planes[cluster].plane
    body = a_body(name, resources={"cpu": cpu, "memory_mb": 100}, task_count=1)
    asked = {"actor": ADMIN, "reason": "new", "idempotency_key": None, "now_ms": plane.clock.now_ms()}
    plane.jobs.create(name, body, birth="birth", **asked)


def calm(clusters: Clusters, cluster: str, name: str = "demo.need") -> None:
    plane = clusters.planes[cluster].plane
    asked = {"actor": ADMIN, "reason": "done", "idempotency_key": None, "now_ms": plane.clock.now_ms()}
    plane.jobs.set_state(name, "stopped", **asked)


@pytest.fixture
def short(clusters: Clusters) -> Clusters:
    """`a` has two empty containers, `b` one that is full."""
    for name, cluster in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        clusters.join(name, cluster)
    need(clusters, "b", 9.9)
    clusters.step()
    return clusters


def lent(clusters: Clusters) -> str:
    (name,) = [name for name, state in clusters.loans()["a"].items() if state != "here"]
    return name


@on_both_stores
def test_a_container_goes_to_the_cluster_that_is_short_and_comes_back(short: Clusters):
    """Plan: one is lent, drained first, works for b, is seen to be borrowed; then b needs less and it goes home.
    Nothing is left behind, and both journals say why.
    """
    lender = short.lender()
    assert lender.round() == ()
    name = lent(short)
    assert short.loans()["a"][name] == "asked" and short.loans()["b"] == {"b1": "here", name: "expected"}
    lender.round()
    assert sum(state != "here" for state in short.loans()["a"].values()) == 1, (
        "what comes is not asked for twice"
    )
    short.until("it works for b", lambda: short.is_at(name, "b"))
    assert short.loans()["a"][name] == "gone"
    assert short.line("a", name)["lending"] == "lent to b" and short.line("a", name)["state"] in (
        "dead",
        "gone",
    )
    assert short.line("b", name)["lending"] == "borrowed from a"
    assert not short.line("b", name)["draining"] and short.line("b", name)["capacity"]["cpu"] == 10
    with short.planes["b"].client("reader") as client:
        told = client.capacity()
        assert told["borrowed"] == [name] and told["containers"] == 2
    with short.planes["a"].client("reader") as client:
        assert client.capacity()["lent"] == [name]
    away = short.machines[name].body.settings
    assert away.folder != short.machines[name].host.home.folder, "one cluster's task list is not another's"
    assert short.told("a", name) == [
        "asked to go to b", "drained for b", "empty: ordered to go to b", "lent to b"
    ]  # fmt: skip
    assert short.told("b", name) == ["expected from a", "borrowed from a"]
    lender.round()
    assert short.is_at(name, "b"), "it does not go back at once"
    calm(short, "b")
    short.age("b", name, STAYS_S)
    lender.round()
    assert short.loans()["b"][name] == "asked"
    short.until("it is back", lambda: short.is_at(name, "a"))
    assert short.loans() == {"a": {"a1": "here", "a2": "here"}, "b": {"b1": "here"}}
    line = short.line("a", name)
    assert (line["state"], line["lending"], line["cordoned"]) == ("live", "", False)
    assert short.told("a", name)[-2:] == ["expected from b", "back from b"]
    assert short.told("b", name)[-1] == "returned to a"
    issued = [
        row
        for cluster in "ab"
        for row in short.planes[cluster].plane.tokens.rows()
        if row.name == f"lent {name}"
    ]
    assert issued and all(row.revoked_ms for row in issued), "what was issued for it opens nothing any more"


@on_both_stores
def test_an_owner_in_need_gets_its_own_back(short: Clusters):
    short.lender().round()
    name = lent(short)
    short.until("it works for b", lambda: short.is_at(name, "b"))
    calm(short, "b")
    need(short, "b", 6.0, "demo.some")  # 70 % free with it, 40 % without: it does well enough
    need(short, "a", 9.9)
    short.age("b", name, STAYS_S)
    short.lender().round()
    short.until("it is back", lambda: short.is_at(name, "a"))


# --- the loop may die


class Died(Exception):
    """The loop was killed."""


@on_both_stores
@pytest.mark.parametrize("after", ["expect", "lend"])
def test_a_loop_that_dies_between_its_steps_is_followed_by_one_that_goes_on(
    short: Clusters, monkeypatch: pytest.MonkeyPatch, after: str
):
    """Plan: it dies before or after the source is told. The next one reads the facts; a container works for b."""
    with monkeypatch.context() as patch:

        def die(*args: Any, **kwargs: Any) -> None:
            if after == "lend":
                lend(*args, **kwargs)
            raise Died

        lend = Client.lend
        patch.setattr(Client, "lend", die)
        with pytest.raises(Died):
            short.lender().round()
    assert all(machine.body.is_up for machine in short.machines.values()), "nobody lost a container"
    if after == "expect":
        short.lender().round()
        assert set(short.loans()["a"].values()) == {"here"}, "whoever said so may still be at it"
        (name,) = short.loans()["b"].keys() - {"b1"}
        short.age("b", name, EXPECT_REPEAT_MS / 1000)
    short.lender().round()
    name = lent(short)
    short.until("it works for b", lambda: short.is_at(name, "b"))
    assert sum(state == "gone" for state in short.loans()["a"].values()) == 1


def test_a_loop_that_never_comes_back_leaves_a_finished_transfer(short: Clusters):
    """Once both clusters were told, hosts and control planes do the rest."""
    short.lender().round()
    name = lent(short)
    short.until("it works for b", lambda: short.is_at(name, "b"))


@on_both_stores
def test_an_expected_container_that_nobody_sent_is_forgotten(short: Clusters):
    short.planes["b"].plane.lending.expect("a1", lender="a", owner="a", version=0, reason="x", actor="lender")
    calm(short, "b")
    short.age("b", "a1", ARRIVE_S)
    short.lender().round()
    assert short.loans()["b"] == {"b1": "here"}
    assert short.told("b", "a1")[-1].startswith("left: ")


@on_both_stores
@pytest.mark.parametrize("state", ["asked", "draining", "ordered"])
def test_a_way_that_takes_too_long_ends_where_it_began(short: Clusters, state: str):
    """Plan: its host falls silent in this state; the loop lets it stay, and it takes shards."""
    short.lender().round()
    name, service = lent(short), short.planes["a"].plane.lending
    number = service.loans()[int(name == "a2")].version
    if state != "asked":
        service.answer(name, number=number, accepted=True, why="")
    if state == "ordered":
        others = {other: machine for other, machine in short.machines.items() if other != name}
        silent, short.machines = short.machines[name], others

        def step() -> None:
            silent.body.beat()
            short.step()

        until(lambda: service.ask(name)[1] is not None, "it is told to go", step=step)
        short.machines = {**others, name: silent}
    assert short.loans()["a"][name] == state
    calm(short, "b")
    short.age("a", name, STEP_S[state])
    short.lender().round()
    assert short.loans()["a"][name] == "here" and not short.line("a", name)["cordoned"]
    assert short.told("a", name)[-1] == "stays"
    with pytest.raises(NotFound):
        service.answer(name, number=number + 2, accepted=True, why="")
    short.step()
    assert short.is_at(name, "a")


@on_both_stores
def test_two_loops_at_once_do_no_harm(short: Clusters):
    """Plan: both look, then both act. Of two that lend one container, one is told that it lost."""
    lenders = [short.lender(), short.lender()]
    plans = []
    for lender in lenders:
        seen = [lender._read(cluster) for cluster in lender._clusters]
        lender._seen = {cluster.name: cluster for cluster in seen}
        plans.append(plan_lending(seen))
    assert plans[0] == plans[1] and len(plans[0].transfers) == 1
    for lender, plan in zip(lenders, plans, strict=True):
        lender._execute(plan)
    assert [text.startswith("failed") for text in short.said] == [False, True], short.said
    name = lent(short)
    short.until("it works for b", lambda: short.is_at(name, "b"))
    for lender in lenders:
        lender.round()
    assert sum(state == "gone" for state in short.loans()["a"].values()) == 1


def test_advice_does_nothing(short: Clusters):
    short.lender(advice=True).round()
    assert [text for text in short.said if text.startswith("advice: ")]
    assert short.loans() == {"a": {"a1": "here", "a2": "here"}, "b": {"b1": "here"}}


# --- clusters and hosts that do not play along


def test_a_cluster_that_does_not_answer_is_left_out(short: Clusters):
    lender = short.lender()
    lender._clients["b"] = Client("http://127.0.0.1:9", "pk_x", retries=0)
    assert lender.round() == ("b",)
    assert lender.round() == ("b",)
    assert len([text for text in short.said if text.startswith("b is left out")]) == 1, "told once"
    assert set(short.loans()["a"].values()) == {"here"}


@pytest.mark.parametrize("role", ["reader", "container", "oncall"])
def test_a_token_of_another_role_may_not_lend(short: Clusters, role: str):
    with short.planes["a"].client(role) as client, pytest.raises(Refused, match=r"container\.(lend|read)"):
        client.containers()
        client.lend("a1", home="a", to="b", url="http://b:1", token="pk_x", why="x")


def test_a_container_that_cannot_reach_its_target_stays(short: Clusters):
    """Plan: the address that containers would use leads nowhere. It is asked, says why, and is never drained."""
    lender = short.lender()
    lender._urls["b"] = "http://127.0.0.1:9"
    lender.round()
    name = lent(short)
    short.until("it said no", lambda: short.loans()["a"][name] == "here")
    assert short.told("a", name) == ["asked to go to b", "cannot go to b"]
    (loan,) = [loan for loan in short.planes["a"].plane.lending.loans() if loan.container == name]
    assert loan.refused_by == "b" and loan.reason and not loan.token
    assert short.is_at(name, "a") and not short.line("a", name)["cordoned"]
    lender.round()
    assert short.loans()["a"][name] == "here", "it is not asked again for a while"


def test_spark_tasks_whose_state_is_elsewhere_refuse_beforehand(
    short: Clusters, monkeypatch: pytest.MonkeyPatch
):
    """Plan: a container on Spark; b keeps its streams in a folder that this machine does not have."""
    monkeypatch.setattr("penstock.container.container.require_spark", lambda master: None)
    for name in ("a1", "a2"):
        host = short.machines[name].host
        host.home = replace(host.home, engine="spark")
    plane = short.planes["b"].plane
    told = {**plane.installation(), "bus": "embedded:/no/such/folder/bus"}
    monkeypatch.setattr(plane, "installation", lambda: told)
    short.lender().round()
    name = lent(short)
    short.until("it said no", lambda: short.loans()["a"][name] == "here")
    (loan,) = [loan for loan in short.planes["a"].plane.lending.loans() if loan.container == name]
    assert "Spark tasks cannot run here" in loan.reason and "/no/such/folder/bus" in loan.reason
    assert "drained for b" not in short.told("a", name)


def test_a_borrowed_container_goes_home_when_its_cluster_falls_silent(
    short: Clusters, monkeypatch: pytest.MonkeyPatch
):
    short.lender().round()
    name = lent(short)
    short.until("it works for b", lambda: short.is_at(name, "b"))
    machine = short.machines[name]

    def silent(*args: Any, **kwargs: Any) -> None:
        raise PenstockError("nobody answers")

    away = machine.host._place
    assert away is not None
    monkeypatch.setattr(away.client, "ask_order", silent)
    machine.host.poll_order()
    assert machine.url == short.planes["b"].server.url, "a moment is no reason"
    short.clock.more_ms += HOME_AFTER_MS
    machine.host.poll_order()
    assert machine.url == short.planes["a"].server.url
    short.until("a knows", lambda: short.is_at(name, "a"))
    assert short.told("a", name)[-1] == "back" and not short.line("a", name)["cordoned"]
    calm(short, "b")
    short.until("its lease at b is over", lambda: short.line("b", name)["state"] in ("dead", "gone"))
    short.lender().round()
    assert name not in short.loans()["b"]


def test_containers_of_one_name_stay_where_they_are(clusters: Clusters):
    clusters.join("same", "a")
    clusters.join("other", "a")
    machines = clusters.machines
    clusters.machines = {}
    clusters.folder = clusters.folder / "elsewhere"
    clusters.join("same", "b")
    clusters.machines = {**machines, "same2": clusters.machines["same"]}
    need(clusters, "b", 9.9)
    clusters.step()
    clusters.lender().round()
    assert clusters.loans()["a"] == {"same": "here", "other": "asked"}
    with pytest.raises(Refused, match="container same already exists"):
        service = clusters.planes["b"].plane.lending
        version = next(loan.version for loan in service.loans() if loan.container == "same")
        service.expect("same", lender="a", owner="a", version=version, reason="x", actor="me")


def test_a_cluster_without_limits_neither_lends_nor_borrows(clusters: Clusters):
    for name, cluster, size in (("a1", "a", ""), ("a2", "a", "4,8192,0,0"), ("b1", "b", "10,8192,0,0")):
        clusters.join(name, cluster, size=size)
    need(clusters, "b", 9.9)
    clusters.step()
    clusters.lender().round()
    assert set(clusters.loans()["a"].values()) == {"here"}
    assert any("a is left out: the cluster is not limited" in text for text in clusters.said)


def test_a_person_who_takes_it_back_is_obeyed(short: Clusters):
    short.lender().round()
    name = lent(short)
    service = short.planes["a"].plane.lending
    number = next(loan.version for loan in service.loans() if loan.container == name)
    service.answer(name, number=number, accepted=True, why="")
    with short.planes["a"].client("oncall") as client:
        client.uncordon(name, why="needed here")
    loan, order = service.ask(name)
    assert loan is not None and loan.state == "here" and order is None


def test_what_is_borrowed_is_not_lent_on_and_secrets_are_not_told(short: Clusters):
    short.lender().round()
    name = lent(short)
    with short.planes["a"].client("admin") as client:
        assert not any("pk_" in str(line) for line in client.loans())
    short.until("it works for b", lambda: short.is_at(name, "b"))
    with pytest.raises(Refused, match="cannot go to c"):
        short.planes["b"].plane.lending.lend(
            name, home="b", to="c", url="http://c:1", token="pk_x", reason="x", actor="me"
        )
