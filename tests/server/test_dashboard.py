"""Claims about the dashboard: what its page says a job promises, and what a browser may do with it."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import pytest

from penstock.server.routes.status import FILES
from tests.builders import a_body
from tests.server.world import JOB, World

PAGES = files("penstock.server") / "dashboard"


@pytest.mark.parametrize("path", FILES)
def test_whoever_opens_it_gets_files_that_hold_nothing_and_may_do_little(shared: World, path: str):
    answer = shared.ask("GET", path, role=None, raw=True, headers={"Sec-Fetch-Site": "none"})
    name, kind = FILES[path]
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    assert answer.content == (PAGES / name).read_bytes()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    head = shared.ask("HEAD", path, role=None, raw=True)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(answer.content))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_takes_nothing(shared: World, method: str):
    assert shared.ask(method, "/", role=None, raw=True).status_code in (404, 405)
    assert shared.ask(method, "/", raw=True, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 403


@pytest.mark.parametrize(
    "path",
    [
        "/dashboard/",
        "/dashboard/../api.py",
        "/dashboard/index.html",
        "/dashboard/%2e%2e/app.js",
        "/index.html",
    ],
)
def test_no_other_file_can_be_had(shared: World, path: str):
    assert shared.ask("GET", path, role=None, raw=True).status_code == 404


def test_a_page_of_another_name_gets_nothing(shared: World):
    assert shared.ask("GET", "/", role=None, raw=True, headers={"Host": "evil.example"}).status_code == 403


def test_its_script_makes_text_of_what_it_reads_and_asks_only_this_server():
    script, page = (PAGES / "app.js").read_text(), (PAGES / "index.html").read_text()
    for markup in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "new Function"):
        assert markup not in script
    assert "localStorage" not in script  # a token ends with its tab
    assert not re.search(r"https?://", script + page)
    assert re.findall(r"<script[^>]*>(.*?)</script>", page) == [""] and "onclick" not in page


def test_it_asks_for_what_the_api_has(shared: World):
    described = shared.ask("GET", "/openapi.json").json()["paths"]
    asked = re.findall(r'ask\("(/api/v1/[a-z/]+)', (PAGES / "app.js").read_text())
    assert len(asked) == 3
    for path in asked:
        whole = path if not path.endswith("/") else path + "{name}"
        assert "get" in described[whole], whole


@pytest.mark.parametrize(
    ("said", "promise"),
    [
        ({}, "strong productions: exactly once"),
        ({"productions": "weak"}, "weak productions: at least once"),
        ({"dedup": "off"}, "dedup off: at least once"),
    ],
)
def test_a_job_with_state_says_what_it_promises(world: World, said: dict[str, str], promise: str):
    plan = {"stages": [], "key": "query", "computation": {"class": "Count"}, "late": "drop"}
    stateful = a_body(JOB, kind="stateful", plan=plan, **said)
    assert world.submit(stateful, a_body("demo.parse")).status_code == 200
    for of in (promises_in_status, promises_of_job):
        (found,) = of(world, JOB)
        assert found.startswith(promise)
        assert of(world, "demo.parse") == []


def promises_of_job(world: World, job: str) -> Any:
    return world.ask("GET", f"/jobs/{job}", role="reader").json()["guarantees"]


def promises_in_status(world: World, job: str) -> Any:
    status = world.ask("GET", "/status", role="reader").json()
    return next(line["guarantees"] for line in status["jobs"] if line["name"] == job)
