"""Models may have aliases: further names in their tenant."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "aliases",
        sa.Column("tenant_id", sa.String(), sa.ForeignKey("tenants.tenant_id"), primary_key=True),
        sa.Column("alias", sa.String(), primary_key=True),
        sa.Column("model", sa.String(), nullable=False),
    )
