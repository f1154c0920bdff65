"""20 producers and 10 readers at once for some seconds; `make stress` does it for a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.streams.bus.stress import PRODUCERS, run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_many_producers_and_readers_on_the_embedded_log(tmp_path: Path):
    found = run(f"embedded:{tmp_path}", 5)
    assert found["producers"] == PRODUCERS and found["read"] > found["records"]


def test_many_producers_and_readers_on_kafka(kafka: Any):
    found = run(kafka.new_place(), 5)
    assert found["producers"] == PRODUCERS and found["read"] > 0
