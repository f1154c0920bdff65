"""Claims about `penstock dashboard`."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import unquote

import httpx

from tests.builders import a_body
from tests.cli.world import Run, World


def test_it_prints_an_address_whose_token_reads_and_does_nothing_else(shared: World, run: Run):
    found = run("dashboard", "--folder", shared.folder)
    assert found.code == 0
    (address,) = found.out.splitlines()
    assert run("dashboard", "--folder", shared.folder, "-o", "json").json == {"url": address}
    url, _, token = address.partition("/#token=")
    assert httpx.get(url).text.startswith("<!doctype html>")
    headers = {"Authorization": f"Bearer {unquote(token)}"}
    assert httpx.get(f"{url}/api/v1/status", headers=headers).status_code == 200
    assert httpx.get(f"{url}/api/v1/tokens", headers=headers).status_code == 403


def test_it_leads_to_the_page_of_a_job(shared: World, run: Run, tmp_path: Path):
    file = tmp_path / "job.json"
    file.write_text(json.dumps(a_body("demo.count")))
    assert run("job", "apply", "-f", file, "--why", "x", "--folder", shared.folder).code == 0
    whole = run("dashboard", "--folder", shared.folder).out.strip()
    assert run("dashboard", "demo.count", "--folder", shared.folder).out.strip() == f"{whole}&job=demo.count"
    run("dashboard", "demo.other", "--folder", shared.folder).is_refused(3)


def test_without_a_control_plane_it_says_so(run: Run, tmp_path: Path):
    assert "penstock up" in run("dashboard", "--folder", tmp_path).is_refused(5)
