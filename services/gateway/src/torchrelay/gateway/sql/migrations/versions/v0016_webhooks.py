"""Webhooks, the events that wait for them, and the warnings of budgets that were given."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("webhook_id", sa.String(), primary_key=True),
        sa.Column("tenant_id", sa.String()),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.String(), nullable=False),
        sa.Column("types", sa.Text(), nullable=False),
        sa.Column("created_unix_us", sa.BigInteger(), nullable=False),
        sa.Column("last_ledger_id", sa.BigInteger(), nullable=False),
        sa.Column("last_event_id", sa.BigInteger(), nullable=False),
        sa.Column("num_failures", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("next_unix_us", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("last_error", sa.Text(), nullable=False, server_default=""),
    )
    op.create_table(
        "webhook_events",
        sa.Column("event_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("at_unix_us", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
    )
    op.execute("INSERT INTO counters (name, last) VALUES ('webhook_events', 0)")
    op.create_table(
        "budget_warnings",
        sa.Column("scope", sa.String(), primary_key=True),
        sa.Column("begin_unix_us", sa.BigInteger(), primary_key=True),
        sa.Column("budget_nano", sa.BigInteger(), primary_key=True),
        sa.Column("percent", sa.Integer(), primary_key=True),
    )
