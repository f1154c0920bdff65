"""What was written when, by whom and why; how two versions differ; and the way back."""

from __future__ import annotations

import pytest

from penstock.core.errors import ConfigError, NotFound, Refused, VersionConflict
from penstock.db.database import Database
from penstock.jobs.job_service import Actor, JobService
from penstock.jobs.layers import Provenance
from tests.builders import ADMIN, DEVELOPER, ONCALL, SCALER, a_body, a_job
from tests.jobs.asking import asked, everything


def test_a_history_is_newest_first_and_can_be_paged_and_narrowed(any_service: JobService) -> None:
    service, job = any_service, a_job(any_service)
    for threads in (2, 3):
        service.patch_layer(job, "oncall", {"threads": threads}, **asked(ONCALL))
        service.patch_layer(job, "scaler", {"threads": threads}, **asked(SCALER))
    rows = service.history(job)
    assert [(row.version, row.layer) for row in rows] == [
        (5, "scaler"),
        (4, "oncall"),
        (3, "scaler"),
        (2, "oncall"),
        (1, "provisioner"),
        (0, "base"),
    ]
    pages = [service.history(job, limit=4)]
    pages.append(service.history(job, limit=4, before=pages[0][-1].version))
    assert pages[0] + pages[1] == rows
    assert [row.body["threads"] for row in service.history(job, layer="oncall")] == [3, 2]
    with pytest.raises(NotFound, match="no layer 'nope'"):
        service.history(job, layer="nope")
    with pytest.raises(NotFound, match="no job"):
        service.history("demo.never")


def test_the_layers_of_any_version_can_be_seen_again_also_of_a_former_life(any_service: JobService) -> None:
    service, job = any_service, a_job(any_service, threads=2)
    service.patch_layer(job, "oncall", {"threads": 3}, **asked(ONCALL))
    removed = service.remove(job, **asked(DEVELOPER))
    service.create(job, a_body(job, threads=7), birth="second", **asked(DEVELOPER))
    bodies = [
        {row.layer: row.body.get("threads") for row in service.layers_at(job, version)}
        for version in range(removed + 3)
    ]
    first = {"base": None, "provisioner": 2}
    assert bodies == [
        {"base": None},
        first,
        {**first, "oncall": 3},
        {**first, "oncall": 3},  # the removal
        {"base": None},
        {"base": None, "provisioner": 7},
    ]
    for version in (-1, 6, 10**30):
        with pytest.raises(NotFound, match="has no version"):
            service.layers_at(job, version)


def test_a_diff_names_each_path_with_both_values_and_what_the_change_costs(any_service: JobService) -> None:
    service, job = any_service, a_job(any_service)
    service.patch_layer(job, "oncall", {"threads": 3, "slo.lag_s": 5, "task_count": 4}, **asked(ONCALL))
    changes = service.diff(job, old=1, new=None)
    assert [(item.path, item.old, item.new, str(item.sync)) for item in changes] == [
        ("slo.lag_s", 90, 5, "live"),
        ("task_count", 1, 4, "complex"),
        ("threads", 1, 3, "restart"),
    ]
    assert service.diff(job, old=1, new=2) == changes
    assert service.diff(job, old=2, new=2) == ()
    assert [item.new for item in service.diff(job, old=2, new=1)] == [90, 1, 1]
    # Nothing runs yet, so everything is new.
    assert {item.path for item in service.diff(job, old=None, new=1)} >= {"name", "task_count", "plan"}
    with pytest.raises(NotFound, match="has no version 9"):
        service.diff(job, old=9, new=None)


def test_a_rollback_is_a_new_write_of_what_the_layer_was(any_service: JobService) -> None:
    service, job = any_service, a_job(any_service)
    service.patch_layer(job, "oncall", {"threads": 2}, **asked(ONCALL))
    service.patch_layer(job, "scaler", {"threads": 9}, **asked(SCALER))
    service.patch_layer(job, "oncall", {"threads": 5, "task_count": 3}, **asked(ONCALL))
    version = service.rollback(
        job, "oncall", to_version=3, expected_version=4, **asked(ONCALL, why="it was better")
    )
    assert version == 5
    view = service.view(job)
    # Only this layer went back: version 3 was a write of another one.
    assert {row.layer: dict(row.body) for row in view.layers if row.layer in ("oncall", "scaler")} == {
        "oncall": {"threads": 2},
        "scaler": {"threads": 9},
    }
    assert service.history(job)[0].reason == "it was better"
    assert service.audit(subject=job)[0].data == {
        "version": 5,
        "paths": ["task_count", "threads"],
        "back_to": 3,
    }
    # Before the layer said anything.
    service.rollback(job, "oncall", to_version=1, expected_version=None, **asked(ONCALL))
    assert service.view(job).config.threads == 9


@pytest.mark.parametrize("to_version", [-1, 99, 10**18])
def test_a_rollback_to_no_version_changes_nothing(
    any_service: JobService, database: Database, to_version: int
) -> None:
    job = a_job(any_service)
    before = everything(database)
    with pytest.raises(NotFound, match="has no version"):
        any_service.rollback(job, "oncall", to_version=to_version, expected_version=None, **asked(ONCALL))
    assert everything(database) == before


