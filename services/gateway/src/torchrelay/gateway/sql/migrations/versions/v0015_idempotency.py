"""The answers to requests with an idempotency key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.create_table(
        "idempotency",
        sa.Column("tenant_id", sa.String(), primary_key=True),
        sa.Column("name", sa.String(), primary_key=True),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("gateway_id", sa.String(), nullable=False),
        sa.Column("begun_unix_us", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Integer()),
        sa.Column("headers", sa.Text()),
        sa.Column("body", sa.LargeBinary()),
        sa.Column("num_bytes", sa.Integer()),
    )
    op.create_index("ix_idempotency_begun_unix_us", "idempotency", ["begun_unix_us"])
