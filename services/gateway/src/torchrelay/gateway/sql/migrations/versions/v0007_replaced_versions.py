"""The replaced versions of a model are remembered, so that it can be rolled back to them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "replaced_versions",
        sa.Column("tenant_id", sa.String(), sa.ForeignKey("tenants.tenant_id"), primary_key=True),
        sa.Column("model", sa.String(), primary_key=True),
        sa.Column("version_id", sa.String(), primary_key=True),
        sa.Column("replaced_unix_us", sa.BigInteger(), nullable=False),
    )
