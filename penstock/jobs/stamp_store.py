"""What tells whether anything about a job has changed, read in one cheap look: its stamp.

A stamp has every small column of every row that a view is made of, so two equal stamps mean one view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from penstock.core import json_text
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
# Made once: making a statement takes longer than running it.
_ONE = _STAMP.where(JOBS.c.name == sa.bindparam("called"))
_NAMES = sa.bindparam("names", type_=sa.Text)
_MANY = {
    "sqlite": _STAMP.where(
        JOBS.c.name.in_(sa.select(sa.func.json_each(_NAMES).table_valued("value").c.value))
    ),
    "postgresql": _STAMP.where(
        JOBS.c.name
        == sa.any_(
            sa.func.array(
                sa.select(sa.func.json_array_elements_text(sa.cast(_NAMES, sa.JSON))).scalar_subquery(),
                type_=sa.ARRAY(sa.Text),
            )
        )
    ),
}


def read_stamp(connection: sa.Connection, name: str) -> Stamp | None:
    """The stamp of one job, removed or not; None if there is none."""
    row = connection.execute(_ONE, {"called": name}).first()
    return None if row is None else tuple(row)


def read_stamps(connection: sa.Connection, names: Sequence[str]) -> dict[str, Stamp]:
    """The stamps of these jobs; unknown names are left out."""
    rows = connection.execute(_MANY[connection.dialect.name], {"names": json_text.dumps(list(names))})
    return {row[0]: tuple(row) for row in rows}
