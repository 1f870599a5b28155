"""Operators by name, the audit log, and tenants that are suspended or deleted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "operators",
        sa.Column("operator_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("mac", sa.String(), nullable=False),
        sa.Column("created_unix_us", sa.BigInteger(), nullable=False),
        sa.Column("revoked_unix_us", sa.BigInteger()),
        sa.PrimaryKeyConstraint("operator_id", name="pk_operators"),
    )
    op.create_table(
        "audit",
        sa.Column("audit_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at_unix_us", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("target", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String()),
        sa.Column("before", sa.Text()),
        sa.Column("after", sa.Text()),
        sa.PrimaryKeyConstraint("audit_id", name="pk_audit"),
    )
    op.create_index("ix_audit_tenant_id_audit_id", "audit", ["tenant_id", "audit_id"])
    op.add_column("tenants", sa.Column("suspended_unix_us", sa.BigInteger()))
    op.add_column("tenants", sa.Column("deleted_unix_us", sa.BigInteger()))
