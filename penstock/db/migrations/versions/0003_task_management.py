"""Task management in depth: containers say how large they are and where."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add what the second version did not have."""
    op.add_column("containers", sa.Column("capacity", sa.Text, nullable=False, server_default="[]"))
    op.add_column("containers", sa.Column("draining", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("shards", sa.Column("blame", sa.Integer, nullable=False, server_default="0"))
    op.add_column("containers", sa.Column("region", sa.String, nullable=False, server_default=""))
