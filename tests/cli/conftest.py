"""Worlds for the tests of the command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from tests.cli.world import QUERIES_SIX, ZEITGEIST, Run, Started, World, a_world, runner


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find their control plane in the folder they are given."""
    for name in (
        "PENSTOCK_URL",
        "PENSTOCK_TOKEN",
        "PENSTOCK_CA",
        "PENSTOCK_DATABASE",
        "PENSTOCK_BUS",
        "PENSTOCK_ROWS",
        "PENSTOCK_ALARM_WEBHOOK",
        "PENSTOCK_ALARM_CHANNELS",
        "PENSTOCK_RESCALES_MAX",
        "PENSTOCK_ADVICE_ONLY",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def same_log() -> Iterator[None]:
    """A command that runs here sends its log to what is its standard error now, and gone later."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """What a failed test leaves running would make others fail."""
    yield
    for started in [*Started.left]:
        started.kill()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys)


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[World]:
    """A control plane that has nothing to do."""
    with a_world(tmp_path / "plane") as world:
        yield world


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One control plane with the category `queries`, for tests that leave it as it is."""
    with a_world(tmp_path_factory.mktemp("cli") / "plane") as world:
        create(world)
        yield world


@pytest.fixture
def world(empty: World, run: Run) -> World:
    """A control plane of the test's own with the Zeitgeist pipeline."""
    assert run(*QUERIES_SIX, "--folder", empty.folder).code == 0
    assert run("submit", ZEITGEIST, "--folder", empty.folder).code == 0
    return empty


def create(world: World) -> None:
    from penstock.cli.output import connect

    client = connect(world.folder)
    columns = [["query", "string"], ["lang", "string"], ["ts", "bigint"]]
    spec = {
        "name": "queries",
        "partitions": 6,
        "columns": columns,
        "ts_column": "ts",
        "watermark": "injector",
    }
    client.create_category(spec)
    client.close()
