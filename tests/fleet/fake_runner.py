"""A runner without an engine: obeys at once, unless it is told to crash, hang or be fenced."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.jobs.tasks import FINAL, RunState, RunStatus, TaskSpec


@dataclass(slots=True)
class FakeRunner:
    """Runs nothing, and remembers everything it was told."""

    hanging: set[str] = field(default_factory=set)  # task ids that do not stop, only die
    immortal: set[str] = field(default_factory=set)  # task ids that do not even die
    log: list[str] = field(default_factory=list)  # "start a/0", "stop a/0", …
    specs: dict[str, TaskSpec] = field(default_factory=dict)  # of every run not yet forgotten
    epochs: dict[str, int] = field(default_factory=dict)
    _runs: dict[str, RunStatus] = field(default_factory=dict)

    def start(self, spec: TaskSpec, *, shard_epoch: int) -> None:
        assert spec.task_id not in self._runs, f"{spec.task_id} runs already"
        self.log.append(f"start {spec.task_id}")
        self.specs[spec.task_id], self.epochs[spec.task_id] = spec, shard_epoch
        self._runs[spec.task_id] = RunStatus(task_id=spec.task_id, state=RunState.RUNNING)

    def stop(self, task_id: str) -> None:
        self.log.append(f"stop {task_id}")
        is_stuck = task_id in self.hanging or task_id in self.immortal
        self._to(task_id, RunState.STOPPING if is_stuck else RunState.STOPPED)

    def kill(self, task_id: str) -> None:
        self.log.append(f"kill {task_id}")
        if task_id not in self.immortal:
            self._to(task_id, RunState.STOPPED)

    def poll(self) -> tuple[RunStatus, ...]:
        return tuple(self._runs[task_id] for task_id in sorted(self._runs))

    def forget(self, task_id: str) -> None:
        assert self._runs[task_id].state in FINAL, f"{task_id} is still alive"
        self.log.append(f"forget {task_id}")
        del self._runs[task_id], self.specs[task_id], self.epochs[task_id]

    def crash(self, task_id: str, error: str = "it crashed") -> None:
        """The run ends by itself."""
        self._to(task_id, RunState.FAILED, error)

    def fence(self, task_id: str) -> None:
        """The run finds a successor in its place."""
        self._to(task_id, RunState.FENCED, "a successor owns it")

    def measure(self, task_id: str, **metrics: float) -> None:
        """What the run is seen doing from now on."""
        self._runs[task_id] = replace(self._runs[task_id], metrics=metrics)

    def alive(self) -> tuple[str, ...]:
        """Task ids of runs that could still take effect."""
        return tuple(status.task_id for status in self.poll() if status.state not in FINAL)

    def _to(self, task_id: str, state: RunState, error: str = "") -> None:
        status = self._runs[task_id]
        if status.state not in FINAL:
            self._runs[task_id] = replace(status, state=state, error=error)
