"""Containers that clusters lend each other."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

NAME = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the table of loans."""
    op.create_table(
        "loans",
        sa.Column("container", NAME, primary_key=True),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("peer", sa.String, nullable=False),
        sa.Column("home", sa.String, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("token", sa.String, nullable=False),
        sa.Column("token_id", sa.String, nullable=False),
        sa.Column("refused_by", sa.String, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
    )
