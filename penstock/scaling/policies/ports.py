"""Interfaces of the policy service: the fleet, the record store, the alerts. Pure: protocols and values."""

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
from penstock.scaling.policies.round import FleetState, PolicyRecord, RoundJob, Signals

make_known(PolicyRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedJob:
    """A job with all that a round needs."""

    round_job: RoundJob
    settings: Mapping[str, Mapping[str, Any]]  # `policies` of its config
    signals: Signals
    expected_version: int


class ManagedJobs(Protocol):
    """The fleet, as the service needs it. `facts` is called from worker threads."""

    def names(self) -> Sequence[str]:
        """All running jobs."""

    def job(self, name: str) -> ManagedJob | None:
        """One running job; None if it does not run any more."""

    def jobs(self, names: Sequence[str]) -> Mapping[str, ManagedJob]:
        """Those of these jobs that still run, by name."""

    def facts(
        self, name: str, metrics: tuple[str, ...], minutes: int, if_known: tuple[str, ...] = ()
    ) -> JobFacts | NoFrame:
        """The facts for a policy, or why there are none (I20)."""

    def fleet(self) -> FleetState:
        """The fleet's limits, and how much of them is in use."""

    def apply(self, name: str, policy: str, action: Action, *, expected_version: int, reason: str) -> None:
        """Apply an action; PenstockError if it cannot be applied now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordUpdate:
    """A compare-and-set of a job's record: stored with its journal entry if the version still matches."""

    job: str
    record: PolicyRecord
    version: int
    entry: Entry | None = None


class PolicyRecords(Protocol):
    """The store of policy records."""

    def load(self, job: str) -> tuple[PolicyRecord, int]:
        """The record and its version; an empty one has version 0."""

    def load_all(self, jobs: Sequence[str]) -> Mapping[str, tuple[PolicyRecord, int] | CorruptData]:
        """The same for many jobs; CorruptData in place of a record that is damaged."""

    def save(self, job: str, record: PolicyRecord, version: int) -> bool:
        """Store the record if the version is still this one; False if another instance changed it."""

    def save_all(self, updates: Sequence[RecordUpdate]) -> frozenset[str]:
        """Store many, each if its version still matches; returns the jobs that another instance changed."""


class AlertSink(Protocol):
    """Receives alerts. A call has all alerts of its sources: those that are missing have ended."""

    def report(self, job: str, alerts: Mapping[str, tuple[RaiseAlert, ...]], now_ms: Millis) -> None:
        """`alerts`: by policy that ran, its alerts now."""

    def report_all(self, seen: Mapping[str, Mapping[str, tuple[RaiseAlert, ...]]], now_ms: Millis) -> None:
        """The same for many jobs, by job."""
