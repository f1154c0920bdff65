"""Claims about jobs over HTTP: applied, planned, listed, paused, removed and brought back; layers and their history."""

from __future__ import annotations

from typing import Any

import pytest

from tests.builders import a_body
from tests.server.test_api import is_problem
from tests.server.world import JOB, World

NEW = "demo.new"


def body_of(world: World, name: str = NEW, **changes: Any) -> dict[str, Any]:
    package = {"name": "demo", "version": "1", "hash": world.package(b"the code"), "entry": "demo"}
    return {"config": a_body(name, **{"package": package, **changes}), "why": "a test"}


def put(world: World, name: str = NEW, *, headers: dict[str, str] | None = None, **changes: Any) -> Any:
    return world.ask(
        "PUT", f"/jobs/{name}", role="developer", json=body_of(world, name, **changes), headers=headers or {}
    )


def test_a_job_is_applied_read_and_applied_again(world: World):
    first = put(world, task_count=2)
    assert (first.status_code, first.json()["created"]) == (201, True)
    assert first.headers["Location"] == f"/api/v1/jobs/{NEW}"
    read = world.ask("GET", f"/jobs/{NEW}", role="reader")
    assert read.headers["ETag"] == first.headers["ETag"] == f'"{first.json()["version"]}"'
    assert read.json()["config"]["task_count"] == 2
    decided = read.json()["provenance"]["task_count"]
    assert (decided["layer"], decided["actor"], decided["reason"]) == ("provisioner", "a-developer", "a test")
    second = put(world, task_count=3, headers={"If-Match": first.headers["ETag"]})
    assert (second.status_code, second.json()["created"]) == (200, False)
    assert world.ask("GET", f"/jobs/{NEW}").json()["config"]["task_count"] == 3


def test_only_if_new_and_only_on_its_version(world: World):
    first = put(world, headers={"If-None-Match": "*"})
    assert first.status_code == 201
    before = world.everything()
    for headers in ({"If-None-Match": "*"}, {"If-Match": '"99"'}):
        conflict = put(world, task_count=2, headers=headers)
        problem = is_problem(conflict, 409, "VersionConflict")
        assert conflict.headers["ETag"] == first.headers["ETag"] == f'"{problem["actual"]}"'
    is_problem(put(world, headers={"If-None-Match": "*", "If-Match": '"1"'}), 422, "ConfigError")
    is_problem(put(world, headers={"If-Match": "*"}), 422, "ConfigError")
    is_problem(put(world, "demo.absent", headers={"If-Match": '"4"'}), 409, "VersionConflict")
    assert world.everything() == before


def test_a_repeat_of_an_apply_creates_nothing_more(world: World):
    first = put(world, headers={"Idempotency-Key": "a1"})
    before = world.everything()
    again = put(world, headers={"Idempotency-Key": "a1"})
    assert (again.status_code, again.json()) == (first.status_code, first.json())
    is_problem(put(world, task_count=5, headers={"Idempotency-Key": "a1"}), 422, "KeyReused")
    assert world.everything() == before


def test_a_plan_says_what_an_apply_would_do_and_does_nothing(world: World):
    before = world.everything()
    body = {"config": body_of(world)["config"]}
    planned = world.ask("POST", f"/jobs/{NEW}/plan", role="developer", json=body).json()
    assert (planned["job"], planned["change"], planned["state_kept"]) == (NEW, "new", True)
    assert world.everything() == before


def test_a_list_is_paged_and_filtered(world: World):
    for number in range(5):
        labels = {"team": "ads" if number % 2 else "maps", "tier": str(number)}
        assert put(world, f"demo.j{number}", labels=labels).status_code == 201
    names: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = world.ask("GET", "/jobs", role="reader", params={"limit": 2, **after}).json()
        assert len(page["jobs"]) <= 2
        names += [job["name"] for job in page["jobs"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert names == [JOB, *(f"demo.j{number}" for number in range(5))]

    def found(**params: Any) -> list[str]:
        return [job["name"] for job in world.ask("GET", "/jobs", params=params).json()["jobs"]]

    assert found(label="team=ads") == ["demo.j1", "demo.j3"]
    assert found(label=["team=ads", "tier=3"]) == ["demo.j3"]
    assert found(label="team=") == [] == found(pipeline="other")
    assert found(pipeline="demo") == names and found(state="new") == names and found(state="paused") == []
    is_problem(world.ask("GET", "/jobs", params={"label": ["a=1", "a=2"]}), 422, "ConfigError")


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("limit", "0"),
        ("limit", "1001"),
        ("limit", "x"),
        ("after", "../x"),
        ("after", "x" * 300),
        ("state", "lazy"),
        ("pipeline", "a b"),
        ("label", "team"),
        ("label", "=x"),
        ("label", "a\x00=b"),
        ("label", "a\u202e=b"),
        ("label", "x" * 600 + "=1"),
        ("removed", "perhaps"),
    ],
)
def test_a_filter_has_bounds(shared: World, parameter: str, value: str):
    is_problem(shared.ask("GET", "/jobs", params={parameter: value}), 422, "ConfigError")


