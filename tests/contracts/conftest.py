"""The implementations that each contract is run against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.streams.bus.embedded_log import EmbeddedLog
from penstock.streams.bus.log import Log
from penstock.streams.bus.memory_log import MemoryLog
from tests.contracts.buses import SPEC, NewLog


@pytest.fixture(params=["memory", "embedded"])
def new_log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NewLog]:
    """Makes handles on one and the same bus."""
    if request.param == "memory":
        memory = MemoryLog()
        yield lambda: memory
        return
    handles: list[EmbeddedLog] = []

    def open_handle() -> EmbeddedLog:
        handles.append(EmbeddedLog(tmp_path / "bus"))
        return handles[-1]

    yield open_handle
    for handle in handles:
        handle.close()


@pytest.fixture
def log(new_log: NewLog) -> Log:
    made = new_log()
    made.create(SPEC)
    return made
