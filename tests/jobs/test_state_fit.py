"""State outlives new code where the new code can read it, and is given up only when somebody says so."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import ConfigError, Refused
from penstock.jobs.state_fit import state_conflict
from tests.builders import a_body, a_pipeline
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
        (a_total(computation=a_computation(keys=["shop", "day"])), "kept by shop, not by shop, day"),
        (a_total(computation={"operator": "aggregate", "keys": ["shop"]}), "the operator 'aggregate'"),
        (a_total(partitions=16), "spread over 8 partitions, not 16"),
        (a_body(JOB), "does not"),
        (a_total(partitions=16, lineage=1), ""),
    ],
)
def test_a_conflict_is_found_and_named(new: dict[str, Any], why: str) -> None:
    found = state_conflict(a_total(), new)
    assert (why in found) if why else found == ""


def test_a_job_without_state_has_none_to_lose() -> None:
    assert (
        state_conflict(a_body(JOB), a_total()) == state_conflict(a_body(JOB, partitions=4), a_body(JOB)) == ""
    )


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
    assert running is not None and running.config["lineage"] == 1


def test_the_next_submit_goes_on_with_the_state_after_a_reset() -> None:
    world = World()
    submit(world.service, a_total())
    world.settle()
    resubmit(world, a_total(), JOB)
    world.settle()
    (change,) = world.service.plan_pipeline(a_pipeline(a_total(task_count=2)))
    assert change.state_kept and [item.path for item in change.changed] == ["task_count"]
    resubmit(world, a_total(task_count=2))
    world.settle()
    running = world.service.view(JOB).running
    assert running is not None and (running.config["lineage"], running.config["task_count"]) == (1, 2)


@pytest.mark.parametrize("reset", [["demo.other"], "demo.total", [1], {"a": 1}])
def test_what_cannot_be_reset_is_refused(reset: Any) -> None:
    world = World()
    with pytest.raises(ConfigError):
        world.service.submit_pipeline(
            {**a_pipeline(a_total()), "reset_state": reset}, **call(DEVELOPER), new_birth=lambda: "b"
        )
