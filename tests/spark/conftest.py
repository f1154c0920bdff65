"""One session for all tests: what a test leaves running must not be in the next one's way."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from penstock.streams.places import open_log, open_rows


@pytest.fixture(autouse=True)
def nothing_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails half-way leaves its queries; they are stopped, so that only that test fails."""
    if "spark" not in request.fixturenames:
        yield
        return
    session = request.getfixturevalue("spark")
    yield
    for query in session.streams.active:
        query.stop()
    # Files of its bus and rows: with more than 1,024 open ones py4j's server does not answer any more.
    open_log.cache_clear()
    open_rows.cache_clear()
    gc.collect()
