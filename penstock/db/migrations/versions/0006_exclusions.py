"""Containers that jobs, or single tasks, are kept away from for a while."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

NAME = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the table of exclusions."""
    op.create_table(
        "exclusions",
        sa.Column("subject", NAME, nullable=False),
        sa.Column("container", NAME, nullable=False),
        sa.Column("birth", sa.String, nullable=False),
        sa.Column("until_ms", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("subject", "container"),
    )
