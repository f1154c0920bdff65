"""What control policies remember of jobs; alarms, silences, and notices that are still to be sent."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

NAME = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    """Add what the third version did not have."""
    op.create_table(
        "policy_records",
        sa.Column("job", NAME, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("job"),
    )
    op.create_table(
        "alarms",
        sa.Column("name", NAME, nullable=False),
        sa.Column("job", NAME, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_index(op.f("ix_alarms_job"), "alarms", ["job"], unique=False)
    op.create_table(
        "silences",
        sa.Column("id", NAME, nullable=False),
        sa.Column("until_ms", sa.BigInteger, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "notices",
        sa.Column("id", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("route", NAME, nullable=False),
        sa.Column("next_ms", sa.BigInteger, nullable=False),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
