"""Minutes of metrics: those that gather, and those that are sealed, by job, metric and day."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from penstock.db.database import NAME

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the tables of the metrics store."""
    op.create_table(
        "metric_names",
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("kind", "name"),
    )
    op.create_table(
        "metric_minutes",
        sa.Column("minute", sa.Integer, nullable=False),
        sa.Column("chunk", sa.Integer, nullable=False),
        sa.Column("points", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("minute", "chunk"),
    )
    op.create_table(
        "metric_blocks",
        sa.Column("job", sa.Integer, nullable=False),
        sa.Column("metric", sa.Integer, nullable=False),
        sa.Column("day", sa.Integer, nullable=False),
        sa.Column("points", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("job", "metric", "day"),
    )
