"""Which jobs there are: by pipeline, label and state, a page at a time, without reading their configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sqlalchemy as sa

from penstock.core.sql_store import METADATA, NAME
from penstock.jobs.job_store import JOBS
from penstock.jobs.running_store import PLANS, QUARANTINE, RUNNING

# The labels of each job's merged config, written with the layers that make them.
JOB_LABELS = sa.Table(
    "job_labels",
    METADATA,
    sa.Column("job", NAME, primary_key=True),
    sa.Column("key", NAME, primary_key=True),
    sa.Column("value", NAME, nullable=False),
    sa.Index("job_labels_by_value", "key", "value", "job"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs are asked for; everything given must hold."""

    labels: Mapping[str, str] = field(default_factory=dict)
    state: str | None = None  # as `JobView.state`
    pipeline: str | None = None
    removed: bool = False  # removed jobs too
    after: str = ""  # names behind this one


def put_labels(connection: sa.Connection, job: str, labels: Mapping[str, str]) -> None:
    """Replace what a job can be found by."""
    connection.execute(sa.delete(JOB_LABELS).where(JOB_LABELS.c.job == job))
    if labels:
        rows = [{"job": job, "key": key, "value": value} for key, value in labels.items()]
        connection.execute(sa.insert(JOB_LABELS), rows)


def list_names(connection: sa.Connection, wanted: JobFilter, *, limit: int) -> tuple[str, ...]:
    """The first `limit` names that fit, in order.

    Whether a merge is valid is not known here: asked for `invalid`, every job that may be is named.
    """
    source: sa.FromClause = JOBS.outerjoin(
        RUNNING,
        sa.and_(RUNNING.c.job == JOBS.c.name, RUNNING.c.birth == JOBS.c.birth, RUNNING.c.state != "removed"),
    )
    name: sa.ColumnElement[str] = JOBS.c.name
    conditions = []
    for number, (key, value) in enumerate(sorted(wanted.labels.items())):
        label = JOB_LABELS.alias(f"label{number}")
        source = source.join(label, label.c.job == JOBS.c.name)
        conditions += [label.c.key == key, label.c.value == value]
        if number == 0:
            # The index of labels is in this order: nothing to sort, and no more rows read than asked for.
            name = label.c.job
    conditions.append(name > wanted.after)
    if wanted.pipeline is not None:
        conditions.append(JOBS.c.pipeline == wanted.pipeline)
    if wanted.state is not None:
        conditions += _is_in(wanted.state)
    elif not wanted.removed:
        conditions.append(~JOBS.c.deleted)
    query = sa.select(name).select_from(source).where(*conditions).order_by(name).limit(limit)
    return tuple(connection.execute(query).scalars())


def _is_in(state: str) -> list[sa.ColumnElement[bool]]:
    """The same cases as `JobView.state`, in the same order."""
    if state == "removed":
        return [JOBS.c.deleted]
    quarantined = JOBS.c.name.in_(sa.select(QUARANTINE.c.job))
    alive = [~JOBS.c.deleted]
    if state == "invalid":
        return [*alive, ~quarantined]
    if state == "quarantined":
        return [*alive, quarantined]
    changing = JOBS.c.name.in_(sa.select(PLANS.c.job))
    if state == "changing":
        return [*alive, ~quarantined, changing]
    settled = [*alive, ~quarantined, ~changing]
    runs = RUNNING.c.job.is_not(None)
    current = RUNNING.c.expected_version == JOBS.c.expected_version
    if state == "behind":
        return [*settled, runs, ~current]
    if state == "new":
        return [*settled, ~runs, JOBS.c.desired == "running"]
    # What runs as expected is in the state that is desired, which has an index.
    here = sa.and_(runs, current, RUNNING.c.state == state)
    return [*settled, JOBS.c.desired == state, here if state == "running" else sa.or_(here, ~runs)]
