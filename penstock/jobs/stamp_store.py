"""What tells whether anything about a job has changed, read in one cheap look: its stamp.

A stamp has every small column of every row that a view is made of, so two equal stamps mean one view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from penstock.core.bulk_store import is_one_of
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
_ONE = _STAMP.where(JOBS.c.name == sa.bindparam("name"))


def read_stamp(connection: sa.Connection, name: str) -> Stamp | None:
    """The stamp of one job, removed or not; None if there is none."""
    row = connection.execute(_ONE, {"name": name}).first()
    return None if row is None else tuple(row)


def read_stamps(connection: sa.Connection, names: Sequence[str]) -> dict[str, Stamp]:
    """The stamps of these jobs; unknown names are left out."""
    rows = connection.execute(_STAMP.where(is_one_of(connection, JOBS.c.name, names)))
    return {row[0]: tuple(row) for row in rows}
