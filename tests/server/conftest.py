"""Worlds for the tests of the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.world import World, a_world


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One control plane for all tests of a file that leave it as it is; it has one job."""
    with a_world(tmp_path_factory.mktemp("web") / "plane") as world:
        assert world.submit().status_code == 200
        yield world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A control plane of the test's own, with one job."""
    with a_world(tmp_path / "plane") as world:
        assert world.submit().status_code == 200
        yield world
