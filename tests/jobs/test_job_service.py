from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import (
    ConfigError,
    KeyReused,
    NeedsConsent,
    NotFound,
    PenstockError,
    Refused,
    VersionConflict,
)
from penstock.db.database import Database
from penstock.db.journal_store import JournalStore
from penstock.jobs.job_service import Actor, JobService, Submitted
from penstock.jobs.job_store import JobStore, store_response
from penstock.jobs.layer_store import put_layer
from penstock.jobs.layers import LayerRow
from tests.builders import ADMIN, DEVELOPER, ONCALL, SCALER, a_body, a_job, a_pipeline
from tests.jobs.world import World


@pytest.fixture
def service() -> JobService:
    return JobService(JobStore(Database(None)))


def call(actor: Actor, key: str | None = None, now_ms: int = 1) -> dict[str, Any]:
    return {"actor": actor, "reason": "because", "idempotency_key": key, "now_ms": now_ms}


def submit(service: JobService, *bodies: dict[str, Any], key: str | None = None, **parts: Any) -> Submitted:
    births = (f"birth{number}" for number in itertools.count())
    compiled = {**a_pipeline(*bodies), **parts}
    return service.submit_pipeline(compiled, **call(DEVELOPER, key), new_birth=lambda: next(births))


def everything(service: JobService, job: str = "demo.count") -> tuple[object, ...]:
    store = service._store
    return service.view(job), service.history(job), store.audit(), JournalStore(store.database).entries()


def test_the_papers_example_scaler_and_two_oncalls(service: JobService) -> None:
    """10 tasks; the scaler wants 15, one oncall 20, another 30, all having seen the same version."""
    job = a_job(service, task_count=10, partitions=32)
    seen = service.view(job).expected_version
    after_scaler = service.patch_layer(job, "scaler", {"task_count": 15}, **call(SCALER))
    with pytest.raises(VersionConflict) as caught:
        service.write_layer(job, "oncall", {"task_count": 20}, expected_version=seen, **call(ONCALL))
    assert caught.value.actual == after_scaler
    service.write_layer(job, "oncall", {"task_count": 20}, expected_version=after_scaler, **call(ONCALL))
    with pytest.raises(VersionConflict):
        service.write_layer(job, "oncall", {"task_count": 30}, expected_version=after_scaler, **call(ONCALL))
    view = service.view(job)
    assert view.config.task_count == 20 and view.provenance["task_count"].layer == "oncall"
    # A broken scaler cannot undo what the oncall said, and its own wish is not lost.
    service.patch_layer(job, "scaler", {"task_count": 1}, **call(SCALER))
    assert service.view(job).config.task_count == 20
    service.clear(job, "oncall", **call(ONCALL))
    assert service.view(job).config.task_count == 1


def test_a_compare_and_set_loser_changes_nothing(service: JobService) -> None:
    job = a_job(service)
    before = everything(service)
    with pytest.raises(VersionConflict):
        service.write_layer(job, "oncall", {"threads": 2}, expected_version=99, **call(ONCALL, "k"))
    assert everything(service) == before


@pytest.mark.parametrize(
    "body",
    [
        {"task_cout": 3},
        {"partitions": 0},
        {"slo": 3},
        {"pipeline": "other"},
        {"x": float("nan")},
        {"x": {1, 2}},
    ],
)
def test_an_invalid_merge_is_refused_and_nothing_is_written(service: JobService, body: dict) -> None:
    job = a_job(service)
    before = everything(service)
    with pytest.raises(ConfigError):
        service.write_layer(
            job, "oncall", body, expected_version=before[0].expected_version, **call(ONCALL, "k")
        )
    assert everything(service) == before


def test_a_misspelt_field_gets_a_suggestion(service: JobService) -> None:
    with pytest.raises(ConfigError) as caught:
        service.patch_layer(a_job(service), "oncall", {"task_cout": 3}, **call(ONCALL))
    assert "task_cout" in caught.value.why and "task_count" in caught.value.fix


def test_two_valid_writes_that_merge_to_an_invalid_config_are_not_both_taken(service: JobService) -> None:
    """An admin pins the kind; the developer then makes the job stateless. Each is valid without the other."""
    stateful = {"kind": "stateful", "plan": {"computation": {"class": "Count"}}}
    job = a_job(service, **stateful)
    version = service.patch_layer(job, "oncall", {"kind": "stateful"}, **call(ADMIN))
    with pytest.raises(ConfigError, match="stateful job needs"):
        service.write_layer(job, "provisioner", a_body(job), expected_version=version, **call(DEVELOPER))
    assert service.view(job).expected_version == version
    service.clear(job, "oncall", **call(ONCALL))
    service.write_layer(job, "provisioner", a_body(job), expected_version=version + 1, **call(DEVELOPER))
    assert service.view(job).config.kind == "stateless"


