"""State outlives new code where the new code can read it, and is given up only when somebody says so."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import ConfigError, Refused
from penstock.jobs.provision import state_conflict
from tests.builders import a_body, a_pipeline, config_of
from tests.jobs.test_job_service import call, submit
from tests.jobs.world import DEVELOPER, World

JOB = "demo.total"


def a_computation(**changes: Any) -> dict[str, Any]:
    return {"class": "Total", "keys": ["shop"], "state": {"total": "float", "seen": "int"}, **changes}


def a_total(*, computation: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    plan = {"stages": [], "key": None, "computation": computation or a_computation(), "late": "drop"}
    return a_body(JOB, **{"kind": "stateful", "plan": plan, **changes})


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (a_total(), ""),
        (a_total(computation=a_computation(**{"class": "Other"})), ""),
        (a_total(computation=a_computation(state={"total": "float", "seen": "int", "more": "str"})), ""),
        (a_total(computation={"class": "Total"}), ""),
        (
            a_total(task_count=4, package={"name": "demo", "version": "2", "hash": "cd" * 32, "entry": "x"}),
            "",
        ),
        (a_total(computation=a_computation(state={"total": "float"})), "does not declare"),
        (a_total(computation=a_computation(state={"total": "int", "seen": "int"})), "is float, not int"),
        (a_total(computation=a_computation(keys=["shop", "day"])), "stored by shop, not by shop, day"),
        (a_total(computation={"operator": "aggregate", "keys": ["shop"]}), "the operator 'aggregate'"),
        (a_total(computation=a_computation(vectorised=True)), "a computation, not of a computation over"),
        (a_total(partitions=16), "distributed over 8 partitions, not 16"),
        (a_body(JOB), "has none"),
        (a_total(partitions=16, lineage=1), ""),
    ],
)
def test_a_conflict_is_found_and_named(new: dict[str, Any], why: str) -> None:
    found = state_conflict(config_of(a_total()), config_of(new))
    assert (why in found) if why else found == ""


SHAPE = {"windows": "tumbling of 10 s", "values": "n (sum of whole numbers)"}
COUNTED = {"name": "n", "function": "avg", "argument": "amount", "column": "amount", "type": "double"}


def an_aggregate(*, stages: list[Any] | None = None, **changes: Any) -> dict[str, Any]:
    computation = {
        "operator": "aggregate",
        "keys": ["shop"],
        "window": {"kind": "tumbling", "size_ms": 10_000},
        "columns": [{**COUNTED, "function": "sum", "type": "bigint"}],
        "state": SHAPE,
        **changes,
    }
    computation = {name: value for name, value in computation.items() if value is not None}
    plan = {"stages": stages or [], "key": None, "computation": computation, "late": "drop"}
    return a_body(JOB, kind="stateful", plan=plan)


OTHER_WINDOW = {"kind": "tumbling", "size_ms": 20_000}
FILTER = [{"op": "filter", "expr": "amount > 0"}]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (an_aggregate(), an_aggregate(), ""),
        (an_aggregate(), an_aggregate(stages=FILTER, columns=[COUNTED]), ""),
        (an_aggregate(), an_aggregate(state={**SHAPE, "windows": "sessions of 5 s"}), "not sessions of 5 s"),
        # Plans of versions that do not say it, or not all of it.
        (an_aggregate(state=None), an_aggregate(), ""),
        (an_aggregate(), an_aggregate(state=None), ""),
        (an_aggregate(state=None), an_aggregate(state=None, stages=FILTER), ""),
        (an_aggregate(state=None), an_aggregate(window=OTHER_WINDOW), "differs in window; submit it first"),
        (an_aggregate(state=None), an_aggregate(state=None, window=OTHER_WINDOW), "differs in window"),
        (an_aggregate(state=None), an_aggregate(columns=[COUNTED]), "differs in columns"),
        (an_aggregate(state={"values": SHAPE["values"]}), an_aggregate(), ""),
        (an_aggregate(state={"values": "n (count)"}), an_aggregate(), "n (count), not n (sum"),
        (
            an_aggregate(state={"values": SHAPE["values"]}),
            an_aggregate(window=OTHER_WINDOW),
            "differs in window",
        ),
        # An average is a double, whatever it is of.
        (an_aggregate(state=None, columns=[COUNTED]), an_aggregate(columns=[COUNTED]), ""),
        (
            an_aggregate(state=None, columns=[COUNTED]),
            an_aggregate(columns=[COUNTED], stages=FILTER),
            "differs in inputs or stages",
        ),
        (
            an_aggregate(state=None, operator="combine"),
            an_aggregate(operator="combine", stages=FILTER),
            "differs in inputs or stages",
        ),
    ],
)
def test_rows_of_an_operator_are_kept_if_all_that_they_depend_on_stays(
    old: dict[str, Any], new: dict[str, Any], why: str
) -> None:
    found = state_conflict(config_of(old), config_of(new))
    assert (why in found) if why else found == ""


def test_ids_of_records_are_of_one_column() -> None:
    plain = config_of(a_total())
    sale = config_of(a_total(computation=a_computation(ids={"column": "sale", "slack_ms": 1})))
    slower = config_of(a_total(computation=a_computation(ids={"column": "sale", "slack_ms": 2})))
    other = config_of(a_total(computation=a_computation(ids={"column": "order", "slack_ms": 1})))
    assert state_conflict(sale, slower) == state_conflict(sale, plain) == ""
    assert state_conflict(plain, sale) == ""
    assert "of column 'sale', not of 'order'" in state_conflict(sale, other)


def test_a_submit_that_gives_stored_windows_another_meaning_is_refused() -> None:
    world = World()
    submit(world.service, an_aggregate())
    world.settle()
    with pytest.raises(Refused) as refused:
        resubmit(world, an_aggregate(state={**SHAPE, "windows": "sessions of 5 s"}))
    assert "its windows are tumbling of 10 s, not sessions of 5 s" in str(refused.value.why)
    assert f"--reset-state {JOB}" in str(refused.value.fix)


def test_a_job_without_state_has_none_to_lose() -> None:
    before = config_of(a_body(JOB))
    assert state_conflict(before, config_of(a_total())) == ""
    assert state_conflict(config_of(a_body(JOB, partitions=4)), before) == ""


def resubmit(world: World, body: dict[str, Any], *reset: str) -> dict[str, int]:
    compiled = {**a_pipeline(body), "reset_state": list(reset)}
    return world.service.submit_pipeline(compiled, **call(DEVELOPER), new_birth=lambda: "b")


def test_a_submit_that_would_lose_state_changes_nothing_until_somebody_insists() -> None:
    world = World()
    submit(world.service, a_total())
    world.settle()
    before = world.outcome()
    other = a_total(computation=a_computation(state={"total": "str"}))
    with pytest.raises(Refused, match="cannot be kept") as refused:
        resubmit(world, other)
    assert f"--reset-state {JOB}" in str(refused.value.fix)
    assert world.outcome() == before
    (change,) = world.service.plan_pipeline(a_pipeline(other))
    assert "is float, not str" in change.conflict and not change.state_kept
    (change,) = world.service.plan_pipeline({**a_pipeline(other), "reset_state": [JOB]})
    assert change.conflict == "" and not change.state_kept
    resubmit(world, other, JOB)
    world.settle()
    running = world.service.view(JOB).running
    assert running is not None and running.config.lineage > 0


def test_the_next_submit_goes_on_with_the_state_after_a_reset() -> None:
    world = World()
    submit(world.service, a_total())
    world.settle()
    resubmit(world, a_total(), JOB)
    world.settle()
    lineage = world.service.view(JOB).running.config.lineage
    (change,) = world.service.plan_pipeline(a_pipeline(a_total(task_count=2)))
    assert change.state_kept and [item.path for item in change.changed] == ["task_count"]
    resubmit(world, a_total(task_count=2))
    world.settle()
    running = world.service.view(JOB).running
    assert running is not None and (running.config.lineage, running.config.task_count) == (
        lineage,
        2,
    )


def test_a_state_that_was_given_up_never_comes_back() -> None:
    world = World()
    submit(world.service, a_total())
    world.settle()
    first = world.service.view(JOB).expected_version
    seen = [0]
    for _ in range(3):
        resubmit(world, a_total(), JOB)
        world.settle()
        seen.append(world.service.view(JOB).running.config.lineage)
        world.service.rollback(JOB, "provisioner", to_version=first, expected_version=None, **call(DEVELOPER))
        world.settle()
        assert world.service.view(JOB).running.config.lineage == 0
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("reset", [["demo.other"], "demo.total", [1], {"a": 1}])
def test_what_cannot_be_reset_is_refused(reset: Any) -> None:
    world = World()
    with pytest.raises(ConfigError):
        world.service.submit_pipeline(
            {**a_pipeline(a_total()), "reset_state": reset}, **call(DEVELOPER), new_birth=lambda: "b"
        )


def test_no_way_to_write_a_layer_changes_the_meaning_of_what_is_kept() -> None:
    """Plan: state of another type comes by apply, by a whole layer, by a patch, and by a rollback."""
    world = World()
    submit(world.service, a_total())
    world.settle()
    first = world.service.view(JOB).expected_version
    other = a_total(computation=a_computation(state={"total": "str"}))
    change = {"expected_version": None, **call(DEVELOPER)}
    writes = {
        "apply": lambda: world.service.apply(JOB, other, birth="b", **change),
        "layer": lambda: world.service.write_layer(JOB, "provisioner", other, **change),
        "patch": lambda: world.service.patch_layer(
            JOB, "provisioner", {"plan.computation.keys": ["day"]}, **change
        ),
        "kind": lambda: world.service.patch_layer(JOB, "provisioner", {"partitions": 4}, **change),
    }
    before = world.outcome()
    for name, write in writes.items():
        with pytest.raises(Refused, match="cannot be kept"):
            write()
        assert world.outcome() == before, name
    more = a_total(computation=a_computation(state={"total": "float", "seen": "int", "more": "str"}))
    resubmit(world, more)
    world.settle()
    before = world.outcome()
    with pytest.raises(Refused, match="'more', which the new code does not declare"):
        world.service.rollback(JOB, "provisioner", to_version=first, **change)
    assert world.outcome() == before
    world.service.patch_layer(JOB, "provisioner", {"task_count": 2}, **change)
