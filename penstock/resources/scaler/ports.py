"""What the auto scaler needs of jobs, tasks, containers and metrics. Pure: protocols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.core.clock import Millis
from penstock.resources.frames import Frame, NoFrame
from penstock.resources.policies.round import FleetState
from penstock.resources.scaler.observe import Capacity, ScalableJob
from penstock.resources.scaler.pattern import History
from penstock.tasks.messages import TaskReport

Reports = Mapping[str, Sequence[TaskReport]]


class JobLayer(Protocol):
    """Jobs, tasks and containers, as the scaler needs them."""

    def task_counts(self) -> Mapping[str, tuple[int, int]]:
        """By job that has tasks: its generation, and how many they are."""

    def task_reports(self) -> Reports:
        """What tasks say now, by job."""

    def scalable_jobs(self, names: Sequence[str]) -> tuple[ScalableJob, ...]:
        """Those of these jobs that could be scaled."""

    def capacity(self) -> Capacity:
        """What a container has, and what is left of all."""

    def fleet(self) -> FleetState:
        """What the whole fleet allows now."""

    def patch(self, job: str, changes: Mapping[str, Any], *, expected_version: int, reason: str) -> None:
        """Write the scaler layer; VersionConflict if somebody wrote since."""


class Minutes(Protocol):
    """The metrics store, as the scaler needs it."""

    def newest(self) -> int:
        """The newest minute recorded; -1: none."""

    def frames(self, jobs: Sequence[str], minutes: int, *, now_ms: Millis) -> Mapping[str, Frame | NoFrame]:
        """What a decision may look at, of many jobs."""

    def history(self, job: str, *, now_ms: Millis) -> History | NoFrame:
        """The last 14 days."""
