"""A real control plane without loops, whose policies are users' own, in processes; time is set by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from penstock.app import ControlPlane
from penstock.core.system_clock import SystemClock
from penstock.fleet.messages import Heartbeat, ShardEntry, TaskReport
from penstock.scaling.metrics.frames import METRICS, MINUTE_MS
from penstock.scaling.metrics.minutes import Minute
from penstock.scaling.policies.policy_manager import PolicyManager
from penstock.scaling.policies.round import PolicyOutcome
from penstock.settings import Settings
from penstock.streams.bus.log import CategorySpec
from penstock.streams.compile.packages import build_package
from penstock.streams.package_store import UnpackedPackages
from tests.builders import ADMIN, CODE, PACKAGE, a_body
from tests.ready import ready_folder
from tests.waiting import until

JOB = "demo.count"
TASKS = 4


class SetClock(SystemClock):
    """A wall clock that a test sets; waits are measured as ever."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms

    def set_to(self, at_ms: int) -> None:
        self.ahead_ms = at_ms - super().now_ms()


class Scene:
    """One job, one container that reports its tasks, and the policy manager."""

    def __init__(self, folder: Path, code: str, *, budget_ms: int = 60_000, **settings: Any) -> None:
        self.plane = ControlPlane(Settings(folder=ready_folder(folder), **settings))
        self.clock = SetClock()
        self.plane.clock = self.clock
        self.plane.packages.put(PACKAGE, CODE)
        path = folder / "own.py"
        path.write_text(code)
        package = build_package(path)
        self.plane.packages.put(package.hash, package.data)
        self.code = f"{package.hash}/{package.entry}"
        unpacked = UnpackedPackages(folder / "unpacked", self.plane.packages.get)
        self.manager = PolicyManager(
            self.plane, self.plane.alarms.store, unpacked.folder_of, budget_ms=budget_ms
        )
        spec = CategorySpec(name="queries", partitions=8, columns=(("q", "string"),))
        self.plane.log.create(spec)
        self.metrics: dict[str, float] = {}
        self.sequence, self._acked = 0, tuple[ShardEntry, ...]()
        self.plane.register_container("c1", "life", folder_id="f")

    def own(self, class_name: str, **settings: Any) -> dict[str, Any]:
        """What a job says of a policy of the package."""
        return {"code": f"{self.code}:{class_name}", **settings}

    def add(self, policies: dict[str, Any], name: str = JOB, **changes: Any) -> None:
        given = {"task_count": TASKS, "policies": policies, **changes}
        self.plane.jobs.create(
            name,
            a_body(name, **given),
            birth=f"birth{self.sequence}",
            actor=ADMIN,
            reason="new",
            idempotency_key=None,
            now_ms=self.clock.now_ms(),
        )
        self.settle()

    def set_policies(self, policies: dict[str, Any], name: str = JOB) -> None:
        """Other policies for a job; of those that were, only its own layer's stay."""
        rows = self.plane.jobs.view(name).layers
        said = next((row.body for row in rows if row.layer == "oncall"), {}).get("policies", {})
        old = dict.fromkeys(f"policies.{policy}" for policy in said if policy not in policies)
        self.plane.jobs.patch_layer(
            name,
            "oncall",
            old | {f"policies.{policy}": given for policy, given in policies.items()},
            actor=ADMIN,  # a setting may name code
            reason="a test",
            idempotency_key=None,
            now_ms=self.clock.now_ms(),
        )
        self.settle()

    def record(self, minutes: int = 15, *, until_ms: int | None = None, **metrics: float) -> None:
        """The newest minutes of the job, all alike."""
        last = (self.clock.now_ms() if until_ms is None else until_ms) // MINUTE_MS - 1
        for minute in range(last - minutes + 1, last + 1):
            values = np.full((1, len(METRICS)), np.nan)
            for metric, value in metrics.items():
                values[0, list(METRICS).index(metric)] = value
            self.plane.metrics.put(Minute(minute=minute, jobs=(JOB,), values=values))

    def beat(self) -> None:
        """The container does as it is told, and tells of every task."""
        self.sequence += 1
        beat = Heartbeat(
            container="c1",
            incarnation="life",
            sequence=self.sequence,
            acked=self._acked,
            tasks=tuple(
                TaskReport(
                    task_id=f"{name}/{place}", job=name, generation=generation, shard=0, state="running",
                    metrics=self.metrics,
                )
                for name, (generation, count) in self.plane.task_service.task_counts().items()
                for place in range(count)
            ),
            engine_ready=True,
            list_version=self.plane.task_service.version(),
        )  # fmt: skip
        self._acked = self.plane.on_heartbeat(beat).shards

    def settle(self) -> None:
        """Everything runs as expected."""
        self.until(lambda: all(view.is_in_sync for view in self.plane.jobs.every_view()), self.plane._sync)
        self.beat()

    def until(self, is_so: Callable[[], object], step: Callable[[], object]) -> None:
        def both() -> None:
            self.beat()
            step()

        until(is_so, step=both)

    def round(self, minutes: float = 1.0) -> dict[str, list[PolicyOutcome]]:
        """So much later: one whole round of the schedule on the job; by policy, what became of its answers."""
        self.clock.ahead_ms += int(minutes * 60_000)
        self.settle()
        service = self.manager.service
        service.last.clear()
        self.until(lambda: JOB in service.last, self.manager.tick)
        self.settle()
        found: dict[str, list[PolicyOutcome]] = {}
        for said in service.last[JOB].outcomes:
            found.setdefault(said.policy, []).append(said)
        return found

    def written(self, name: str = JOB) -> list[dict[str, Any]]:
        """What the scaler layer got to say, oldest first."""
        rows = self.plane.jobs.history(name)
        return [dict(row.body) for row in sorted(rows, key=lambda row: row.version) if row.layer == "scaler"]

    def alarms(self, name: str = JOB) -> set[str]:
        return {alarm.key for alarm in self.plane.alarms.store.alarms(name) if alarm.is_firing}

    def config(self, name: str = JOB) -> dict[str, Any]:
        return self.plane.jobs.view(name).config.to_json()


@contextmanager
def a_scene(folder: Path, code: str, **given: Any) -> Iterator[Scene]:
    """Everything that it started ends."""
    scene = Scene(folder, code, **given)
    try:
        yield scene
    finally:
        scene.manager.stop()
        scene.plane.stop()
