"""Serves the versioned list of all tasks: the full list, or the changes since a version (Turbine IV).

Task Managers cache the list, so that balancing and fail-over work while this service is down.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from penstock.core import text as json_text
from penstock.core.text import make_known
from penstock.fleet.messages import read_message
from penstock.fleet.shard_load import Vector, reserved_load, reserved_loads, shard_of
from penstock.jobs.tasks import RunningJob, TaskSpec, has_tasks, partitions_of, task_specs


class RunningPage(Protocol):
    """Running rows, and the version at which they were read."""

    @property
    def version(self) -> int:
        """The version of the newest change in this page."""

    @property
    def rows(self) -> Sequence[RunningJob]:
        """The rows, including those of stopped, held and removed jobs."""


class RunningSource(Protocol):
    """The part of the Job Store that the Task Service needs."""

    def snapshot(self, *, since: int = 0) -> RunningPage:
        """Every row with a version above `since`, in version order, from one snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskList:
    """The tasks of all jobs at one version, or (not `full`) the changes since the version `since`."""

    version: int
    full: bool
    jobs: Mapping[str, tuple[TaskSpec, ...]] = field(default_factory=dict)
    removed: tuple[str, ...] = ()  # jobs that no longer have tasks
    since: int = 0  # the version in the request

    def specs(self) -> tuple[TaskSpec, ...]:
        """Every task of every job."""
        return tuple(spec for job in sorted(self.jobs) for spec in self.jobs[job])

    def to_json(self) -> dict[str, Any]:
        """The list as JSON, with each job's config only once."""
        return {
            "version": self.version,
            "full": self.full,
            "jobs": {job: _job_to_json(specs) for job, specs in self.jobs.items()},
            "removed": list(self.removed),
            "since": self.since,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TaskList:
        """Read a list from JSON. Ignores unknown fields; ValueError if it is not a task list."""
        read = read_message(data, _ListOnWire)
        jobs = {job: _job_from_json(job, item) for job, item in read.jobs.items()}
        return TaskList(
            version=read.version, full=read.full, jobs=jobs, removed=read.removed, since=read.since
        )


class _JobOnWire(msgspec.Struct, frozen=True):
    birth: str
    generation: int
    running_version: int
    config: dict[str, Any]
    tasks: tuple[tuple[int, tuple[int, ...]], ...]


class _ListOnWire(msgspec.Struct, frozen=True):
    version: int
    full: bool
    jobs: dict[str, _JobOnWire]
    removed: tuple[str, ...]
    since: int


def _job_to_json(specs: Sequence[TaskSpec]) -> dict[str, Any]:
    first = specs[0]
    return {
        "birth": first.birth,
        "generation": first.generation,
        "running_version": first.running_version,
        "config": json_text.loads(first.config_json),
        "tasks": [[spec.index, list(spec.partitions)] for spec in specs],
    }


def _job_from_json(job: str, item: _JobOnWire) -> tuple[TaskSpec, ...]:
    config_json = json_text.dumps(item.config)
    return tuple(
        TaskSpec(
            task_id=f"{job}/{index}",
            job=job,
            birth=item.birth,
            index=index,
            generation=item.generation,
            partitions=partitions,
            config_json=config_json,
            running_version=item.running_version,
        )
        for index, partitions in item.tasks
    )


def merge_list(current: TaskList | None, update: TaskList) -> TaskList | None:
    """The full list after an update; None if the update does not fit the current list: fetch the
    full list.
    """
    # The store does not know the version of our list.
    is_reset = current is not None and update.full and update.since == current.version
    if current is not None and update.version < current.version and not is_reset:
        return current  # a late response
    if update.full:
        return update
    if current is None or update.since > current.version:
        return None
    removed = frozenset(update.removed)  # may be many: a removed pipeline can have most of the jobs
    jobs = {job: specs for job, specs in {**current.jobs, **update.jobs}.items() if job not in removed}
    return TaskList(version=update.version, full=True, jobs=jobs)


@dataclass(slots=True)
class _CachedJob:
    """A running row, and values derived from it, computed on first use."""

    row: RunningJob
    has_tasks: bool
    task_specs: tuple[TaskSpec, ...] | None = None
    text: bytes = b""  # the job as JSON
    load: Vector | None = None
    placed: tuple[int, tuple[int, ...]] | None = None  # number of shards, the shard of each task

    @property
    def specs(self) -> tuple[TaskSpec, ...]:
        if self.task_specs is None:
            self.task_specs = task_specs(self.row)
        return self.task_specs

    def replaced_by(self, row: RunningJob) -> _CachedJob:
        """The cached job for a newer row; a new release keeps its tasks in their shards."""
        is_same = row.job == self.row.job and row.mapping == self.row.mapping
        return _CachedJob(row, has_tasks(row), placed=self.placed if is_same else None)

    def shards(self, count: int) -> tuple[int, ...]:
        """The shard of each of its tasks."""
        if not self.has_tasks:
            return ()
        if self.placed is None or self.placed[0] != count:
            indices = sorted(set(self.row.mapping))
            self.placed = count, tuple(shard_of(f"{self.row.job}/{index}", count) for index in indices)
        return self.placed[1]

    def reserved(self) -> Vector:
        """What each of its tasks reserves. Decodes only that part of the config."""
        if self.load is None:
            self.load = reserved_load(_decode_resources(self.row.config_json).resources)
        return self.load

    def encoded(self) -> bytes:
        if not self.text:
            row = self.row
            self.text = b'%s:{"birth":%s,"generation":%d,"running_version":%d,"config":%s,"tasks":%s}' % (
                _encode(row.job),
                _encode(row.birth),
                row.generation,
                row.restart_version,
                row.config_json.encode(),
                _encode(sorted(partitions_of(row).items())),
            )
        return self.text


class TaskService:
    """Builds task lists from running rows and caches them: only changed jobs are read and encoded again.

    Any number of instances may serve one store: each reads the newest version from it at every call.
    """

    def __init__(self, source: RunningSource) -> None:
        self._source, self._lock = source, threading.Lock()
        self._version = 0
        self._jobs: dict[str, _CachedJob] = {}  # in the order of their versions
        self._loads: tuple[tuple[int, int], dict[int, tuple[int, Vector]]] | None = None
        self._counts: tuple[int, dict[str, tuple[int, int]]] | None = None

    def snapshot(self, since: int | None = None) -> TaskList:
        """The changes since a version; the full list if the version is missing or unknown."""
        with self._lock:
            self._refresh()
            is_full, jobs = self._since(since)
            return TaskList(
                version=self._version,
                full=is_full,
                jobs={job: item.specs for job, item in jobs.items() if item.has_tasks},
                removed=() if is_full else tuple(_without_tasks(jobs)),
                since=since or 0,
            )

    def encoded(self, since: int | None = None) -> bytes:
        """The same as JSON, assembled from cached parts."""
        return self.encoded_at(since)[1]

    def encoded_at(self, since: int | None = None) -> tuple[int, bytes]:
        """The same, with its version."""
        with self._lock:
            self._refresh()
            is_full, jobs = self._since(since)
            parts = [item.encoded() for item in jobs.values() if item.has_tasks]
            removed = [] if is_full else _without_tasks(jobs)
            head = {"version": self._version, "full": is_full, "removed": removed, "since": since or 0}
            return self._version, _encode(head)[:-1] + b',"jobs":{' + b",".join(parts) + b"}}"

    def version(self) -> int:
        """The version of the newest list."""
        with self._lock:
            self._refresh()
            return self._version

    def reserved_loads(self, shards: int) -> dict[int, tuple[int, Vector]]:
        """How many tasks each shard has, and what they reserve; shards without tasks are absent."""
        with self._lock:
            self._refresh()
            if self._loads is None or self._loads[0] != (self._version, shards):
                jobs = ((item.shards(shards), item.reserved()) for item in self._jobs.values())
                self._loads = (self._version, shards), reserved_loads(jobs)
            return self._loads[1]

    def shards_of(self, subject: str, birth: str, shards: int) -> frozenset[int]:
        """The shards of a job's tasks (also while held) or of one task; none if the birth id differs."""
        job, _, index = subject.partition("/")
        with self._lock:
            self._refresh()
            item = self._jobs.get(job)
            if item is None or item.row.birth != birth:
                return frozenset()
            tasks = [subject] if index else [f"{job}/{number}" for number in set(item.row.mapping)]
            return frozenset(shard_of(task, shards) for task in tasks)

    def task_counts(self) -> Mapping[str, tuple[int, int]]:
        """For each job with tasks: its generation and its number of tasks."""
        with self._lock:
            self._refresh()
            if self._counts is None or self._counts[0] != self._version:
                found = {
                    job: (item.row.generation, len(set(item.row.mapping)))
                    for job, item in self._jobs.items()
                    if item.has_tasks
                }
                self._counts = self._version, found
            return self._counts[1]

    def _refresh(self) -> None:
        page = self._source.snapshot(since=self._version)
        if page.version < self._version:  # another store
            self._jobs, self._version = {}, 0
            page = self._source.snapshot()
        for row in page.rows:
            old = self._jobs.pop(row.job, None)
            self._jobs[row.job] = _CachedJob(row, has_tasks(row)) if old is None else old.replaced_by(row)
        self._version = page.version

    def _since(self, since: int | None) -> tuple[bool, dict[str, _CachedJob]]:
        """(whether the result is the full list, the jobs in it)."""
        if not since or since > self._version:
            return True, self._jobs
        changed = {}
        for job in reversed(self._jobs):
            if self._jobs[job].row.version <= since:
                break
            changed[job] = self._jobs[job]
        return False, changed


def _without_tasks(jobs: Mapping[str, _CachedJob]) -> list[str]:
    return sorted(job for job, item in jobs.items() if not item.has_tasks)


class _Resources(msgspec.Struct):
    """The part of a config that its load needs."""

    resources: dict[str, Any] = {}


_encode = msgspec.json.Encoder().encode
_decode_resources = msgspec.json.Decoder(_Resources).decode


make_known(_ListOnWire)
