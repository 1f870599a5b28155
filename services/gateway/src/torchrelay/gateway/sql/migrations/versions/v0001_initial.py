"""Initial schema: identity, catalog, money."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    _identity()
    _catalog()
    _requests()
    _ledger()
    op.execute("INSERT INTO table_versions (name, version) VALUES ('keys', 1), ('catalog', 1)")
    # Nano-dollars per token: 0.10, 0.025 and 0.40 dollars per million. PUT /v1/prices sets another default.
    op.execute(
        "INSERT INTO prices (price_id, model, prompt_nano, cached_nano, output_nano, valid_from_unix_us)"
        " VALUES ('price-default', '', 100, 25, 400, 0)"
    )


def _identity() -> None:
    op.create_table("secrets", _text("name"), _text("value"), _key("secrets", "name"))
    op.create_table("table_versions", _text("name"), _big("version"), _key("table_versions", "name"))
    op.create_table("gateways", _text("gateway_id"), _big("beat"), _key("gateways", "gateway_id"))
    op.create_table(
        "tenants",
        _text("tenant_id"),
        _text("name"),
        _big("storage_quota_bytes", nullable=True),
        _big("budget_nano", nullable=True),
        _big("created_unix_us"),
        _key("tenants", "tenant_id"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
    )
    op.create_table(
        "api_keys",
        _text("key_id"),
        _text("tenant_id"),
        _text("name"),
        _text("mac"),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        _big("created_unix_us"),
        _big("revoked_unix_us", nullable=True),
        _tenant("api_keys"),
        _key("api_keys", "key_id"),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])


def _catalog() -> None:
    op.create_table(
        "versions",
        _text("version_id"),
        sa.Column("description", sa.Text(), nullable=False),
        _big("stored_bytes"),
        _big("created_unix_us"),
        _key("versions", "version_id"),
    )
    op.create_table(
        "models",
        _text("tenant_id"),
        _text("name"),
        _text("version_id"),
        sa.Column("idle_timeout_s", sa.Float(), nullable=False),
        sa.Column("max_instances", sa.Integer(), nullable=False),
        _big("created_unix_us"),
        _big("updated_unix_us"),
        _tenant("models"),
        sa.ForeignKeyConstraint(["version_id"], ["versions.version_id"], name="fk_models_version_id"),
        _key("models", "tenant_id", "name"),
    )
    op.create_index("ix_models_version_id", "models", ["version_id"])
    op.create_table(
        "retired_versions",
        _text("version_id"),
        _text("tenant_id"),
        _big("retired_unix_us"),
        _tenant("retired_versions"),
        sa.ForeignKeyConstraint(["version_id"], ["versions.version_id"], name="fk_retired_versions_version_id"),
        _key("retired_versions", "version_id"),
    )
    op.create_index("ix_retired_versions_tenant_id", "retired_versions", ["tenant_id"])
    op.create_table(
        "uploads",
        _text("upload_id"),
        _text("tenant_id"),
        _text("model"),
        _big("declared_bytes"),
        _big("created_unix_us"),
        _tenant("uploads"),
        _key("uploads", "upload_id"),
    )
    op.create_index("ix_uploads_tenant_id", "uploads", ["tenant_id"])


def _requests() -> None:
    op.create_table(
        "prices",
        _text("price_id"),
        _text("model"),
        _big("prompt_nano"),
        _big("cached_nano"),
        _big("output_nano"),
        _big("valid_from_unix_us"),
        _key("prices", "price_id"),
        sa.UniqueConstraint("model", "valid_from_unix_us", name="uq_prices_model_valid_from_unix_us"),
    )
    op.create_table(
        "opened",
        _text("request_id"),
        _text("tenant_id"),
        _text("key_id"),
        _text("model"),
        _text("version_id"),
        _text("price_id"),
        _big("num_prompt_tokens"),
        _big("max_tokens"),
        sa.Column("num_choices", sa.Integer(), nullable=False),
        _text("gateway_id"),
        _big("opened_unix_us"),
        _big("settled_unix_us", nullable=True),
        _tenant("opened"),
        sa.ForeignKeyConstraint(["price_id"], ["prices.price_id"], name="fk_opened_price_id"),
        _key("opened", "request_id"),
    )
    unsettled = sa.text("settled_unix_us IS NULL")
    op.create_index("ix_opened_unsettled", "opened", ["gateway_id"], sqlite_where=unsettled, postgresql_where=unsettled)


def _ledger() -> None:
    op.create_table(
        "balances", _text("tenant_id"), _big("spent_nano"), _tenant("balances"), _key("balances", "tenant_id")
    )
    op.create_table(
        "ledger",
        _text("request_id"),
        sa.Column("choice", sa.Integer(), nullable=False),
        sa.Column("supplement", sa.Integer(), nullable=False),
        _text("tenant_id"),
        _text("key_id"),
        _text("model"),
        _text("version_id"),
        _text("price_id"),
        _big("num_prompt_tokens"),
        _big("num_cached_prompt_tokens"),
        _big("num_output_tokens"),
        _big("cost_nano"),
        _text("cause"),
        _big("settled_unix_us"),
        sa.ForeignKeyConstraint(["request_id"], ["opened.request_id"], name="fk_ledger_request_id"),
        _tenant("ledger"),
        sa.ForeignKeyConstraint(["price_id"], ["prices.price_id"], name="fk_ledger_price_id"),
        _key("ledger", "request_id", "choice", "supplement"),
    )
    op.create_index("ix_ledger_tenant_settled", "ledger", ["tenant_id", "settled_unix_us"])


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.String(), nullable=False)


def _big(name: str, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=nullable)


def _key(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*columns, name=f"pk_{table}")


def _tenant(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["tenant_id"], ["tenants.tenant_id"], name=f"fk_{table}_tenant_id")


def downgrade() -> None:
    """Raises: the first revision cannot be undone; drop the database instead."""
    raise RuntimeError("revision 0001 is the first: there is nothing to go back to")
