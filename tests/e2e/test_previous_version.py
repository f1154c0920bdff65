"""What the previous version wrote (store, bus, state in rows) is opened by this one, and its jobs go on."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.platform import COUNT, PARSE, Platform
from tests.tidy_rules import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

# The last commit before the redesign of folders, requests and types.
PREVIOUS = "6bb4691224b2ac31b5c4ac1e261ae215ede6f04f"
QUERIES = 40  # different ones
PER_SECOND = 200


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole tree of the previous version."""
    archive = subprocess.run(["git", "archive", PREVIOUS], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        missing = (
            f"`git fetch origin {PREVIOUS}` brings the previous version: {archive.stderr.decode().strip()}"
        )
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    folder = tmp_path_factory.mktemp("previous")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tree:
        tree.extractall(folder, filter="data")
    return folder


@pytest.fixture(params=["embedded", "kafka"])
def platform(request: pytest.FixtureRequest, tmp_path: Path, previous: Path) -> Iterator[Platform]:
    """An installation of the previous version: SQLite and the embedded log, or PostgreSQL and Kafka."""
    if request.param == "embedded":
        yield from _running(Platform(tmp_path / "penstock", containers=1, code=previous))
        return
    server, kafka = request.getfixturevalue("postgres"), request.getfixturevalue("kafka")
    # Empty: what `new_database` gives has this version's tables.
    for name in ("previous_store", "previous_rows"):
        server.execute(f"CREATE DATABASE {name}")
    places = {"PENSTOCK_DATABASE": server.url("previous_store"), "PENSTOCK_ROWS": server.url("previous_rows")}
    folder = tmp_path / "penstock"
    yield from _running(
        Platform(folder, containers=1, code=previous, environment=places, bus=kafka.new_place())
    )


def _running(found: Platform) -> Iterator[Platform]:
    try:
        found.start()
        yield found
    finally:
        found.kill()


def ask(platform: Platform, file: Path, seconds: range, *more: str) -> None:
    """Append queries of some seconds to a file and let `penstock inject` publish them."""
    with file.open("a") as lines:
        for second in seconds:
            for n in range(PER_SECOND):
                ts, query = second * 1000 + n, f"query {n % QUERIES}"
                lines.write(json.dumps({"query": query, "lang": "en", "ts": ts}) + "\n")
                platform.injected.append((second, query))
    call(platform, "inject", "--category", "queries", str(file), *more)


def call(platform: Platform, *arguments: str) -> None:
    ended = platform.cli(*arguments)
    assert ended.returncode == 0, ended.stderr


def test_jobs_of_the_previous_version_go_on(platform: Platform, tmp_path: Path) -> None:
    """Plan: submit and count with the previous version; stop it; the same with this one on its data, rescaled, so
    that state it wrote moves to other tasks; each count is there once."""
    file = tmp_path / "queries.json"
    columns = ("--columns", "query:string,lang:string,ts:bigint", "--ts", "ts", "--watermark", "injector")
    call(platform, "category", "queries", "--create", "--partitions", "6", *columns)
    call(platform, "submit", str(platform.code / "examples" / "zeitgeist" / "pipeline.py"), "--version", "1")
    ask(platform, file, range(1, 4))
    ask(platform, file, range(4, 5))  # the first seconds are over now, the last ones are state
    platform.wait("counts of the previous version", lambda: sum(platform.log.end_offsets("query_counts")) > 0)
    assert platform.stop() == []

    platform.code = ROOT
    platform.start()
    ask(platform, file, range(5, 7))
    platform.wait("both jobs", lambda: platform.running(PARSE) and platform.running(COUNT))
    call(platform, "oncall", "set", COUNT, "task_count=3", "--why", "the state of the previous version moves")
    platform.wait("its three tasks", lambda: len(platform.running(COUNT)) == 3)
    ask(platform, file, range(7, 9), "--done")
    platform.assert_exact()
    assert platform.stop() == []
