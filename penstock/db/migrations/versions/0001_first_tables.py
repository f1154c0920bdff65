"""The tables of the first version. Databases from before there were steps have exactly these."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from penstock.db.database import NAME, ROW_ID

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make them."""
    _accounts()
    _expected()
    _running()
    _fleet()


def _accounts() -> None:
    op.create_table(
        "audit",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_audit_subject"), "audit", ["subject"], unique=False)
    op.create_table(
        "counters",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("request", sa.String(), nullable=False),
        sa.Column("answer", sa.JSON(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("actor", "key"),
    )
    op.create_index(op.f("ix_idempotency_keys_at_ms"), "idempotency_keys", ["at_ms"], unique=False)
    op.create_table(
        "journal",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("decision", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("data", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("journal_by_subject", "journal", ["subject", "id"], unique=False)
    op.create_table(
        "terms",
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("role"),
    )
    op.create_table(
        "tokens",
        sa.Column("hash", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("hash"),
    )


def _expected() -> None:
    op.create_table(
        "jobs",
        sa.Column("name", NAME, nullable=False),
        sa.Column("birth", sa.String(), nullable=False),
        sa.Column("pipeline", sa.String(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("deleted", sa.Boolean(), nullable=False),
        sa.Column("expected_version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_index(op.f("ix_jobs_pipeline"), "jobs", ["pipeline"], unique=False)
    op.create_table(
        "layer_history",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("layer", sa.String(), nullable=False),
        sa.Column("precedence", sa.Integer(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_layer_history_job"), "layer_history", ["job"], unique=False)
    op.create_table(
        "layers",
        sa.Column("job", NAME, nullable=False),
        sa.Column("layer", sa.String(), nullable=False),
        sa.Column("precedence", sa.Integer(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", "layer"),
    )
    op.create_table(
        "pipelines",
        sa.Column("name", NAME, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("graph", sa.JSON(), nullable=False),
        sa.Column("package", sa.JSON(), nullable=False),
        sa.Column("submitted_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )


def _running() -> None:
    op.create_table(
        "plans",
        sa.Column("job", NAME, nullable=False),
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("birth", sa.String(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("target", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("mapping", sa.JSON(), nullable=False),
        sa.Column("expected_version", sa.BigInteger(), nullable=False),
        sa.Column("running_version", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.String(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("error", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("abandoned", sa.JSON(), nullable=False),
        sa.Column("held_ms", sa.BigInteger(), nullable=True),
        sa.Column("started_ms", sa.BigInteger(), nullable=False),
        sa.Column("updated_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job"),
    )
    op.create_table(
        "quarantine",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("expected_version", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("since_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job"),
    )
    op.create_table(
        "retirements",
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("birth", sa.String(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_retirements_job"), "retirements", ["job"], unique=False)
    op.create_table(
        "running",
        sa.Column("job", NAME, nullable=False),
        sa.Column("birth", sa.String(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("restart_version", sa.BigInteger(), nullable=False),
        sa.Column("expected_version", sa.BigInteger(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("mapping", sa.JSON(), nullable=False),
        sa.Column("hold_generation", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("updated_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job"),
    )
    op.create_index(op.f("ix_running_version"), "running", ["version"], unique=False)


def _fleet() -> None:
    op.create_table(
        "containers",
        sa.Column("name", NAME, nullable=False),
        sa.Column("incarnation", sa.String(), nullable=False),
        sa.Column("folder_id", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("renewals", sa.BigInteger(), nullable=False),
        sa.Column("registered_ms", sa.BigInteger(), nullable=False),
        sa.Column("seen_ms", sa.BigInteger(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("list_version", sa.BigInteger(), nullable=False),
        sa.Column("assignment_version", sa.BigInteger(), nullable=False),
        sa.Column("engine_ready", sa.Boolean(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("tasks", sa.Text(), nullable=False),
        sa.Column("known_dead", sa.Boolean(), nullable=False),
        sa.Column("cordoned", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "shards",
        sa.Column("shard", sa.Integer(), nullable=False),
        sa.Column("container", sa.String(), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("target", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("shard"),
    )
    op.create_index(op.f("ix_shards_container"), "shards", ["container"], unique=False)
