"""The task list by shard, kept up by deltas: a hash is computed once per task, not once per change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.tasks.sharding import shard_of
from penstock.tasks.specs import TaskSpec
from penstock.tasks.task_service import TaskList, merge_list


class TaskIndex:
    """A whole task list, and which of its tasks fall into which shard."""

    def __init__(self) -> None:
        self._list: TaskList | None = None
        self._shards = 0
        self._by_shard: dict[int, dict[str, TaskSpec]] = {}
        self._shard_of: dict[str, int] = {}

    @property
    def whole(self) -> TaskList | None:
        """The list as it stands; None before the first one."""
        return self._list

    def take(self, news: TaskList) -> bool:
        """Bring in a list or a delta. False: it does not fit, the whole list is needed."""
        merged = merge_list(self._list, news)
        if merged is None:
            return False
        if merged is self._list:
            return True
        had = self._list.jobs if self._list is not None else {}
        # In an order that is the same in every process: tasks are started in the order they come in here.
        changed: Iterable[str] = {**had, **merged.jobs} if news.full else (*news.jobs, *news.removed)
        self._list = merged
        for job in changed:
            self._replace(had.get(job, ()), merged.jobs.get(job, ()))
        return True

    def tasks_of(self, shards: Iterable[int], shard_count: int) -> Iterable[tuple[int, TaskSpec]]:
        """(shard, task) for every task in one of these shards."""
        if shard_count != self._shards:
            self._shards, self._by_shard, self._shard_of = shard_count, {}, {}
            for specs in (self._list.jobs if self._list is not None else {}).values():
                self._replace((), specs)
        for shard in shards:
            for spec in self._by_shard.get(shard, {}).values():
                yield shard, spec

    def spec(self, job: str, task_id: str) -> TaskSpec | None:
        """The task of that id, as the list has it."""
        shard = self._shard_of.get(task_id)
        if shard is not None:
            return self._by_shard[shard][task_id]
        jobs = self._list.jobs if self._list is not None else {}
        return next((spec for spec in jobs.get(job, ()) if spec.task_id == task_id), None)

    def tasks(self, shard: int) -> Mapping[str, TaskSpec]:
        """The tasks of one shard, by id."""
        return self._by_shard.get(shard, {})

    def _replace(self, old: tuple[TaskSpec, ...], new: tuple[TaskSpec, ...]) -> None:
        if not self._shards:
            return
        kept = {spec.task_id for spec in new}
        for spec in old:
            if spec.task_id not in kept:
                del self._by_shard[self._shard_of.pop(spec.task_id)][spec.task_id]
        for spec in new:
            shard = self._shard_of.get(spec.task_id)
            if shard is None:
                shard = self._shard_of[spec.task_id] = shard_of(spec.task_id, self._shards)
            self._by_shard.setdefault(shard, {})[spec.task_id] = spec
