"""Batches: their files, lines and results, the mark of their requests, and prices of their own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("opened", _text("batch_id", ""))
    with op.batch_alter_table("prices") as prices:  # SQLite changes a constraint by a copy of the table
        prices.add_column(_text("service", ""))
        prices.drop_constraint("uq_prices_model_valid_from_unix_us", type_="unique")
        columns = ["model", "service", "valid_from_unix_us"]
        prices.create_unique_constraint("uq_prices_model_service_valid_from_unix_us", columns)
    op.create_table(
        "files",
        _text("file_id"),
        _text("tenant_id"),
        _text("filename"),
        _text("purpose"),
        _big("num_bytes"),
        sa.Column("is_complete", sa.Boolean(), nullable=False),
        _big("created_unix_us"),
        sa.PrimaryKeyConstraint("file_id", name="pk_files"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.tenant_id"], name="fk_files_tenant_id"),
    )
    op.create_index("ix_files_tenant_created", "files", ["tenant_id", "created_unix_us"])
    moments = "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
    op.create_table(
        "batches",
        *(_text(name) for name in ("batch_id", "tenant_id", "key_id", "endpoint", "input_file_id")),
        sa.Column("metadata", sa.Text(), nullable=False),
        _text("status"),
        sa.Column("errors", sa.Text(), nullable=False, server_default="[]"),
        *(_number(name, "0") for name in ("num_lines", "num_completed", "num_failed")),
        sa.Column("output_file_id", sa.String()),
        sa.Column("error_file_id", sa.String()),
        _big("created_unix_us"),
        _big("expires_unix_us"),
        *(sa.Column(f"{moment}_unix_us", sa.BigInteger()) for moment in moments),
        _text("gateway_id", ""),
        sa.PrimaryKeyConstraint("batch_id", name="pk_batches"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.tenant_id"], name="fk_batches_tenant_id"),
    )
    op.create_index("ix_batches_tenant_created", "batches", ["tenant_id", "created_unix_us"])
    op.create_index("ix_batches_status", "batches", ["status"])
    op.create_table(
        "batch_results",
        _text("batch_id"),
        _number("line"),
        _text("request_id"),
        _number("status"),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("batch_id", "line", name="pk_batch_results"),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.batch_id"], name="fk_batch_results_batch_id"),
    )
    op.create_index("ix_batch_results_batch_status", "batch_results", ["batch_id", "status"])


def _text(name: str, default: str | None = None) -> sa.Column[str]:
    return sa.Column(name, sa.String(), nullable=False, server_default=default)


def _number(name: str, default: str | None = None) -> sa.Column[int]:
    return sa.Column(name, sa.Integer(), nullable=False, server_default=default)


def _big(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False)
