"""Models may have a minimum of instances."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    # The default is for gateways of the earlier schema, which go on beside this one while it is replaced.
    op.add_column("models", sa.Column("min_instances", sa.Integer(), nullable=False, server_default="0"))
