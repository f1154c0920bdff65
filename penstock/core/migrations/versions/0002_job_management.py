"""Job management in depth: roles have leases."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add what the first version did not have."""
    op.add_column("terms", sa.Column("expires_ms", sa.BigInteger, nullable=False, server_default="0"))
