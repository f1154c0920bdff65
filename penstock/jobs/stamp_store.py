"""What tells whether anything about a job has changed, read in one cheap look: its stamp.

A stamp has every small column of every row that a view is made of, so two equal stamps mean one view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from penstock.core.bulk_store import ByName
from penstock.core.quick_store import MADE_ONCE, Ask
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
_STAMPS = ByName(_STAMP, JOBS.c.name)
_PAGE = (
    _STAMP.where(JOBS.c.name > sa.bindparam("after", type_=JOBS.c.name.type), ~JOBS.c.deleted)
    .order_by(JOBS.c.name)
    .limit(sa.bindparam("most", type_=sa.Integer))
    .execution_options(**MADE_ONCE)
)


def peek_stamps(database: Database, names: Sequence[str]) -> dict[str, Stamp]:
    """The stamps of these jobs, removed or not; unknown names are left out. Outside any transaction."""
    return {row[0]: row for row in _STAMPS.peek(database, names)}


def read_stamps(connection: sa.Connection, names: Sequence[str]) -> dict[str, Stamp]:
    """The same inside a transaction."""
    return {row[0]: tuple(row) for row in _STAMPS.rows(connection, names)}


def ask_stamps(database: Database, names: Sequence[str]) -> Ask:
    """The question to which the stamps of these jobs are the answer."""
    return _STAMPS.ask(database, names)


def look_at_page(database: Database, *, after: str, limit: int) -> dict[str, Stamp]:
    """The stamps of the first `limit` jobs behind a name, removed ones left out, in the order of names."""
    (rows,) = database.look([(_PAGE, {"after": after, "most": limit})])
    return {row[0]: tuple(row) for row in rows}