def test_a_repeated_key_gets_the_first_answer_and_writes_once(service: JobService) -> None:
    job = a_job(service)
    change = {"task_count": 3}
    first = service.patch_layer(job, "oncall", change, **call(ONCALL, "k"))
    before = everything(service)
    assert service.patch_layer(job, "oncall", change, **call(ONCALL, "k", now_ms=9)) == first
    assert everything(service) == before
    with pytest.raises(KeyReused, match="another request"):
        service.patch_layer(job, "oncall", {"task_count": 4}, **call(ONCALL, "k"))
    assert service.patch_layer(job, "oncall", change, **call(ADMIN, "k")) == first + 1


def test_a_repeated_submit_makes_no_second_birth(service: JobService) -> None:
    first = submit(service, a_body("demo.a"), key="k")
    birth = service.view("demo.a").birth
    assert submit(service, a_body("demo.a"), key="k") == first
    assert service.view("demo.a").birth == birth


@pytest.mark.parametrize("role", ["reader", "developer", "oncall", "scaler", "container", "admin", "nobody"])
@pytest.mark.parametrize("layer", ["base", "provisioner", "scaler", "oncall"])
def test_only_the_roles_of_a_layer_may_write_it(service: JobService, layer: str, role: str) -> None:
    job = a_job(service)
    own = {"base": set(), "provisioner": {"developer"}, "scaler": {"scaler"}, "oncall": {"oncall"}}[layer]
    if role in own | {"admin"}:
        assert service.patch_layer(job, layer, {"threads": 2}, **call(Actor(name="x", role=role))) > 0
    else:
        with pytest.raises(Refused, match="may not write"):
            service.patch_layer(job, layer, {"threads": 2}, **call(Actor(name="x", role=role)))


def test_a_write_without_a_reason_or_to_nothing_is_refused(service: JobService) -> None:
    job = a_job(service)
    with pytest.raises(ConfigError, match="reason"):
        service.clear(job, "oncall", **(call(ONCALL) | {"reason": " "}))
    for target in (("nope", "oncall"), (job, "nope")):
        with pytest.raises(NotFound):
            service.clear(*target, **call(ADMIN))
    with pytest.raises(Refused, match="already"):
        a_job(service)


def test_every_write_has_its_audit_its_history_and_its_journal_entry(service: JobService) -> None:
    job = a_job(service)
    service.patch_layer(job, "oncall", {"threads": 2}, **call(ONCALL, now_ms=7))
    view = service.view(job)
    audit = service._store.audit(job)[-1]
    assert (audit.actor, audit.role, audit.action, audit.at_ms) == ("olga", "oncall", "layer.oncall", 7)
    assert audit.data == {"version": view.expected_version, "paths": ["threads"]}
    assert JournalStore(service._store.database).entries(job)[-1].decision == "layer.oncall"
    last = service.history(job)[0]
    assert (last.layer, last.body, last.actor, last.reason) == ("oncall", {"threads": 2}, "olga", "because")
    assert last == view.layers[-1]


def test_layers_survive_the_reopening_of_the_file(tmp_path: Path) -> None:
    database = Database(tmp_path / "store.db")
    service = JobService(JobStore(database))
    job = a_job(service)
    service.patch_layer(job, "oncall", {"threads": 2}, **call(ONCALL))
    before = everything(service)
    database.close()
    database = Database(tmp_path / "store.db")
    assert everything(JobService(JobStore(database))) == before
    database.close()


def test_a_submit_with_one_bad_job_writes_none(service: JobService) -> None:
    with pytest.raises(ConfigError, match="task_cout"):
        submit(service, a_body("demo.a"), a_body("demo.b", task_cout=1))
    assert service.views().items == () and service._store.audit() == () and service._store.pipelines() == ()


