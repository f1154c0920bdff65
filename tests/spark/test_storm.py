"""Claims about a short storm (`make storm` is the long one): faults one after another, and nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.storm import storm

pytestmark = [pytest.mark.spark, pytest.mark.e2e, pytest.mark.timeout(1800)]


def test_every_count_and_pair_is_there_once_whatever_dies(tmp_path: Path):
    with storm(tmp_path, seed=3) as found:
        found.run(seconds=120, faults_min=6)
        assert not found.platform.stop(), "something was left running"
