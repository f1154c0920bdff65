"""SIGKILL of the real process at every named failpoint: it is started again and ends as if nothing had been (I11).

The syncer is real, with its worker threads, in a process of its own, on a SQLite file and on PostgreSQL; the effects
of its calls are kept in a file that survives it.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from penstock.db.database import METADATA, Database
from penstock.db.journal_store import JournalStore
from penstock.jobs.job_service import JobService
from penstock.jobs.job_store import JobStore
from penstock.jobs.syncer.batches import FAILPOINTS
from tests.builders import DEVELOPER, ONCALL, a_job, an_output
from tests.jobs.syncer_process import DurableTaskLayer
from tests.jobs.world import timeless
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parent.parent.parent
KILLED = "signal 9"


@dataclass
class Killer:
    """Runs syncers that kill themselves, each in a process forked from one that has everything imported."""

    process: subprocess.Popen[str] = field(
        default_factory=lambda: subprocess.Popen(
            [sys.executable, "-m", "tests.jobs.syncer_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
    )

    def run(self, place: str, folder: Path, *, rules: tuple[str, ...] = (), point: str | None = None) -> str:
        order = {"place": place, "folder": str(folder), "rules": rules, "point": point}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    killer = Killer()
    yield killer
    assert killer.process.stdin is not None and killer.process.stdout is not None
    killer.process.stdin.close()
    killer.process.stdout.close()
    assert killer.process.wait(LIMIT_S) == 0


@dataclass
class Scene:
    """A store, the effects of calls beside it, and syncers that come and go."""

    killer: Killer
    place: str
    folder: Path

    def run(self, *rules: str, point: str | None = None) -> str:
        return self.killer.run(self.place, self.folder, rules=rules, point=point)

    def create(self, *jobs: str) -> None:
        with self._database() as database:
            for job in jobs:
                a_job(JobService(JobStore(database)), job)

    def write(self, layer: str, **changes: Any) -> None:
        actor = ONCALL if layer == "oncall" else DEVELOPER
        with self._database() as database:
            JobService(JobStore(database)).patch_layer(
                "demo.count", layer, changes, actor=actor, reason="test", idempotency_key=None, now_ms=0
            )

    def passed(self) -> list[str]:
        """The failpoints that syncers came by here, in order."""
        return (self.folder / "passed").read_text().split()

    def outcome(self) -> dict[str, Any]:
        """All that is durable, in both stores, but for times and the order of what goes on side by side."""
        with self._database() as database:
            store = JobStore(database)
            records = store.load([job.name for job in store.overview()])
            entries = JournalStore(database).entries(limit=1000)
            return {
                "running": {name: timeless(record.running) for name, record in records.items()},
                "plans": [name for name, record in records.items() if record.plan is not None],
                "quarantine": {name: timeless(record.quarantine) for name, record in records.items()},
                "retirements": [name for name, record in records.items() if record.retirements],
                "audit": sorted(
                    f"{row.action} {row.subject} {row.reason} {row.data}" for row in store.audit()
                ),
                "journal": sorted(f"{row.kind} {row.decision} {row.subject} {row.reason}" for row in entries),
                **self.layer.effects(),
            }

    @property
    def layer(self) -> DurableTaskLayer:
        return DurableTaskLayer(self.folder / "effects.db")

    @contextmanager
    def _database(self) -> Iterator[Database]:
        database = Database(self.place if self.place.startswith("postgresql") else Path(self.place))
        yield database
        database.close()


@dataclass(frozen=True)
class Scenario:
    """What is written before the syncer that is to be killed is started, what it comes by, and where it is killed."""

    prepare: Callable[[Scene], None]
    comes_by: str
    kills: str
    rules: tuple[str, ...] = ()

    def points(self, names: str) -> set[str]:
        points = {f"{name}.{side}" for name in names.split() for side in ("before", "after")}
        return points - {f"{rule.removeprefix('fail ')}.after" for rule in self.rules}


def simple(scene: Scene) -> None:
    scene.write("provisioner", arguments={"a": "1"}, **{"package.version": "2"})


def complex_(scene: Scene) -> None:
    scene.write("provisioner", outputs=[an_output(category="other")], task_count=3)


def replaced(scene: Scene) -> None:
    """A held plan meets an oncall's other target."""
    complex_(scene)
    assert scene.run(point="hold.after") == KILLED
    scene.write("oncall", task_count=5)


def dropped(scene: Scene) -> None:
    """A plan that holds nothing yet meets its own end."""
    scene.write("oncall", task_count=3)
    assert scene.run(point="open.after") == KILLED
    scene.write("oncall", task_count=None)