def test_a_submit_writes_all_jobs_and_stops_those_it_no_longer_has(service: JobService) -> None:
    done = submit(service, a_body("demo.a"), a_body("demo.b"))
    assert done == Submitted(jobs={"demo.a": 1, "demo.b": 1}, done={"demo.a": "created", "demo.b": "created"})
    done = submit(service, a_body("demo.b"), stops=["demo.a"])
    assert done == Submitted(
        jobs={"demo.b": 2, "demo.a": 2}, done={"demo.b": "unchanged", "demo.a": "stopped"}
    )
    states = {view.name: view.config.state for view in service.views()}
    assert states == {"demo.a": "stopped", "demo.b": "running"}
    # What is stopped already needs no consent.
    assert submit(service, a_body("demo.b", threads=2)).done == {"demo.b": "updated"}
    assert [(row.name, row.version) for row in service._store.pipelines()] == [("demo", 3)]
    done = submit(service, a_body("demo.a"), a_body("demo.b"), reset_state=["demo.b"])
    assert done.done == {"demo.a": "updated", "demo.b": "reset"}
    assert service.view("demo.a").config.state == "running"


@pytest.mark.parametrize("stops", [[], ["demo.b"], ["demo.x"]])
def test_a_submit_stops_no_job_that_it_does_not_name(service: JobService, stops: list[str]) -> None:
    """Plan: another file with the name of a running pipeline; it has none of its jobs, and names one at most."""
    submit(service, a_body("demo.a"), a_body("demo.b"))
    before = everything(service, "demo.a"), everything(service, "demo.b")
    with pytest.raises(NeedsConsent) as caught:
        submit(service, a_body("demo.other"), stops=stops)
    assert caught.value.stops == ["demo.a", "demo.b"] and caught.value.replaces == ""
    assert "demo.a, demo.b" in caught.value.what and "--yes" in caught.value.fix
    assert before == (everything(service, "demo.a"), everything(service, "demo.b"))
    assert [view.name for view in service.views()] == ["demo.a", "demo.b"]


def test_a_job_that_came_meanwhile_is_not_stopped_by_an_older_consent(service: JobService) -> None:
    """Plan: consent is asked for while the pipeline has a and b; before it is given, c is submitted too."""
    submit(service, a_body("demo.a"), a_body("demo.b"))
    with pytest.raises(NeedsConsent) as asked_for:
        submit(service, a_body("demo.b"))
    submit(service, a_body("demo.a"), a_body("demo.b"), a_body("demo.c"))
    with pytest.raises(NeedsConsent) as caught:
        submit(service, a_body("demo.b"), stops=asked_for.value.stops)
    assert (asked_for.value.stops, caught.value.stops) == (["demo.a"], ["demo.a", "demo.c"])
    assert {view.config.state for view in service.views()} == {"running"}


def test_a_file_of_another_origin_does_not_take_a_pipeline_over(service: JobService) -> None:
    """Plan: the same jobs from two files; also from a caller that does not say where they come from."""
    submit(service, a_body("demo.a"), origin="mine/pipeline.py")
    assert submit(service, a_body("demo.a"), origin="mine/pipeline.py").done == {"demo.a": "unchanged"}
    assert submit(service, a_body("demo.a")).done == {"demo.a": "unchanged"}
    before = everything(service, "demo.a")
    for agreed in ("", "other/pipeline.py"):
        with pytest.raises(NeedsConsent) as caught:
            submit(service, a_body("demo.a", threads=2), origin="yours/pipeline.py", replaces=agreed)
        assert caught.value.replaces == "mine/pipeline.py" and caught.value.stops == []
        assert "mine/pipeline.py" in caught.value.why and "yours/pipeline.py" in caught.value.why
    assert everything(service, "demo.a") == before
    compiled = {**a_pipeline(a_body("demo.a")), "origin": "yours/pipeline.py"}
    assert service.plan_submit(compiled)[1] == "mine/pipeline.py"
    done = submit(
        service, a_body("demo.a", threads=2), origin="yours/pipeline.py", replaces="mine/pipeline.py"
    )
    assert done.done == {"demo.a": "updated"}
    assert service.plan_submit(compiled)[1] == ""


def test_the_answer_to_a_submit_that_an_earlier_release_kept_is_read(service: JobService) -> None:
    compiled = a_pipeline(a_body("demo.a"))
    request = hashlib.sha256(json.dumps({"submit": compiled}, sort_keys=True).encode()).hexdigest()
    with service._store.database.transaction() as connection:
        store_response(
            connection, actor=DEVELOPER.name, key="k", request=request, response={"demo.a": 7}, now_ms=1
        )
    assert submit(service, a_body("demo.a"), key="k") == Submitted(jobs={"demo.a": 7}, done={})


