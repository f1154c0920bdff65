"""One runner in front of several: a task goes to the one for its job's kind, or to a process of its own."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.tasks.runner import Runner, RunState, RunStatus
from penstock.tasks.specs import TaskSpec

ISOLATED = "isolated"


class KindRunner:
    """Sends tasks to `runners` by kind; `otherwise` takes the kinds that are not named, if it is there."""

    def __init__(self, runners: Mapping[str, Runner], otherwise: Runner | None = None) -> None:
        self._runners, self._otherwise = dict(runners), otherwise
        self._of: dict[str, Runner] = {}
        self._refused: dict[str, RunStatus] = {}

    def start(self, spec: TaskSpec, *, shard_epoch: int) -> None:
        """Begin a run where it belongs."""
        kind = str(spec.config.get("kind", ""))
        is_isolated = spec.config.get("isolation") == "process"
        runner = self._runners.get(ISOLATED) if is_isolated else self._runners.get(kind, self._otherwise)
        if runner is None:
            self._refused[spec.task_id] = RunStatus(
                task_id=spec.task_id,
                state=RunState.FAILED,
                error=f"this container runs no tasks of kind {kind!r}: start it with an engine that does",
            )
            return
        self._of[spec.task_id] = runner
        runner.start(spec, shard_epoch=shard_epoch)

    def stop(self, task_id: str) -> None:
        """Ask a run to end."""
        if task_id in self._of:
            self._of[task_id].stop(task_id)

    def kill(self, task_id: str) -> None:
        """End a run whatever it takes."""
        if task_id in self._of:
            self._of[task_id].kill(task_id)

    def poll(self) -> tuple[RunStatus, ...]:
        """Every run of every runner."""
        runners = list(
            dict.fromkeys([*self._runners.values(), *((self._otherwise,) if self._otherwise else ())])
        )
        return (*self._refused.values(), *(status for runner in runners for status in runner.poll()))

    def forget(self, task_id: str) -> None:
        """Drop a final run."""
        if self._refused.pop(task_id, None) is None and task_id in self._of:
            self._of.pop(task_id).forget(task_id)
