"""What the policy service needs of the fleet, the store and whoever is told. Pure: protocols and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.core.clock import Millis
from penstock.core.errors import CorruptData
from penstock.core.journal import Entry
from penstock.core.text import make_known
from penstock.scaling.metrics.frames import NoFrame
from penstock.scaling.policies.facts import JobFacts
from penstock.scaling.policies.policy import Action, RaiseAlert
from penstock.scaling.policies.round import FleetState, JobRecord, RoundJob, Signals

make_known(JobRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedJob:
    """A job as the service sees it."""

    round_job: RoundJob
    settings: Mapping[str, Mapping[str, Any]]  # `policies` of its config
    signals: Signals
    expected_version: int


class ManagedJobs(Protocol):
    """The fleet, as the service needs it. `facts` is called beside the round."""

    def names(self) -> Sequence[str]:
        """Every job that runs."""

    def job(self, name: str) -> ManagedJob | None:
        """One of them; None: no longer there."""

    def jobs(self, names: Sequence[str]) -> Mapping[str, ManagedJob]:
        """Those of these that are still there, by name."""

    def facts(
        self, name: str, metrics: tuple[str, ...], minutes: int, if_known: tuple[str, ...] = ()
    ) -> JobFacts | NoFrame:
        """What a policy is shown, or why nothing can be (I20)."""

    def fleet(self) -> FleetState:
        """What the fleet allows now."""

    def apply(self, name: str, policy: str, action: Action, *, expected_version: int, reason: str) -> None:
        """Do it; PenstockError if it cannot be done now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is to be remembered of a job if its version is still this one, and its word to the journal."""

    job: str
    record: JobRecord
    version: int
    entry: Entry | None = None


class Records(Protocol):
    """What is remembered between rounds."""

    def load(self, job: str) -> tuple[JobRecord, int]:
        """The record and its version; an empty one has version 0."""

    def load_all(self, jobs: Sequence[str]) -> Mapping[str, tuple[JobRecord, int] | CorruptData]:
        """The same of many, by job; where one is damaged, what is to be said of it."""

    def save(self, job: str, record: JobRecord, version: int) -> bool:
        """Keep it if the version is still this one; False: somebody else served the job meanwhile."""

    def keep(self, kept: Sequence[Kept]) -> frozenset[str]:
        """Many at once, each by its own version; returns the jobs that somebody else served meanwhile."""


class AlertSink(Protocol):
    """Who is told. Levels: every call says all there is to say of these sources."""

    def report(self, job: str, alerts: Mapping[str, tuple[RaiseAlert, ...]], now_ms: Millis) -> None:
        """By policy that had its say: its alerts now."""

    def report_all(self, seen: Mapping[str, Mapping[str, tuple[RaiseAlert, ...]]], now_ms: Millis) -> None:
        """The same of many jobs, by job."""
