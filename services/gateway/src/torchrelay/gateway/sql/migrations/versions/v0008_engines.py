"""Models may name the engine of their instances."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("models", sa.Column("engine", sa.String(), nullable=False, server_default="auto"))
