"""I7, I9, I22: the Job Service does what a model in plain Python does, whatever comes, on every store.

Random calls with right and stale versions, repeated and reused keys, and faults before and after the commit.
After each the whole of every job, its history and the audit are compared: one row for each change, no other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from penstock.core.errors import OutcomeUnknown, UserError
from penstock.db.database import Database
from penstock.jobs.job_service import Actor, JobService
from penstock.jobs.job_store import KEYS, JobStore
from penstock.jobs.layer_writer import CallOptions
from penstock.jobs.layers import merge_layers
from tests.jobs.asking import asked, everything
from tests.jobs.mutants import ForgetsKeys, IgnoresVersions, RemovesInSilence, RestoresAnew
from tests.jobs.service_model import FULL, ORDER, ServiceModel, merged, real_body
from tests.ready import ready_file

JOBS = ("demo.a", "demo.b")
ROOT = Actor(name="root", role="admin")

values = {
    "threads": st.integers(0, 3),  # 0 is valid only where something above says otherwise
    "task_count": st.integers(1, 4),
    "labels.team": st.sampled_from(["search", "ads"]),
    "state": st.sampled_from(["running", "paused", "stopped"]),
}
some = st.fixed_dictionaries({}, optional=values)
whole = some.map(lambda body: {FULL: True, **body})
bodies = st.one_of(whole, whole, whole, some)
patches = st.fixed_dictionaries({}, optional={path: kind | st.none() for path, kind in values.items()})
jobs = st.sampled_from(JOBS)
layers = st.sampled_from(ORDER)
versions = st.sampled_from(["none", "none", "current", "current", "stale", "zero"])
faults = st.sampled_from(["", "", "", "", "begin", "commit", "committed", "committed"])
keys = st.sampled_from(["", "", "", "", "k1", "k2"])  # "": a key of its own


@dataclass(frozen=True)
class Call:
    """One call, as the service and as the model take it."""

    name: str
    job: str
    data: Any
    version: str
    real: Callable[[JobService, int | None, str, CallOptions], Any]
    ideal: Callable[[ServiceModel, int | None, str], Any]


def _create(job: str, body: dict) -> Call:
    return Call(
        "create",
        job,
        body,
        "none",
        lambda s, _v, birth, ask: s.create(job, real_body(job, body), birth=birth, **ask),
        lambda m, _v, birth: m.create(job, body, birth),
    )


def _apply(job: str, body: dict, version: str) -> Call:
    return Call(
        "apply",
        job,
        body,
        version,
        lambda s, v, birth, ask: astuple(
            s.apply(job, real_body(job, body), expected_version=v, birth=birth, **ask)
        ),
        lambda m, v, birth: m.apply(job, body, v, birth),
    )


def _write(job: str, layer: str, body: dict, version: str) -> Call:
    return Call(
        "write",
        job,
        (layer, body),
        version,
        lambda s, v, _b, ask: s.write_layer(job, layer, real_body(job, body), expected_version=v, **ask),
        lambda m, v, _b: m.write(job, layer, body, v),
    )


def _patch(job: str, layer: str, changes: dict, version: str) -> Call:
    return Call(
        "patch",
        job,
        (layer, changes),
        version,
        lambda s, v, _b, ask: s.patch_layer(job, layer, changes, expected_version=v, **ask),
        lambda m, v, _b: m.patch(job, layer, changes, v),
    )


def _clear(job: str, layer: str, version: str) -> Call:
    return Call(
        "clear",
        job,
        layer,
        version,
        lambda s, v, _b, ask: s.clear(job, layer, expected_version=v, **ask),
        lambda m, v, _b: m.write(job, layer, {}, v),
    )


def _rollback(job: str, layer: str, to_version: int, version: str) -> Call:
    return Call(
        "rollback",
        job,
        (layer, to_version),
        version,
        lambda s, v, _b, ask: s.rollback(job, layer, to_version=to_version, expected_version=v, **ask),
        lambda m, v, _b: m.rollback(job, layer, to_version, v),
    )


def _set_state(job: str, state: str, layer: str, version: str) -> Call:
    return Call(
        "set_state",
        job,
        (state, layer),
        version,
        lambda s, v, _b, ask: astuple(s.set_state(job, state, layer=layer, expected_version=v, **ask)),
        lambda m, v, _b: m.set_state(job, state, layer, v),
    )


def _remove(job: str, version: str) -> Call:
    return Call(
        "remove",
        job,
        None,
        version,
        lambda s, v, _b, ask: s.remove(job, expected_version=v, **ask),
        lambda m, v, _b: m.remove(job, v),
    )


def _restore(job: str, version: str) -> Call:
    return Call(
        "restore",
        job,
        None,
        version,
        lambda s, v, _b, ask: s.restore(job, expected_version=v, **ask),
        lambda m, v, _b: m.restore(job, v),
    )


removals = st.builds(_remove, jobs, versions)
calls = st.one_of(
    st.builds(_create, jobs, bodies),
    st.builds(_apply, jobs, bodies, versions),
    st.builds(_write, jobs, layers, bodies, versions),
    st.builds(_patch, jobs, layers, patches, versions),
    st.builds(_clear, jobs, layers, versions),
    st.builds(_rollback, jobs, layers, st.integers(-1, 12), versions),
    st.builds(_set_state, jobs, values["state"], st.sampled_from(["provisioner", "oncall"]), versions),
    removals,
    removals,
    st.builds(_restore, jobs, versions),
    st.builds(_restore, jobs, versions),
)


class ServiceMachine(RuleBasedStateMachine):
    """One service and its model."""

    def __init__(self, place: Path | str | None, kind: type[JobService] = JobService) -> None:
        super().__init__()
        self.database = Database(place, fault=self._fault)
        self.service, self.model = kind(JobStore(self.database)), ServiceModel()
        self.armed, self.calls = "", 0

    def teardown(self) -> None:
        self.database.close()

    def _fault(self, point: str) -> None:
        if point == self.armed:
            self.armed = ""
            raise OutcomeUnknown(f"fault at {point}", why="a test", fix="repeat")

    @initialize(body=whole)
    def begin(self, body: dict) -> None:
        """Most calls are about jobs that are there."""
        for job in JOBS:
            self.step(_create(job, body), "", "")

    # One rule, not one per call: then every call comes about as often as it is named.
    @rule(call=calls, key=keys, fault=faults)
    def call(self, call: Call, key: str, fault: str) -> None:
        self.step(call, key, fault)

    def step(self, call: Call, key: str, fault: str) -> None:
        """Do the same on both sides; a call with an open outcome is repeated under its key."""
        self.calls += 1
        key, birth = key or f"own{self.calls}", f"birth{self.calls}"
        version = self._version(call)
        before = everything(self.database)
        self.armed = fault
        real = partial(call.real, self.service, version, birth, asked(ROOT, key))
        outcome = _outcome(real)
        faulted, self.armed = outcome == ("fault",), ""
        if faulted and fault != "committed":
            assert everything(self.database) == before
        if faulted:
            outcome = _outcome(real)
        model = copy.deepcopy(self.model)
        request = (call.name, call.job, call.data, version)
        ideal = partial(call.ideal, model, version, birth)
        expected = _outcome(lambda: model.once(("root", key), request, ideal))
        if expected[0] == "ok":
            self.model = model
        else:
            assert everything(self.database) == before
        assert outcome == expected, request

    def _version(self, call: Call) -> int | None:
        life = self.model.jobs.get(call.job)
        current = 0 if life is None else life.version
        return {"none": None, "current": current, "stale": max(0, current - 1), "zero": 0}[call.version]

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        for job, life in self.model.jobs.items():
            view = self.service.view(job, removed=True)
            assert (view.birth, view.removed, view.expected_version) == (
                life.birth,
                not life.alive,
                life.version,
            )
            ideal = {name: real_body(job, body) for name, body in life.layers.items()}
            assert {row.layer: row.body for row in view.layers} == ideal
            config = merged(life.layers)
            assert view.config.threads == config.get("threads", 1)
            assert view.config.state == config.get("state", "running")
            assert view.config.labels.get("team") == config.get("labels.team")
            # I9: the merge is the fold of the layers at this version, and of each version before.
            assert not view.problem and merge_layers(view.layers) == merge_layers(
                self.service.layers_at(job, life.version)
            )
            assert [row.version for row in self.service.history(job)] == [
                version for version, _, _ in reversed(life.past)
            ]
        listed = [view.name for view in self.service.every_view()]
        assert listed == sorted(name for name, life in self.model.jobs.items() if life.alive)
        team = ("search", "ads")[self.calls % 2]
        found = [view.name for view in self.service.views(labels={"team": team})]
        assert found == [
            job for job in listed if merged(self.model.jobs[job].layers).get("labels.team") == team
        ]

    @invariant()
    def every_change_has_exactly_one_row_in_the_audit(self) -> None:
        rows = self.service.audit(limit=1000)[::-1]
        assert [(row.action, row.subject, row.data["version"]) for row in rows] == self.model.audit
        assert {(row.actor, row.role) for row in rows} <= {("root", "admin")}

    @invariant()
    def only_answered_calls_are_kept(self) -> None:
        assert len(everything(self.database)[KEYS.name]) == len(self.model.keys)


def _outcome(call: Callable[[], Any]) -> tuple[Any, ...]:
    try:
        return "ok", call()
    except OutcomeUnknown:
        return ("fault",)
    except UserError as error:
        return "error", type(error)


EXAMPLES = {"memory": 25, "sqlite": 8, "postgres": 5}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("store", EXAMPLES)
def test_the_service_does_what_the_model_does(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    numbers = iter(range(10**6))

    def place() -> Path | str | None:
        if store == "memory":
            return None
        if store == "sqlite":
            return ready_file(tmp_path / f"{next(numbers)}.db")
        return str(request.getfixturevalue("postgres").new_database())

    run_state_machine_as_test(
        lambda: ServiceMachine(place()),
        settings=settings(
            max_examples=EXAMPLES[store], stateful_step_count=25, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("mutant", [ForgetsKeys, IgnoresVersions, RemovesInSilence, RestoresAnew])
def test_a_planted_bug_is_found(mutant: type[JobService]) -> None:
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(
            lambda: ServiceMachine(None, mutant),
            settings=settings(
                max_examples=60,
                stateful_step_count=25,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
