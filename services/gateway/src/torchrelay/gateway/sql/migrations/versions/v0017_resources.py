"""The resources of models: limits per instance, and labels of hosts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.add_column("models", sa.Column("max_concurrency", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("models", sa.Column("threads", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("models", sa.Column("kv_share", sa.Float(), nullable=False, server_default="1"))
    op.add_column("models", sa.Column("hosts", sa.Text(), nullable=False, server_default="[]"))
