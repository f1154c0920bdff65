"""Claims about what the routes do, and that whatever they refuse leaves nothing behind."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from penstock.server.api import PREFIX
from tests.builders import a_body, a_pipeline
from tests.server.world import JOB, World

LAYER = f"/jobs/{JOB}/layers/oncall"
CATEGORY = {"name": "queries", "partitions": 2, "columns": [["query", "string"], ["ts", "bigint"]]}


def is_problem(answer: Any, status: int, kind: str) -> dict[str, Any]:
    """A problem of a kind, with all its parts; returns them."""
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == f"urn:penstock:{kind}"
    assert problem["status"] == status
    assert problem["title"] and problem["detail"] and problem["fix"]
    return dict(problem)


def patch(world: World, changes: dict[str, Any], *, role: str = "oncall", **headers: str) -> Any:
    body = {"changes": changes, "why": "a test"}
    return world.ask("PATCH", LAYER, role=role, json=body, headers=headers)


def test_a_job_is_read_with_its_version_as_etag(world: World):
    answer = world.ask("GET", f"/jobs/{JOB}", role="reader")
    assert answer.status_code == 200
    assert answer.headers["ETag"] == f'"{world.version()}"'
    assert answer.json()["config"]["name"] == JOB


def test_a_write_with_the_version_it_was_decided_on_passes(world: World):
    version = world.version()
    answer = patch(world, {"task_count": 3}, **{"If-Match": f'"{version}"'})
    assert answer.status_code == 200
    assert answer.json() == {"version": version + 1}
    assert answer.headers["ETag"] == f'"{version + 1}"'
    assert world.plane.jobs.view(JOB).config.task_count == 3


def test_a_stale_version_is_409_with_the_current_one_and_writes_nothing(world: World):
    stale = world.version()
    assert patch(world, {"task_count": 3}).status_code == 200
    before = world.everything()
    answer = patch(world, {"task_count": 5}, **{"If-Match": f'"{stale}"'})
    problem = is_problem(answer, 409, "VersionConflict")
    assert (problem["expected"], problem["actual"]) == (stale, stale + 1)
    assert answer.headers["ETag"] == f'"{stale + 1}"'
    assert world.everything() == before


@pytest.mark.parametrize("header", ['W/"1"', '"1", "2"', "abc", '""', '"-1"', '"1.5"', '"' + "9" * 30 + '"'])
def test_what_is_no_version_is_not_taken_for_one(shared: World, header: str):
    before = shared.everything()
    is_problem(patch(shared, {"task_count": 5}, **{"If-Match": header}), 422, "ConfigError")
    assert shared.everything() == before


def test_any_version_is_fine_with_a_star(world: World):
    assert patch(world, {"task_count": 2}, **{"If-Match": "*"}).status_code == 200


@pytest.mark.parametrize(
    ("changes", "suggestion"),
    [
        ({"tsk_count": 4}, "task_count"),
        ({"slo.lag": 4}, "slo.lag_s"),
        ({"scaler.quite_s": 4}, "scaler.quiet_s"),
        ({"task_count": 4, "ownr": "me"}, "owner"),
    ],
)
def test_a_misspelt_field_is_422_with_a_suggestion_and_writes_nothing(
    shared: World, changes: dict[str, Any], suggestion: str
):
    before = shared.everything()
    problem = is_problem(patch(shared, changes), 422, "ConfigError")
    assert f"`{suggestion}`" in problem["fix"]
    assert shared.everything() == before


@pytest.mark.parametrize(
    ("method", "path", "body", "suggestion"),
    [
        ("PATCH", LAYER, {"chnges": {"task_count": 4}, "why": "x"}, "changes"),
        ("POST", "/pipelines", {"compild": {}, "why": "x"}, "compiled"),
        ("POST", "/categories", {**CATEGORY, "latenes_ms": 1}, "lateness_ms"),
    ],
)
def test_a_misspelt_part_of_a_body_is_422_with_a_suggestion(
    shared: World, method: str, path: str, body: dict[str, Any], suggestion: str
):
    before = shared.everything()
    problem = is_problem(shared.ask(method, path, json=body), 422, "ConfigError")
    assert problem["fix"] == f"did you mean `{suggestion}`?"
    assert "there is no such field" in problem["detail"]
    assert shared.everything() == before


def test_a_repeated_key_repeats_the_answer_and_nothing_else(world: World):
    first = patch(world, {"task_count": 4}, **{"Idempotency-Key": "k1"})
    before = world.everything()
    again = patch(world, {"task_count": 4}, **{"Idempotency-Key": "k1"})
    assert (again.status_code, again.json()) == (200, first.json())
    assert world.everything() == before


def test_a_key_names_one_request(world: World):
    assert patch(world, {"task_count": 4}, **{"Idempotency-Key": "k1"}).status_code == 200
    before = world.everything()
    is_problem(patch(world, {"task_count": 5}, **{"Idempotency-Key": "k1"}), 422, "KeyReused")
    is_problem(patch(world, {"task_count": 5}, **{"Idempotency-Key": "k" * 201}), 422, "ConfigError")
    assert world.everything() == before


def test_a_repeated_submit_repeats_the_answer(world: World):
    bodies = [a_body("demo.count"), a_body("demo.other")]
    first = world.submit(*bodies, **{"Idempotency-Key": "s1"})
    assert first.status_code == 200, first.text
    assert set(first.json()["jobs"]) == {"demo.count", "demo.other"}
    before = world.everything()
    assert world.submit(*bodies, **{"Idempotency-Key": "s1"}).json() == first.json()
    assert world.everything() == before


def test_a_plan_writes_nothing(shared: World):
    before = shared.everything()
    answer = shared.ask(
        "POST", "/pipelines/plan", role="developer", json={"compiled": a_pipeline(a_body("demo.new"))}
    )
    assert {change["job"]: change["change"] for change in answer.json()["changes"]} == {
        "demo.new": "new",
        JOB: "removed",
    }
    assert shared.everything() == before


def test_a_pipeline_without_its_package_is_404_and_writes_nothing(shared: World):
    before = shared.everything()
    compiled = a_pipeline(a_body("demo.count", task_count=2))
    compiled["package"]["hash"] = "f" * 64
    body = {"compiled": compiled, "why": "x"}
    is_problem(shared.ask("POST", "/pipelines", json=body), 404, "NotFound")
    assert shared.everything() == before


@pytest.mark.parametrize(
    "compiled",
    [
        {},
        {"pipeline": "demo"},
        {"pipeline": "../demo", "package": {}, "jobs": [{"name": "../demo.x"}]},
        {"pipeline": "demo", "package": {}, "jobs": []},
        {"pipeline": "demo", "package": {}, "jobs": ["text"]},
        {"pipeline": "demo", "package": {}, "jobs": [{"name": "other.x"}]},
        {"pipeline": "demo", "package": "none", "jobs": [{"name": "demo.x"}]},
        {"pipeline": "demo", "package": {}, "jobs": [{"name": "demo.x"}], "grph": {}},
        {"pipeline": "demo", "package": {"hash": "../../etc"}, "jobs": [{"name": "demo.x"}]},
        {"pipeline": "demo", "package": {}, "jobs": [{"name": "demo.x", "kind": "other"}]},
    ],
)
def test_what_is_no_compiled_pipeline_is_422_and_writes_nothing(shared: World, compiled: dict[str, Any]):
    before = shared.everything()
    for path in ("/pipelines", "/pipelines/plan"):
        body = {"compiled": compiled} | ({"why": "x"} if path == "/pipelines" else {})
        is_problem(shared.ask("POST", path, json=body), 422, "ConfigError")
    assert shared.everything() == before


def test_a_submit_with_one_bad_job_writes_none(shared: World):
    before = shared.everything()
    answer = shared.submit(a_body("demo.count", task_count=4), a_body("demo.other", task_count=0))
    is_problem(answer, 422, "ConfigError")
    assert shared.everything() == before


def test_a_change_without_a_reason_is_refused(shared: World):
    before = shared.everything()
    answer = shared.ask("PATCH", LAYER, json={"changes": {"task_count": 2}, "why": "  "})
    is_problem(answer, 422, "ConfigError")
    assert shared.everything() == before


def test_a_category_is_created_once(world: World):
    first = world.ask("POST", "/categories", role="developer", json=CATEGORY)
    assert first.status_code == 201
    assert first.headers["Location"] == f"{PREFIX}/categories/queries"
    again = world.ask("POST", "/categories", role="developer", json=CATEGORY)
    assert (again.status_code, again.json()) == (200, first.json())
    read = world.ask("GET", "/categories/queries", role="reader").json()
    assert read == first.json() and read["end_offsets"] == [0, 0]
    assert world.ask("GET", "/categories", role="reader").json() == {"categories": [read]}


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../queries"},
        {"name": ""},
        {"name": "."},
        {"name": "a/b"},
        {"name": "a\x00b"},
        {"name": "x" * 129},
        {"partitions": 0},
        {"partitions": 10**9},
        {"partitions": "many"},
        {"columns": []},
        {"columns": [["query", "nonsense"]]},
        {"columns": [["_seq", "bigint"]]},
        {"columns": [["a", "string"], ["a", "string"]]},
        {"columns": [["a"]]},
        {"watermark": "producers"},
        {"watermark": "nonsense"},
        {"format": "nonsense"},
        {"lateness_ms": -1},
        {"lateness_ms": 2**63},
    ],
)
def test_a_category_that_cannot_be_is_422_and_leaves_nothing(shared: World, changes: dict[str, Any]):
    before = shared.everything()
    answer = shared.ask("POST", "/categories", role="developer", json={**CATEGORY, **changes})
    is_problem(answer, 422, "ConfigError")
    assert shared.everything() == before


def test_a_category_keeps_its_spec(world: World):
    assert world.ask("POST", "/categories", json=CATEGORY).status_code == 201
    before = world.everything()
    is_problem(world.ask("POST", "/categories", json={**CATEGORY, "partitions": 3}), 422, "ConfigError")
    assert world.everything() == before


def test_a_package_comes_back_as_it_was_put(world: World):
    data = b"PK" + bytes(range(256)) * 1000
    hash_ = hashlib.sha256(data).hexdigest()
    put = world.ask("PUT", f"/packages/{hash_}", role="developer", content=data)
    assert (put.status_code, put.json()) == (201, {"hash": hash_})
    assert world.ask("PUT", f"/packages/{hash_}", role="developer", content=data).status_code == 200
    got = world.ask("GET", f"/packages/{hash_}", role="container")
    assert got.content == data and got.headers["Content-Type"] == "application/zip"


@pytest.mark.parametrize("hash_", ["0" * 64, "abc", "F" * 64, "0" * 65, "..", "0" * 63 + "g"])
def test_a_package_under_a_wrong_hash_is_refused_and_not_kept(shared: World, hash_: str):
    before = shared.everything()
    answer = shared.ask("PUT", f"/packages/{hash_}", role="developer", content=b"code")
    assert answer.status_code in (404, 422)
    assert shared.everything() == before
    assert shared.ask("GET", f"/packages/{hash_}", role="developer").status_code in (404, 422)


def test_the_journal_is_paged(world: World):
    for number in range(2, 7):
        assert patch(world, {"task_count": number}).status_code == 200
    whole = world.ask("GET", "/journal", role="reader", params={"subject": JOB}).json()["entries"]
    assert [entry["id"] for entry in whole] == sorted(entry["id"] for entry in whole)
    newest = world.ask("GET", "/journal", role="reader", params={"subject": JOB, "limit": 2})
    assert newest.json()["entries"] == whole[-2:]
    after = world.ask("GET", "/journal", role="reader", params={"subject": JOB, "since": whole[0]["id"]})
    assert after.json()["entries"] == whole[1:]
    assert world.ask("GET", "/journal", params={"subject": "nobody"}).json() == {"entries": []}


@pytest.mark.parametrize(
    ("path", "parameter", "value"),
    [
        ("/journal", "since", "-1"),
        ("/journal", "since", str(2**63)),
        ("/journal", "since", "x"),
        ("/journal", "limit", "0"),
        ("/journal", "limit", "1001"),
        ("/journal", "subject", "x" * 501),
        ("/tasks", "since", str(10**30)),
        ("/tasks", "since", "-5"),
        ("/containers/c1/log", "lines", "0"),
        ("/containers/c1/log", "lines", "1000000"),
    ],
)
def test_parameters_have_bounds(shared: World, path: str, parameter: str, value: str):
    is_problem(shared.ask("GET", path, params={parameter: value}), 422, "ConfigError")


@pytest.mark.parametrize(
    "path", ["/dashboard", "/api", "/api/v1", "/api/v1/", "/api/v2/jobs", "/docs", "/api/v1/jobs/"]
)
def test_an_unknown_route_is_404(shared: World, path: str):
    is_problem(shared.ask("GET", path, raw=True), 404, "NotFound")


def test_a_wrong_method_is_405_and_says_which_are_right(shared: World):
    answer = shared.ask("POST", f"/jobs/{JOB}")
    is_problem(answer, 405, "Refused")
    assert answer.headers["Allow"] == "DELETE, GET, PUT"


def test_unknown_names_are_404(shared: World):
    is_problem(shared.ask("GET", "/jobs/nobody"), 404, "NotFound")
    is_problem(shared.ask("GET", "/categories/nobody"), 404, "NotFound")
    is_problem(shared.ask("GET", f"/packages/{'0' * 64}"), 404, "NotFound")
    is_problem(shared.ask("GET", "/containers/nobody/log"), 404, "NotFound")
    body = {"changes": {"priority": 1}, "why": "x"}
    is_problem(shared.ask("PATCH", "/jobs/nobody/layers/oncall", json=body), 404, "NotFound")
    is_problem(shared.ask("PATCH", f"/jobs/{JOB}/layers/nolayer", json=body), 404, "NotFound")


TRICKS = [
    "..",
    "...",
    "%2e%2e",
    "..%2f..%2fstore.db",
    "..%252f..%252fstore.db",
    "%2fetc%2fpasswd",
    "%5c..%5c",
    "a%00b",
    "%00",
    "a%0d%0ab",
    "%ff%fe",
    "~",
    "-rf",
    ".hidden",
    "a" * 5000,
    "%F0%9F%98%80",
    "a;b",
    "a b",
    "$(id)",
]


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/jobs/{}", None),
        ("PATCH", "/jobs/{}/layers/oncall", {"changes": {"priority": 1}, "why": "x"}),
        ("PATCH", f"/jobs/{JOB}/layers/{{}}", {"changes": {"priority": 1}, "why": "x"}),
        ("GET", "/categories/{}", None),
        ("GET", "/packages/{}", None),
        ("PUT", "/packages/{}", None),
        ("GET", "/containers/{}/log", None),
        ("POST", "/containers/{}/register", {"incarnation": "i", "folder_id": "f"}),
        ("POST", "/containers/{}/beat", {"container": "..", "incarnation": "i", "sequence": 1}),
    ],
)
def test_a_name_never_reaches_the_file_system(shared: World, trick: str, method: str, path: str, body: Any):
    before = shared.everything()
    answer = shared.ask(method, path.format(trick), json=body)
    assert answer.status_code in (404, 405, 422), answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert "SQLite" not in answer.text and "root:" not in answer.text
    assert shared.everything() == before


def test_a_bug_is_500_without_its_traceback(world: World):
    world.plane.task_list = lambda since: {"secret": 1 / 0}  # type: ignore[method-assign]
    answer = world.ask("GET", "/tasks")
    problem = is_problem(answer, 500, "PenstockError")
    assert "Traceback" not in answer.text and "secret" not in answer.text
    assert "ZeroDivisionError" in problem["detail"]
