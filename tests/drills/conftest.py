"""What all drills share: the table of recovery times at the end, and fleets that leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.drills.fleet import DrillFleet

TIMES = pytest.StashKey[list[tuple[str, float, float, str]]]()


@dataclass(slots=True)
class Stopwatch:
    """Where a drill says how long it took to be well again."""

    drill: str
    times: list[tuple[str, float, float, str]] = field(default_factory=list)

    def took(self, seconds: float, *, limit_s: float, note: str = "") -> None:
        """Print it, keep it for the table, and fail if it is too long."""
        self.times.append((self.drill, seconds, limit_s, note))
        print(f"\n  {self.drill}: recovered after {seconds:.1f} s (limit {limit_s:.0f} s) {note}", flush=True)
        assert seconds <= limit_s, f"recovery took {seconds:.1f} s, the limit is {limit_s:.0f} s"


@pytest.fixture
def stopwatch(request: pytest.FixtureRequest) -> Stopwatch:
    times = request.config.stash.setdefault(TIMES, [])
    return Stopwatch(request.node.name.removeprefix("test_"), times)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[DrillFleet]:
    """Three containers that `penstock up` runs."""
    with DrillFleet(tmp_path, containers=3) as found:
        found.start()
        yield found


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[DrillFleet]:
    """Three containers with hosts of their own: they outlive the control plane."""
    with DrillFleet(tmp_path) as found:
        found.launch()
        for name in ("c1", "c2", "c3"):
            found.join(name)
        found.await_ready("c1", "c2", "c3")
        yield found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    times = config.stash.get(TIMES, [])
    if not times:
        return
    terminalreporter.section("recovery times")
    width = max(len(drill) for drill, *_ in times)
    terminalreporter.write_line(f"{'drill':{width}}  recovered   limit")
    for drill, seconds, limit_s, note in times:
        terminalreporter.write_line(f"{drill:{width}}  {seconds:7.1f} s  {limit_s:4.0f} s  {note}".rstrip())
