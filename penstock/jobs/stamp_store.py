"""What tells whether anything about a job has changed, read in one cheap look: its stamp.

A stamp has every small column of every row that a view is made of, so two equal stamps mean one view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from penstock.core.bulk_store import ByName
from penstock.core.peek_store import Peek
from penstock.core.sql_store import Database
from penstock.jobs.job_store import JOBS
from penstock.jobs.running_store import PLANS, QUARANTINE, RUNNING

Stamp = tuple[Any, ...]

# The large ones change only together with a version among the small ones.
_LARGE = {RUNNING.c.config, RUNNING.c.mapping, PLANS.c.target, PLANS.c.mapping, PLANS.c.abandoned}
_STAMP = sa.select(
    *(column for table in (JOBS, RUNNING, PLANS, QUARANTINE) for column in table.c if column not in _LARGE)
).select_from(
    JOBS.outerjoin(RUNNING, RUNNING.c.job == JOBS.c.name)
    .outerjoin(PLANS, PLANS.c.job == JOBS.c.name)
    .outerjoin(QUARANTINE, QUARANTINE.c.job == JOBS.c.name)
)
_ONE = Peek(_STAMP.where(JOBS.c.name == sa.bindparam("name", type_=JOBS.c.name.type)))
_MANY = ByName(_STAMP, JOBS.c.name)


def peek_stamp(database: Database, name: str) -> Stamp | None:
    """The stamp of one job, removed or not; None if there is none. Its own look, outside any transaction."""
    rows = database.peek(_ONE, name)
    return rows[0] if rows else None


def read_stamps(connection: sa.Connection, names: Sequence[str]) -> dict[str, Stamp]:
    """The stamps of these jobs; unknown names are left out."""
    return {row[0]: tuple(row) for row in _MANY.rows(connection, names)}
