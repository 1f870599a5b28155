"""The files that models were published from, and those of uploads."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    for table in ("models", "uploads"):
        op.add_column(table, sa.Column("source", sa.String(), nullable=False, server_default=""))
