"""Models may have schedules of their minimum of instances."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    # The default is for gateways of the earlier schema, which go on beside this one while it is replaced.
    op.add_column("models", sa.Column("schedule", sa.Text(), nullable=False, server_default="[]"))
