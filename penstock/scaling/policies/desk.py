"""The policies of one control plane: which there are, its rounds, and the looks that somebody asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa

from penstock.core.clock import Clock, Millis
from penstock.core.errors import CorruptData
from penstock.core.loop import WorkerThreads
from penstock.core.system_clock import sleep_ms
from penstock.core.workers import Finished, Now, Stuck, Workers
from penstock.db.bulk import ByName
from penstock.db.database import METADATA, NAME, Database, upsert
from penstock.db.journal_store import JournalStore
from penstock.fleet.exclusions import Bars, ExclusionStore, bars_of
from penstock.fleet.fleet_view import FleetView
from penstock.fleet.task_service import TaskService
from penstock.jobs.job_service import JobService
from penstock.jobs.running_store import RunningStore
from penstock.scaling.doctor.doctor import JobDoctor
from penstock.scaling.metrics.store import MetricStore
from penstock.scaling.policies.managed_jobs import FleetJobs, FleetLimits
from penstock.scaling.policies.policy import Action, ChangeLayer, Policy
from penstock.scaling.policies.ports import AlertSink, Kept
from penstock.scaling.policies.process import OwnPolicy, UserPolicies
from penstock.scaling.policies.records import JobRecord
from penstock.scaling.policies.round import said_to_json
from penstock.scaling.policies.service import Answer, Managed, PolicyService
from penstock.scaling.policies.stragglers import StragglerDetector
from penstock.scaling.policies.untriaged import Untriaged

POLICY_RECORDS = sa.Table(
    "policy_records",
    METADATA,
    sa.Column("job", NAME, primary_key=True),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)
_ROWS = ByName(sa.select(*POLICY_RECORDS.c), POLICY_RECORDS.c.job)
_VERSIONS = ByName(sa.select(POLICY_RECORDS.c.job, POLICY_RECORDS.c.version), POLICY_RECORDS.c.job)


class PolicyRecordStore:
    """The `Records` of the policy service. Of two instances that served one job, one is told that it lost."""

    def __init__(self, database: Database, journal: JournalStore) -> None:
        self._database, self._journal = database, journal

    def load(self, job: str) -> tuple[JobRecord, int]:
        """The record and its version; an empty one has version 0."""
        found = self.load_all([job])[job]
        if isinstance(found, CorruptData):
            raise found
        return found

    def load_all(self, jobs: Sequence[str]) -> Mapping[str, tuple[JobRecord, int] | CorruptData]:
        """The same of many, by job; where one is damaged, what is to be said of it."""
        found: dict[str, tuple[JobRecord, int] | CorruptData] = {job: (JobRecord(), 0) for job in jobs}
        if jobs:
            with self._database.reading() as connection:
                rows = _ROWS.rows(connection, jobs)
            found |= {job: _read(job, version, body) for job, version, body in rows}
        return found

    def save(self, job: str, record: JobRecord, version: int) -> bool:
        """Keep it if the version is still this one."""
        return not self.keep([Kept(job=job, record=record, version=version)])

    def keep(self, kept: Sequence[Kept]) -> frozenset[str]:
        """Keep those whose version is still theirs, with their entries in the journal; returns the others."""
        if not kept:
            return frozenset()
        with self._database.transaction() as connection:
            versions = dict(map(tuple, _VERSIONS.rows(connection, [item.job for item in kept])))
            won = [item for item in kept if versions.get(item.job, 0) == item.version]
            upsert(connection, POLICY_RECORDS, [_row(item) for item in won], replace=("version", "body"))
            entries = [item.entry for item in won if item.entry is not None]
            self._journal.append_entries(connection, entries)
        return frozenset(item.job for item in kept) - {item.job for item in won}

    def forget(self, job: str) -> None:
        """The job is no more."""
        with self._database.transaction() as connection:
            connection.execute(sa.delete(POLICY_RECORDS).where(POLICY_RECORDS.c.job == job))


def _row(kept: Kept) -> dict[str, Any]:
    body = msgspec.json.encode(kept.record).decode()
    return {"job": kept.job, "version": kept.version + 1, "body": body}


def _read(job: str, version: int, body: str) -> tuple[JobRecord, int] | CorruptData:
    try:
        return msgspec.json.decode(body, type=JobRecord), int(version)
    except msgspec.DecodeError as error:
        return CorruptData(
            f"what policies remember of {job} cannot be read",
            why=str(error),
            fix="nothing is done to this job until its row in policy_records is deleted",
        )


# Every policy of Penstock itself. A new one is a line here.
BUILT_IN: tuple[Callable[[], Policy], ...] = (
    StragglerDetector,
    JobDoctor,
    Untriaged,
)
THREADS = 2  # of ours: more would only wait for each other, and whoever is served beside them for all
USER_THREADS = 4  # of users' policies, which run in processes
REST_MS: Millis = 50  # some four times what a few jobs take
BUDGET_MS: Millis = 10_000  # so long a user's policy may take for an answer
# Longer than a user's policy may take to start and to answer: those are ended, not given up.
STUCK_MS: Millis = 45_000


class Limits(Protocol):
    """What an installation allows policies."""

    @property
    def shards(self) -> int:
        """How many there are."""

    @property
    def rescales_max(self) -> int:
        """Jobs whose tasks may be dealt anew at a time."""

    @property
    def advice_only(self) -> bool:
        """Whether nothing is done at all."""


class Parts(Protocol):
    """A control plane, as far as policies need it."""

    @property
    def settings(self) -> Limits:
        """How it runs."""

    @property
    def clock(self) -> Clock:
        """The time."""

    @property
    def is_syncing(self) -> bool:
        """Whether scheduled looks are made here."""

    database: Database
    journal: JournalStore
    jobs: JobService
    fleet: FleetView
    task_service: TaskService
    metrics: MetricStore

    def wake_syncer(self) -> None:
        """Something else is expected of a job."""

    def wake_shard_manager(self) -> None:
        """Something else is wanted of shards."""


class SplitWorkers:
    """Users' policies have threads of their own: however they hang, Penstock's are asked.

    A key is a job and a policy, as `PolicyService` makes them.
    """

    def __init__(self, own: Workers[Answer], users: Workers[Answer], names: frozenset[str]) -> None:
        self._own, self._users, self._names = own, users, names

    def start(self, key: str, work: Callable[[Now], Answer], now_ms: Millis) -> None:
        is_own = key.rpartition(" ")[2] in self._names
        (self._own if is_own else self._users).start(key, work, now_ms)

    def busy(self) -> frozenset[str]:
        return self._own.busy() | self._users.busy()

    def take_finished(self) -> tuple[Finished[Answer], ...]:
        return (*self._own.take_finished(), *self._users.take_finished())

    def stuck(self) -> tuple[Stuck, ...]:
        return (*self._own.stuck(), *self._users.stuck())


class PolicyDesk:
    """One instance's policies. Scheduled rounds are the active instance's, asked ones anybody's."""

    def __init__(
        self,
        parts: Parts,
        alarms: AlertSink,
        folder_of: Callable[[str], Path],
        *,
        budget_ms: Millis = BUDGET_MS,
    ) -> None:
        """`alarms`: who is told. `folder_of(hash)`: where a package lies, unpacked."""
        clock, settings = parts.clock, parts.settings
        self._parts, self._clock, self._shards = parts, clock, settings.shards
        self.exclusions = ExclusionStore(parts.database, parts.journal)
        self.jobs = FleetJobs(
            jobs=parts.jobs,
            running=RunningStore(parts.database),
            fleet=parts.fleet,
            tasks=parts.task_service,
            metrics=parts.metrics,
            exclusions=self.exclusions,
            clock=clock,
            shards=settings.shards,
            limits=FleetLimits(rescales_max=settings.rescales_max, advice_only=settings.advice_only),
            wake=self._wake,
        )
        own = [OwnPolicy(policy()) for policy in BUILT_IN]
        self._users = UserPolicies(folder_of, clock, budget_ms=budget_ms)
        threads: WorkerThreads[Answer] = WorkerThreads(
            "policies", clock, size=THREADS, stuck_after_ms=STUCK_MS
        )
        others: WorkerThreads[Answer] = WorkerThreads(
            "users' policies", clock, size=USER_THREADS, stuck_after_ms=STUCK_MS
        )
        self._threads = threads, others
        self.service = PolicyService(
            self.jobs,
            PolicyRecordStore(parts.database, parts.journal),
            alarms,
            parts.journal,
            own,
            SplitWorkers(threads, others, frozenset(policy.name for policy in own)),
            load=self._users.load,
            rest=partial(sleep_ms, REST_MS),
        )

    def tick(self) -> None:
        """One round of the schedule, where this instance is the active one."""
        if self._parts.is_syncing:
            self.service.tick(self._clock.now_ms())
        else:
            self.service.stand_by()

    def manage(self, job: str, *, policy: str | None, is_dry: bool, asked_by: str) -> dict[str, Any]:
        """A round on one job now, because somebody asked; returns what it came to."""
        now = self._clock.now_ms
        done = self.service.manage(job, now=now, policy=policy, is_dry=is_dry, asked_by=asked_by)
        return {"job": job, "at_ms": now(), **managed_to_json(done)}

    def bars(self, at_ms: Millis) -> Bars:
        """Where which shards should not be now."""
        wishes = self.exclusions.current(at_ms)
        shards_of = self._parts.task_service.shards_of
        return bars_of(wishes, lambda subject, birth: shards_of(subject, birth, self._shards))

    def stop(self) -> None:
        """End the threads, and the processes of users' policies."""
        for threads in self._threads:
            threads.stop()
        self._users.stop()

    def _wake(self, action: Action) -> None:
        if isinstance(action, ChangeLayer):
            self._parts.wake_syncer()
        else:
            self._parts.wake_shard_manager()


