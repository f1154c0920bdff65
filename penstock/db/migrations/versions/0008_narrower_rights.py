"""Layers that take only some fields; tokens that speak for one container."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add both columns. What is there is not limited yet: a token is when its container first uses it."""
    op.add_column("layer_kinds", sa.Column("fields", sa.JSON, nullable=False, server_default="[]"))
    op.add_column("tokens", sa.Column("container", sa.String, nullable=False, server_default=""))
