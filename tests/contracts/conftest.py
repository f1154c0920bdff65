"""The implementations that each contract is run against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.system_clock import SystemClock
from penstock.streams.bus.embedded.log import EmbeddedLog
from penstock.streams.bus.kafka.log import KafkaLog
from penstock.streams.bus.kafka.place import parse_place
from penstock.streams.bus.log import Log
from penstock.streams.bus.memory import MemoryLog
from tests.contracts.buses import SPEC, NewLog


@pytest.fixture(params=["memory", "embedded", "kafka"])
def new_log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NewLog]:
    """Makes handles on one and the same bus."""
    if request.param == "memory":
        memory = MemoryLog(now_ms=SystemClock().now_ms)
        yield lambda: memory
        return
    handles: list[EmbeddedLog | KafkaLog] = []
    place = request.getfixturevalue("kafka").new_place() if request.param == "kafka" else ""

    def open_handle() -> Log:
        made = KafkaLog(parse_place(place)) if place else EmbeddedLog(tmp_path / "bus")
        handles.append(made)
        return made

    yield open_handle
    for handle in handles:
        handle.close()


@pytest.fixture(params=["memory", "embedded"])
def quick_log(request: pytest.FixtureRequest, tmp_path: Path) -> NewLog:
    """As `new_log`, for properties that need hundreds of publishes; Kafka has its own, with fewer."""
    memory = MemoryLog(now_ms=SystemClock().now_ms)
    return (lambda: memory) if request.param == "memory" else (lambda: EmbeddedLog(tmp_path / "bus"))


@pytest.fixture
def log(new_log: NewLog) -> Log:
    made = new_log()
    made.create(SPEC)
    return made
