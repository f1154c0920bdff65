"""What runs where, read from the store: any control plane may ask, whichever has the active Shard Manager."""

from __future__ import annotations

from penstock.fleet.container_store import ContainerRow, decode_tasks
from penstock.fleet.messages import TaskReport
from penstock.fleet.shard_store import ShardRow, ShardStore


class FleetView:
    """Containers, shards and tasks as last recorded. No lock: nobody waits for a round."""

    def __init__(self, store: ShardStore) -> None:
        self._store = store

    def is_stopped(self, job: str, *, generation: int, list_version: int) -> bool:
        """Whether no task of `job` up to `generation` runs: each container proved it or its lease is over."""
        return all(
            row.list_version >= list_version
            and not any(task.generation <= generation for task in row.tasks_of(job))
            for row in self._store.containers()
            if row.may_run
        )

    def containers(self) -> tuple[ContainerRow, ...]:
        """Every container ever heard of; `state` says whether it lives."""
        return self._store.containers()

    def shards(self) -> tuple[ShardRow, ...]:
        """Every shard's record."""
        return self._store.shards()

    def task_reports(self, job: str | None = None) -> tuple[tuple[str, TaskReport], ...]:
        """(container, task) as last reported by containers that may still run something."""
        return tuple(
            (name, task)
            for name, text in self._store.reports()
            if job is None or f'"{job}"' in text
            for task in decode_tasks(text)
            if job is None or task.job == job
        )