def test_a_rollback_keeps_to_versions_roles_lives_and_valid_merges(
    any_service: JobService, database: Database
) -> None:
    service = any_service
    stateful = {"kind": "stateful", "plan": {"computation": {"class": "Count"}}}
    job = a_job(service)
    service.remove(job, **asked(DEVELOPER))
    service.create(job, a_body(job, **stateful), birth="second", **asked(DEVELOPER))  # version 4
    service.write_layer(job, "provisioner", a_body(job), expected_version=4, **asked(DEVELOPER))
    service.patch_layer(job, "oncall", {"kind": "stateless"}, **asked(ADMIN))
    before = everything(database)
    with pytest.raises(VersionConflict):
        service.rollback(job, "provisioner", to_version=5, expected_version=4, **asked(DEVELOPER))
    with pytest.raises(Refused, match="may not write"):
        service.rollback(job, "provisioner", to_version=5, expected_version=6, **asked(ONCALL))
    with pytest.raises(Refused, match="former life"):
        service.rollback(job, "provisioner", to_version=1, expected_version=6, **asked(DEVELOPER))
    # The provisioner of version 4 was stateful, which no longer fits what the oncall says.
    with pytest.raises(ConfigError, match="computation"):
        service.rollback(job, "provisioner", to_version=4, expected_version=6, **asked(DEVELOPER))
    assert everything(database) == before


def test_provenance_names_the_write_that_last_changed_a_value_not_the_last_write(
    any_service: JobService,
) -> None:
    service = any_service
    job = a_job(service, now_ms=1)
    olga, otto = ONCALL, Actor(name="otto", role="oncall")
    service.patch_layer(
        job, "oncall", {"threads": 2, "slo.lag_s": 5}, **asked(olga, now_ms=10, why="slow input")
    )
    service.patch_layer(job, "oncall", {"threads": 2, "task_count": 4}, **asked(otto, now_ms=20, why="peak"))
    found = service.view(job).provenance
    slow = Provenance(layer="oncall", actor="olga", at_ms=10, reason="slow input", version=2)
    peak = Provenance(layer="oncall", actor="otto", at_ms=20, reason="peak", version=3)
    assert (found["threads"], found["slo.lag_s"], found["task_count"]) == (slow, slow, peak)
    assert found["partitions"].version == 1 and "priority" not in found
    # A value that changes and changes back was last changed then.
    service.patch_layer(job, "oncall", {"threads": 3}, **asked(otto, now_ms=30))
    service.patch_layer(job, "oncall", {"threads": 2}, **asked(otto, now_ms=40, why="back"))
    found = service.view(job).provenance
    assert (found["threads"].at_ms, found["threads"].reason) == (40, "back")
    assert found["slo.lag_s"] == slow
    # Taken back and said again, it is a new decision; the layer below answers in between.
    service.patch_layer(job, "oncall", {"slo.lag_s": None}, **asked(otto, now_ms=50))
    assert "slo.lag_s" not in service.view(job).provenance
    service.patch_layer(job, "oncall", {"slo.lag_s": 5}, **asked(olga, now_ms=60))
    assert service.view(job).provenance["slo.lag_s"].at_ms == 60


def test_provenance_goes_out_as_plain_json(any_service: JobService) -> None:
    service, job = any_service, a_job(any_service, now_ms=3)
    plain = service.view(job).to_json()
    assert plain["provenance"]["partitions"] == {
        "layer": "provisioner",
        "actor": "dana",
        "at_ms": 3,
        "reason": "new",
        "version": 1,
    }
    assert [row["layer"] for row in plain["layers"]] == ["base", "provisioner"]
    assert "origins" not in plain["layers"][0]


def test_an_audit_is_newest_first_and_can_be_paged(any_service: JobService) -> None:
    service, job = any_service, a_job(any_service)
    a_job(service, "demo.other")
    service.patch_layer(job, "oncall", {"threads": 2}, **asked(ONCALL))
    rows = service.audit()
    assert [(row.action, row.subject) for row in rows] == [
        ("layer.oncall", job),
        ("layer.provisioner", "demo.other"),
        ("job.created", "demo.other"),
        ("layer.provisioner", job),
        ("job.created", job),
    ]
    assert service.audit(limit=2) + service.audit(before=rows[1].id) == rows
    assert service.audit(subject=job) == tuple(row for row in rows if row.subject == job)
    assert service.audit(subject="a\x00b") == () == service.audit(subject="nobody")


def test_only_an_admin_changes_who_is_privileged(any_service: JobService, database: Database) -> None:
    service = any_service
    with pytest.raises(Refused, match="may not change `privileged`"):
        a_job(service, privileged=True)
    job = a_job(service, partitions=64, task_count=40, task_count_max=50)
    assert service.view(job).config.task_count == 32
    before = everything(database)
    for actor, layer in ((DEVELOPER, "provisioner"), (ONCALL, "oncall"), (SCALER, "scaler")):
        with pytest.raises(Refused) as caught:
            service.patch_layer(job, layer, {"privileged": True}, **asked(actor))
        assert "`privileged`" in caught.value.what and "admin" in caught.value.why and caught.value.fix
    assert everything(database) == before
    service.patch_layer(job, "provisioner", {"privileged": True}, **asked(ADMIN))
    assert service.view(job).config.task_count == 40
    # What stays as it is, is nobody's change; taking it back is one.
    body = a_body(job, partitions=64, task_count=45, task_count_max=50)
    service.apply(
        job, {**body, "privileged": True}, expected_version=None, birth="unused", **asked(DEVELOPER)
    )
    assert service.view(job).config.task_count == 45
    with pytest.raises(Refused, match="may not change `privileged`"):
        service.apply(job, body, expected_version=None, birth="unused", **asked(DEVELOPER))
    # Nor by going back to when it was so.
    service.patch_layer(job, "provisioner", {"privileged": None}, **asked(ADMIN))
    with pytest.raises(Refused, match="may not change `privileged`"):
        service.rollback(job, "provisioner", to_version=3, expected_version=None, **asked(DEVELOPER))
