"""What policies remember of each job, as a table: one row a job, under a version."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import sqlalchemy as sa

from penstock.core.errors import CorruptData
from penstock.core.sql_store import METADATA, NAME, Database
from penstock.core.system_clock import sleep_ms
from penstock.resources.policies.records import JobRecord

POLICY_RECORDS = sa.Table(
    "policy_records",
    METADATA,
    sa.Column("job", NAME, primary_key=True),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)
REST_MS = 10  # some five times what a job's share of a round takes


def polite_records(database: Database) -> PolicyRecordStore:
    """For rounds beside which others write."""
    return PolicyRecordStore(database, rest=partial(sleep_ms, REST_MS))


class PolicyRecordStore:
    """The `Records` of the policy service. Of two instances that served one job, one is told that it lost."""

    def __init__(self, database: Database, rest: Callable[[], None] = lambda: None) -> None:
        """`rest` is called after every write: rounds write for many jobs in a row, and whoever waits for the
        database has its turn in between.
        """
        self._database, self._rest = database, rest

    def load(self, job: str) -> tuple[JobRecord, int]:
        """The record and its version; an empty one has version 0."""
        query = sa.select(POLICY_RECORDS).where(POLICY_RECORDS.c.job == job)
        with self._database.reading() as connection:
            row = connection.execute(query).first()
        if row is None:
            return JobRecord(), 0
        try:
            return msgspec.json.decode(row.body, type=JobRecord), int(row.version)
        except msgspec.DecodeError as error:
            raise CorruptData(
                f"what policies remember of {job} cannot be read",
                why=str(error),
                fix="nothing is done to this job until its row in policy_records is deleted",
            ) from error

    def save(self, job: str, record: JobRecord, version: int) -> bool:
        """Keep it if the version is still this one."""
        body = msgspec.json.encode(record).decode()
        table = POLICY_RECORDS
        with self._database.transaction() as connection:
            row = connection.execute(sa.select(table.c.version).where(table.c.job == job)).first()
            if (0 if row is None else int(row.version)) != version:
                return False
            if row is None:
                connection.execute(sa.insert(table).values(job=job, version=1, body=body))
            else:
                connection.execute(
                    sa.update(table).where(table.c.job == job).values(version=version + 1, body=body)
                )
        self._rest()
        return True

    def forget(self, job: str) -> None:
        """The job is no more."""
        with self._database.transaction() as connection:
            connection.execute(sa.delete(POLICY_RECORDS).where(POLICY_RECORDS.c.job == job))