def test_a_state_is_asked_for_in_ones_own_layer_and_the_higher_one_holds(world: World):
    by_oncall = world.ask(
        "POST", f"/jobs/{JOB}/state", role="oncall", json={"state": "paused", "why": "a flood"}
    )
    assert by_oncall.json() == {"version": world.version(), "layer": "oncall", "effective": "paused"}
    body = {"state": "running", "why": "mine"}
    by_owner = world.ask("POST", f"/jobs/{JOB}/state", role="developer", json=body).json()
    assert (by_owner["layer"], by_owner["effective"]) == ("provisioner", "paused")
    before = world.everything()
    for role, layer in (("developer", "oncall"), ("oncall", "provisioner"), ("oncall", "scaler")):
        answer = world.ask("POST", f"/jobs/{JOB}/state", role=role, json={**body, "layer": layer})
        is_problem(answer, 403, "Refused")
    is_problem(world.ask("POST", f"/jobs/{JOB}/state", json={**body, "state": "lazy"}), 422, "ConfigError")
    stale = world.ask("POST", f"/jobs/{JOB}/state", json=body, headers={"If-Match": '"0"'})
    is_problem(stale, 409, "VersionConflict")
    assert world.everything() == before


def test_a_removed_job_is_gone_but_not_lost(world: World):
    version = world.version()
    gone = world.ask("DELETE", f"/jobs/{JOB}", role="developer", params={"why": "old"})
    assert gone.json() == {"version": version + 1}
    is_problem(world.ask("GET", f"/jobs/{JOB}"), 404, "NotFound")
    assert world.ask("GET", "/jobs").json()["jobs"] == []
    (line,) = world.ask("GET", "/jobs", params={"removed": "true"}).json()["jobs"]
    assert (line["name"], line["removed"], line["state"]) == (JOB, True, "removed")
    assert world.ask("GET", f"/jobs/{JOB}/history").json()["history"][0]["layer"] == "provisioner"
    back = world.ask("POST", f"/jobs/{JOB}/restore", role="developer", json={"why": "a mistake"})
    assert back.status_code == 200 and world.version() == version + 2
    is_problem(world.ask("POST", f"/jobs/{JOB}/restore", json={"why": "again"}), 404, "NotFound")


def test_a_layer_is_replaced_only_by_who_says_what_they_saw(world: World):
    path = f"/jobs/{JOB}/layers/oncall"
    before = world.everything()
    is_problem(world.ask("PUT", path, json={"body": {"priority": 3}, "why": "x"}), 428, "ConfigError")
    assert world.everything() == before
    headers = {"If-Match": f'"{world.version()}"'}
    assert (
        world.ask("PUT", path, json={"body": {"priority": 3}, "why": "x"}, headers=headers).status_code == 200
    )
    is_problem(world.ask("PUT", path, json={"body": {}, "why": "x"}, headers=headers), 409, "VersionConflict")
    assert world.plane.jobs.view(JOB).config.priority == 3
    assert world.ask("DELETE", path, params={"why": "over"}).status_code == 200
    assert world.plane.jobs.view(JOB).config.priority == 0


def test_history_diff_and_rollback_of_a_layer(world: World):
    """Plan: three overrides; page through the history, compare versions, go back to the first override."""
    path = f"/jobs/{JOB}/layers/oncall"
    versions = []
    for number in (2, 3, 4):
        body = {"changes": {"task_count": number, "priority": number}, "why": f"try {number}"}
        versions.append(world.ask("PATCH", path, role="oncall", json=body).json()["version"])
    whole = world.ask("GET", f"/jobs/{JOB}/history", params={"layer": "oncall"}).json()
    assert [row["body"]["task_count"] for row in whole["history"]] == [4, 3, 2] and whole["next"] is None
    first = world.ask("GET", f"/jobs/{JOB}/history", params={"layer": "oncall", "limit": 2}).json()
    rest = world.ask(
        "GET", f"/jobs/{JOB}/history", params={"layer": "oncall", "before": first["next"]}
    ).json()
    assert first["history"] + rest["history"] == whole["history"]
    changes = world.ask("GET", f"/jobs/{JOB}/diff", params={"old": versions[0], "new": versions[2]}).json()[
        "changes"
    ]
    assert {change["path"]: (change["old"], change["new"], change["sync"]) for change in changes} == {
        "task_count": (2, 4, "complex"),
        "priority": (2, 4, "live"),
    }
    then = world.ask("GET", f"/jobs/{JOB}/layers", params={"version": versions[0]}).json()
    assert next(row["body"] for row in then["layers"] if row["layer"] == "oncall")["task_count"] == 2
    back = world.ask(
        "POST", f"{path}/rollback", role="oncall", json={"to_version": versions[0], "why": "it was better"}
    )
    assert back.json() == {"version": versions[2] + 1}
    now = world.ask("GET", f"/jobs/{JOB}/layers").json()
    assert now["version"] == versions[2] + 1
    assert next(row["body"] for row in now["layers"] if row["layer"] == "oncall") == {
        "task_count": 2,
        "priority": 2,
    }
    before = world.everything()
    is_problem(world.ask("POST", f"{path}/rollback", json={"to_version": 999, "why": "x"}), 404, "NotFound")
    is_problem(world.ask("GET", f"/jobs/{JOB}/layers", params={"version": 999}), 404, "NotFound")
    is_problem(world.ask("GET", f"/jobs/{JOB}/diff", params={"old": 999}), 404, "NotFound")
    assert world.everything() == before


