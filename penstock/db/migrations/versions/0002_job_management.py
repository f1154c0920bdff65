"""Job management in depth: roles have leases, layers have kinds, jobs can be found by label and state."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from penstock.db.database import NAME

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add what the first version did not have."""
    op.add_column("terms", sa.Column("expires_ms", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("tokens", sa.Column("issued_ms", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("tokens", sa.Column("issued_by", sa.String, nullable=False, server_default=""))
    op.add_column("tokens", sa.Column("revoked_ms", sa.BigInteger, nullable=False, server_default="0"))
    op.create_table(
        "installation",
        sa.Column("name", sa.String, nullable=False),
        sa.Column("value", sa.String, nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    _layer_kinds()
    _expected()
    _fill_expected()


def _layer_kinds() -> None:
    kinds = op.create_table(
        "layer_kinds",
        sa.Column("name", NAME, nullable=False),
        sa.Column("precedence", sa.Integer, nullable=False),
        sa.Column("writers", sa.JSON, nullable=False),
        sa.Column("replaces_plan", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_index("layer_kinds_by_precedence", "layer_kinds", ["precedence"], unique=True)
    seed = (
        ("base", 0, ["admin"], False),
        ("provisioner", 10, ["admin", "developer"], False),
        ("scaler", 20, ["admin", "scaler"], False),
        ("oncall", 30, ["admin", "oncall"], True),
    )
    columns = ("name", "precedence", "writers", "replaces_plan")
    op.bulk_insert(kinds, [dict(zip(columns, row, strict=True)) for row in seed])


def _expected() -> None:
    op.drop_index("ix_audit_subject", table_name="audit")
    op.create_index("audit_by_subject", "audit", ["subject", "id"], unique=False)
    op.add_column("layers", sa.Column("origins", sa.JSON, nullable=False, server_default="[]"))
    op.add_column("layer_history", sa.Column("birth", sa.String, nullable=False, server_default=""))
    op.drop_index("ix_layer_history_job", table_name="layer_history")
    op.create_index("layer_history_by_version", "layer_history", ["job", "version"], unique=False)
    op.add_column("jobs", sa.Column("desired", sa.String, nullable=False, server_default="running"))
    op.add_column("jobs", sa.Column("changed", sa.BigInteger, nullable=False, server_default="0"))
    op.create_index(op.f("ix_jobs_changed"), "jobs", ["changed"], unique=False)
    op.create_index("jobs_by_desired", "jobs", ["desired", "name"], unique=False)
    op.create_table(
        "job_labels",
        sa.Column("job", NAME, nullable=False),
        sa.Column("key", NAME, nullable=False),
        sa.Column("value", NAME, nullable=False),
        sa.PrimaryKeyConstraint("job", "key"),
    )
    op.create_index("job_labels_by_value", "job_labels", ["key", "value", "job"], unique=False)


def _fill_expected() -> None:
    """What is kept beside the layers from now on, taken from the layers that are there."""
    connection = op.get_bind()
    connection.execute(
        sa.text(
            "UPDATE layer_history SET birth = COALESCE((SELECT birth FROM jobs WHERE jobs.name = job), '')"
        )
    )
    # Whoever follows the changes from the beginning finds every job that is there.
    connection.execute(sa.text("UPDATE jobs SET changed = 1"))
    connection.execute(
        sa.text("INSERT INTO counters (name, value) SELECT 'expected', 1 WHERE EXISTS (SELECT 1 FROM jobs)")
    )
    layers = sa.table("layers", sa.column("job"), sa.column("precedence"), sa.column("body", sa.JSON))
    desired: dict[str, str] = {}
    labels: dict[str, dict[str, str]] = {}
    rows = connection.execute(sa.select(layers).order_by(layers.c.precedence))
    for job, _, body in rows:
        desired[job] = body.get("state") or desired.get(job, "running")
        labels.setdefault(job, {}).update(body.get("labels") or {})
    jobs = sa.table("jobs", sa.column("name"), sa.column("desired"))
    for job, state in desired.items():
        if state != "running":
            connection.execute(sa.update(jobs).where(jobs.c.name == job).values(desired=state))
    table = sa.table("job_labels", sa.column("job"), sa.column("key"), sa.column("value"))
    found = [
        {"job": job, "key": key, "value": value} for job, own in labels.items() for key, value in own.items()
    ]
    if found:
        connection.execute(sa.insert(table), found)