def managed_to_json(done: Managed) -> Mapping[str, Any]:
    """What a look came to: one change or none, every policy's answer, every alert."""
    apply, decision = done.decision.apply, done.decision
    said = [said_to_json(each, done.verdicts.get(each.policy)) for each in decision.said]
    off = "switched off for this job"
    said += [_nothing_said(policy, "off", off) for policy in done.off if policy not in done.verdicts]
    outcome = "would be done" if done.is_dry else "not done" if done.refused else "done"
    return {
        "is_dry": done.is_dry,
        "change": None
        if apply is None
        else {
            "policy": apply.policy,
            "what": apply.action.text,
            "why": apply.reason,
            "outcome": outcome,
            "refused": done.refused,
        },
        "said": said,
        "alerts": [
            {
                "policy": policy,
                "key": alert.key,
                "severity": alert.severity,
                "text": alert.text,
                "what_to_do": alert.what_to_do,
            }
            for policy, alert in decision.alerts
        ],
    }


def _nothing_said(policy: str, outcome: str, reason: str) -> dict[str, Any]:
    texts = dict.fromkeys(("symptom", "cause", "formula", "bound"), "")
    return {
        "policy": policy,
        "outcome": outcome,
        "reason": reason,
        "confidence": None,
        "inputs": {},
        **texts,
    }