@pytest.mark.parametrize(
    "compiled",
    [
        {},
        {**a_pipeline(a_body("demo.a")), "extra": 1},
        a_pipeline(),
        a_pipeline(a_body("other.a")),
        a_pipeline(a_body("demo.a"), a_body("demo.a")),
        a_pipeline(a_body("demo.a", pipeline="other")),
        {**a_pipeline(a_body("demo.a")), "package": None},
        {**a_pipeline(a_body("demo.a")), "pipeline": "../demo"},
    ],
)
def test_a_malformed_pipeline_is_refused(service: JobService, compiled: dict) -> None:
    with pytest.raises(ConfigError):
        service.plan_pipeline(compiled)


def test_a_job_of_another_pipeline_is_not_taken_over(service: JobService) -> None:
    submit(service, a_body("demo.x.a", pipeline="demo"))
    compiled = a_pipeline(a_body("demo.x.a", pipeline="demo.x"), name="demo.x")
    with pytest.raises(Refused, match="another pipeline"):
        service.submit_pipeline(compiled, **call(DEVELOPER), new_birth=lambda: "b")


def test_a_plan_says_what_a_submit_would_do_and_writes_nothing() -> None:
    world = World()
    names = ("same", "simple", "live", "complex", "reset", "gone")
    submit(world.service, *(a_body(f"demo.{name}") for name in names))
    world.settle()
    before = world.outcome()
    compiled = a_pipeline(
        a_body("demo.same"),
        a_body("demo.simple", arguments={"a": "1"}),
        a_body("demo.live", slo={"lag_s": 5}),
        a_body("demo.complex", task_count=3),
        a_body("demo.reset", lineage=1),
        a_body("demo.fresh"),
    )
    changes = {change.job.removeprefix("demo."): change for change in world.service.plan_pipeline(compiled)}
    kinds = {name: change.change for name, change in changes.items()}
    assert kinds == {
        "same": "unchanged",
        "simple": "simple",
        "live": "simple",
        "complex": "complex",
        "reset": "complex",
        "fresh": "new",
        "gone": "removed",
    }
    assert {name for name, change in changes.items() if change.restarts} == {
        "simple",
        "complex",
        "reset",
        "gone",
    }
    assert changes["simple"].restarts == ("demo.simple/0",)
    assert {name for name, change in changes.items() if not change.state_kept} == {"reset"}
    assert (changes["complex"].tasks_after, changes["gone"].tasks_after) == (3, 0)
    difference = changes["complex"].changed[0]
    assert (difference.path, difference.old, difference.new) == ("task_count", 1, 3)
    assert world.outcome() == before


def test_a_removed_name_is_born_anew_only_when_nothing_of_it_runs() -> None:
    world = World()
    job = a_job(world.service)
    world.settle()
    first = world.store.load([job])[job].job
    world.service.remove(job, **call(DEVELOPER))
    with pytest.raises(NotFound):
        world.service.view(job)
    with pytest.raises(Refused, match="still being removed"):
        a_job(world.service)
    world.settle()
    assert world.data.registered == set()
    version = world.service.create(job, a_body(job), birth="second", **call(DEVELOPER))
    world.settle()
    view = world.service.view(job)
    assert version > first.expected_version and view.birth == "second"
    # Generations go on, so nothing of the former life fits.
    assert view.running is not None and (view.running.birth, view.running.generation) == ("second", 3)


def test_a_view_of_an_invalid_merge_says_what_is_wrong(service: JobService) -> None:
    job = a_job(service)
    with service._store.transaction() as connection:
        row = LayerRow(layer="base", precedence=0, body={"nonsense": 1}, version=1)
        put_layer(connection, job, row, birth="b")
    view = service.view(job)
    assert "nonsense" in view.problem and not view.is_in_sync
    assert isinstance(view.to_json()["config"], dict)


def test_errors_say_what_why_and_what_to_do(service: JobService) -> None:
    job = a_job(service)
    attempts = [
        lambda: service.view("nope"),
        lambda: service.clear(job, "oncall", **call(DEVELOPER)),
        lambda: service.clear(job, "oncall", expected_version=7, **call(ONCALL)),
        lambda: service.patch_layer(job, "oncall", {"slo": 1}, **call(ONCALL)),
    ]
    for attempt in attempts:
        with pytest.raises(PenstockError) as caught:
            attempt()
        assert caught.value.what and caught.value.why and caught.value.fix
