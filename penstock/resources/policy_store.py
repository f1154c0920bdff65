"""What policies remember of each job, as a table: one row a job, under a version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from penstock.core.bulk_store import ByName
from penstock.core.errors import CorruptData
from penstock.core.journal_store import JournalStore
from penstock.core.sql_store import METADATA, NAME, Database, upsert
from penstock.resources.policies.ports import Kept
from penstock.resources.policies.records import JobRecord

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
