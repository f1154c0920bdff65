"""Serves the list of all tasks, versioned: whole, or what changed since a version (Turbine IV).

Task Managers keep the list, so that balancing and fail-over go on while this service is away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.tasks.shard_load import Vector
from penstock.tasks.sharding import reserved_loads
from penstock.tasks.specs import RunningJob, TaskSpec, task_specs


class RunningPage(Protocol):
    """Running rows, and the version they were read at."""

    @property
    def version(self) -> int:
        """Of the newest change this page knows."""

    @property
    def rows(self) -> Sequence[RunningJob]:
        """Stopped, held and removed jobs included."""


class RunningSource(Protocol):
    """The Job Store, as the Task Service needs it."""

    def snapshot(self, *, since: int = 0) -> RunningPage:
        """Every row with a larger version than `since`, read in one transaction with the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskList:
    """The tasks of all jobs at one version, or (not `full`) what to change in a list of version `since`."""

    version: int
    full: bool
    jobs: Mapping[str, tuple[TaskSpec, ...]] = field(default_factory=dict)
    removed: tuple[str, ...] = ()  # jobs that have no tasks any more
    since: int = 0  # the version that was asked about

    def specs(self) -> tuple[TaskSpec, ...]:
        """Every task of every job."""
        return tuple(spec for job in sorted(self.jobs) for spec in self.jobs[job])

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "full": self.full,
            "jobs": {job: [spec.to_json() for spec in specs] for job, specs in self.jobs.items()},
            "removed": list(self.removed),
            "since": self.since,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TaskList:
        return TaskList(
            version=data["version"],
            full=data["full"],
            jobs={
                job: tuple(TaskSpec.from_json(spec) for spec in specs) for job, specs in data["jobs"].items()
            },
            removed=tuple(data["removed"]),
            since=data["since"],
        )


def merge_list(have: TaskList | None, news: TaskList) -> TaskList | None:
    """The whole list after `news`; None when `news` does not fit on what we have: ask for the whole one."""
    is_reset = have is not None and news.full and news.since == have.version  # the store never heard of ours
    if have is not None and news.version < have.version and not is_reset:
        return have  # a late answer
    if news.full:
        return news
    if have is None or news.since > have.version:
        return None
    jobs = {job: specs for job, specs in {**have.jobs, **news.jobs}.items() if job not in news.removed}
    return TaskList(version=news.version, full=True, jobs=jobs)


class TaskService:
    """Turns running rows into task lists."""

    def __init__(self, source: RunningSource) -> None:
        self._source = source
        self._whole: TaskList | None = None  # brought up to date by deltas

    def snapshot(self, since: int | None = None) -> TaskList:
        """What changed since a version; everything when the version is not given or not known."""
        asked = since or 0
        page = self._source.snapshot(since=asked)
        is_unknown = asked > page.version  # of another life of the store
        if is_unknown:
            page = self._source.snapshot()
        tasks = {row.job: task_specs(row) for row in page.rows}
        jobs = {job: specs for job, specs in tasks.items() if specs}
        if is_unknown or asked == 0:
            return TaskList(version=page.version, full=True, jobs=jobs, since=asked)
        removed = tuple(sorted(set(tasks) - set(jobs)))
        return TaskList(version=page.version, full=False, jobs=jobs, removed=removed, since=asked)

    def version(self) -> int:
        """Of the newest list there is."""
        return self._up_to_date().version

    def reserved_loads(self, shards: int) -> dict[int, tuple[int, Vector]]:
        """How many tasks each shard has and what they reserve; shards without tasks are absent."""
        return reserved_loads(self._up_to_date().specs(), shards)

    def _up_to_date(self) -> TaskList:
        have = self._whole
        merged = merge_list(have, self.snapshot(have.version if have is not None else None))
        assert merged is not None, "a delta from our own version fits"
        self._whole = merged
        return merged