def released(scene: Scene) -> None:
    """A quarantined job gets a new version."""
    complex_(scene)
    assert scene.run("fail prepare") == "exit 0"
    scene.write("oncall", labels={"looked": "at"})


PLAN = "open prepare hold is_stopped fence commit retire retired"
SCENARIOS = {
    "simple": Scenario(simple, "simple", kills="simple"),
    "complex": Scenario(complex_, PLAN, kills=PLAN),
    "given up": Scenario(
        complex_,
        "open prepare failed give_up retire retired",
        kills="failed give_up",
        rules=("fail prepare",),
    ),
    "replaced": Scenario(replaced, f"replace {PLAN.removeprefix('open')}", kills="replace"),
    "dropped": Scenario(dropped, "drop retire retired simple", kills="drop"),
    "released": Scenario(released, f"lift {PLAN}", kills="lift"),
}


def rows_of(url: str) -> dict[str, list[dict[str, Any]]]:
    database = Database(url)
    with database.reading() as connection:
        tables = METADATA.sorted_tables
        found = {
            table.name: [dict(row._mapping) for row in connection.execute(sa.select(table))]
            for table in tables
        }
    database.close()
    return found


def put_rows(url: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    database = Database(url)
    with database.transaction() as connection:
        for table in METADATA.sorted_tables:
            connection.execute(sa.delete(table))
            if rows[table.name]:
                connection.execute(sa.insert(table), rows[table.name])
    database.close()


@pytest.fixture(params=["sqlite", "postgres"])
def scenes(request: pytest.FixtureRequest, tmp_path: Path, killer: Killer) -> Iterator[Scene]:
    """One scene after another; in each, two jobs run."""
    server = request.getfixturevalue("postgres") if request.param == "postgres" else None
    folder = tmp_path / "first"
    folder.mkdir()
    first = Scene(killer, server.new_database() if server else str(folder / "store.db"), folder)
    first.create("demo.count", "demo.other")
    assert first.run() == "exit 0"
    (folder / "passed").unlink()
    # A file is copied; a database of a server is filled again, which is far quicker there.
    saved = rows_of(first.place) if server else {}

    def scenes() -> Iterator[Scene]:
        for number in itertools.count():
            copy = tmp_path / str(number)
            shutil.copytree(folder, copy)
            if server:
                put_rows(first.place, saved)
            yield Scene(killer, first.place if server else str(copy / "store.db"), copy)

    yield scenes()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kill_at_any_failpoint_ends_as_no_kill(name: str, scenes: Iterator[Scene]) -> None:
    """Killed at the failpoint, started again without one: everything durable is as in a run that was not killed."""
    scenario, scene = SCENARIOS[name], next(scenes)
    scenario.prepare(scene)
    (scene.folder / "passed").unlink(missing_ok=True)
    assert scene.run(*scenario.rules) == "exit 0"
    points, expected = list(dict.fromkeys(scene.passed())), scene.outcome()
    assert set(points) == scenario.points(scenario.comes_by)
    assert expected["plans"] == expected["retirements"] == []
    for point in sorted(scenario.points(scenario.kills)):
        scene = next(scenes)
        scenario.prepare(scene)
        assert scene.run(*scenario.rules, point=point) == KILLED
        assert scene.run(*scenario.rules) == "exit 0"
        assert scene.outcome() == expected, f"killed at {point}"
        fences = {generation for call, _, generation in scene.layer.calls() if call == "fence"}
        assert len(fences) <= 1, "a repeated fence raises to the same generation"


@pytest.mark.parametrize("scenes", ["sqlite"], indirect=True)
def test_a_second_kill_at_the_next_failpoint_ends_as_no_kill(scenes: Iterator[Scene]) -> None:
    """The recovery is killed too, at every failpoint of it."""
    scene = next(scenes)
    complex_(scene)
    assert scene.run() == "exit 0"
    points, expected = list(dict.fromkeys(scene.passed())), scene.outcome()
    for first, second in itertools.pairwise(points):
        scene = next(scenes)
        complex_(scene)
        assert scene.run(point=first) == KILLED
        assert scene.run(point=second) == KILLED
        assert scene.run() == "exit 0"
        assert scene.outcome() == expected, f"killed at {first}, then at {second}"


def test_a_syncer_is_killed_at_every_failpoint() -> None:
    """A name that no scenario comes by, or that is left out, would prove nothing."""
    killed = set().union(*(scenario.points(scenario.kills) for scenario in SCENARIOS.values()))
    assert killed == set(FAILPOINTS)
