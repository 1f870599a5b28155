"""Limits of keys and tenants, and what else a key may and may not do."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    for column in (
        sa.Column("tokens_per_minute", sa.BigInteger()),
        sa.Column("concurrent_requests", sa.Integer()),
        sa.Column("budget_nano", sa.BigInteger()),
        sa.Column("budget_period", sa.String()),
        sa.Column("models", sa.Text()),
        sa.Column("may_manage_keys", sa.Boolean(), nullable=False, server_default=sa.true()),
        sa.Column("expires_unix_us", sa.BigInteger()),
        sa.Column("paused_unix_us", sa.BigInteger()),
        sa.Column("last_used_unix_us", sa.BigInteger()),
        sa.Column("previous_mac", sa.String()),
        sa.Column("previous_until_unix_us", sa.BigInteger()),
    ):
        op.add_column("api_keys", column)
    for column in (
        sa.Column("requests_per_minute", sa.Integer()),
        sa.Column("tokens_per_minute", sa.BigInteger()),
        sa.Column("concurrent_requests", sa.Integer()),
        sa.Column("budget_period", sa.String()),
    ):
        op.add_column("tenants", column)