def test_the_audit_is_paged_newest_first(world: World):
    for number in range(4):
        body = {"changes": {"priority": number}, "why": f"try {number}"}
        world.ask("PATCH", f"/jobs/{JOB}/layers/oncall", role="oncall", json=body)
    whole = world.ask("GET", "/audit", role="oncall", params={"subject": JOB}).json()["entries"]
    assert [entry["reason"] for entry in whole[:4]] == ["try 3", "try 2", "try 1", "try 0"]
    page = world.ask("GET", "/audit", params={"subject": JOB, "limit": 3}).json()
    rest = world.ask("GET", "/audit", params={"subject": JOB, "before": page["next"]}).json()
    assert page["entries"] + rest["entries"] == whole and rest["next"] is None


def test_a_fifth_layer_is_added_and_written_by_its_role(world: World):
    """Plan: a layer between scaler and oncall for the scaler's role; it overrules the scaler, oncall overrules it."""
    body = {"name": "doctor", "precedence": 25, "writers": ["scaler"], "why": "a new component"}
    added = world.ask("POST", "/layers", json=body)
    assert added.status_code == 201
    names = [kind["name"] for kind in world.ask("GET", "/layers", role="reader").json()["layers"]]
    assert names == ["base", "provisioner", "scaler", "doctor", "oncall"]
    for layer, value in (("oncall", 4), ("doctor", 3), ("scaler", 2)):
        change = {"changes": {"task_count": value}, "why": "x"}
        role = "oncall" if layer == "oncall" else "scaler"
        assert world.ask("PATCH", f"/jobs/{JOB}/layers/{layer}", role=role, json=change).status_code == 200
    assert world.plane.jobs.view(JOB).config.task_count == 4
    world.ask("DELETE", f"/jobs/{JOB}/layers/oncall", params={"why": "over"})
    assert world.plane.jobs.view(JOB).provenance["task_count"].layer == "doctor"
    refused = world.ask("PATCH", f"/jobs/{JOB}/layers/doctor", role="oncall", json=change)
    is_problem(refused, 403, "Refused")


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../x"},
        {"name": ""},
        {"precedence": 1.5},
        {"precedence": "25"},
        {"precedence": 10**9},
        {"writers": []},
        {"writers": ["emperor"]},
        {"writers": "admin"},
        {"replaces_plan": "yes"},
        {"why": ""},
        {"wirters": ["admin"]},
    ],
)
def test_a_layer_that_cannot_be_is_422(shared: World, changes: dict[str, Any]):
    before = shared.everything()
    body = {"name": "doctor", "precedence": 25, "writers": ["scaler"], "why": "x", **changes}
    is_problem(shared.ask("POST", "/layers", json=body), 422, "ConfigError")
    assert shared.everything() == before


def test_a_job_that_names_a_package_nobody_put_is_refused(world: World):
    """Also by a layer, whole or path by path; nothing is written. One that a job names already may be missing."""
    missing = {"name": "demo", "version": "1", "hash": "f" * 64, "entry": "demo"}
    assert put(world).status_code == 201
    before = world.everything()
    for hash_ in ("f" * 64, "aa", "no hash"):
        is_problem(put(world, "demo.gone", package={**missing, "hash": hash_}), 404, "NotFound")
    layer, tag = f"/jobs/{NEW}/layers/oncall", world.ask("GET", f"/jobs/{NEW}").headers["ETag"]
    replaced = {"body": {"package": missing}, "why": "x"}
    is_problem(world.ask("PUT", layer, json=replaced, headers={"If-Match": tag}), 404, "NotFound")
    is_problem(
        world.ask("PATCH", layer, json={"changes": {"package.hash": "f" * 64}, "why": "x"}), 404, "NotFound"
    )
    assert world.everything() == before
    # As an earlier version let it be: the package went away, the job stays what it is.
    kept = body_of(world)["config"]["package"]["hash"]
    (world.plane.settings.folder / "packages" / f"{kept}.zip").unlink()
    same = {**missing, "hash": kept}
    config = {"config": a_body(NEW, package=same, task_count=3), "why": "a test"}
    assert world.ask("PUT", f"/jobs/{NEW}", role="developer", json=config).status_code == 200
