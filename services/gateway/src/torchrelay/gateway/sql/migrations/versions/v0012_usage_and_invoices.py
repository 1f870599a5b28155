"""Usage by hour, numbers of ledger rows, invoices and adjustments.

Sums and numbers are filled from the ledger. Rows that gateways of the release before write later have no number until a
gateway of this release counts them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("ledger", sa.Column("ledger_id", sa.BigInteger()))  # first: it locks out other writers
    op.create_table(
        "usage_hours",
        sa.Column("tenant_id", sa.String(), sa.ForeignKey("tenants.tenant_id"), primary_key=True),
        sa.Column("hour_unix_us", sa.BigInteger(), primary_key=True),
        sa.Column("key_id", sa.String(), primary_key=True),
        sa.Column("model", sa.String(), primary_key=True),
        sa.Column("price_id", sa.String(), sa.ForeignKey("prices.price_id"), primary_key=True),
        sa.Column("num_requests", sa.BigInteger(), nullable=False),
        sa.Column("num_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_cached_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_nano", sa.BigInteger(), nullable=False),
        sqlite_with_rowid=False,
    )
    op.execute(
        "INSERT INTO usage_hours SELECT tenant_id, settled_unix_us - settled_unix_us % 3600000000, key_id, model,"
        " price_id, sum(CASE WHEN choice = 0 AND supplement = 0 THEN 1 ELSE 0 END), sum(num_prompt_tokens),"
        " sum(num_cached_prompt_tokens), sum(num_output_tokens), sum(cost_nano) FROM ledger GROUP BY 1, 2, 3, 4, 5"
    )
    op.create_index("ix_usage_hours_key", "usage_hours", ["tenant_id", "key_id", "hour_unix_us"])
    place = "ctid" if op.get_bind().dialect.name == "postgresql" else "rowid"
    op.execute(
        f"UPDATE ledger SET ledger_id = numbered.number FROM (SELECT {place} AS place, row_number() OVER"
        " (ORDER BY settled_unix_us, request_id, choice, supplement) AS number FROM ledger) AS numbered"
        f" WHERE ledger.{place} = numbered.place"
    )
    op.create_index("ix_ledger_ledger_id", "ledger", ["ledger_id"], unique=True)
    op.create_index("ix_ledger_tenant_number", "ledger", ["tenant_id", "ledger_id"])
    op.create_table(
        "counters", sa.Column("name", sa.String(), primary_key=True), sa.Column("last", sa.BigInteger(), nullable=False)
    )
    op.execute("INSERT INTO counters (name, last) SELECT 'ledger', count(*) FROM ledger")
    op.execute("INSERT INTO counters (name, last) VALUES ('invoices', 0)")
    op.create_table(
        "adjustments",
        sa.Column("adjustment_id", sa.String(), primary_key=True),
        sa.Column("tenant_id", sa.String(), sa.ForeignKey("tenants.tenant_id"), nullable=False),
        sa.Column("period", sa.String(), nullable=False),
        sa.Column("amount_nano", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_unix_us", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_adjustments_tenant_period", "adjustments", ["tenant_id", "period"])
    op.create_table(
        "invoices",
        sa.Column("tenant_id", sa.String(), sa.ForeignKey("tenants.tenant_id"), primary_key=True),
        sa.Column("period", sa.String(), primary_key=True),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("total_nano", sa.BigInteger(), nullable=False),
        sa.Column("closed_unix_us", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_invoices_number", "invoices", ["number"], unique=True)
