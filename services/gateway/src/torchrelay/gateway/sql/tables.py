"""The tables. Times are Unix microseconds, money is integer nano-dollars. Accounting rows are never updated, except
``opened.settled_unix_us`` (set once), ``balances.spent_nano`` (the sum of the tenant's ledger rows and
adjustments) and the sums of ``usage_hours``.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
    true,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

secrets = Table("secrets", metadata, Column("name", String, primary_key=True), Column("value", String, nullable=False))

# Cached rows of a table are valid as long as its version is the one they were read at.
table_versions = Table(
    "table_versions",
    metadata,
    Column("name", String, primary_key=True),
    Column("version", BigInteger, nullable=False),
)

tenants = Table(
    "tenants",
    metadata,
    Column("tenant_id", String, primary_key=True),
    Column("name", String, nullable=False, unique=True),
    Column("storage_quota_bytes", BigInteger),
    Column("budget_nano", BigInteger),
    Column("service_class", String),
    Column("created_unix_us", BigInteger, nullable=False),
    Column("requests_per_minute", Integer),
    Column("tokens_per_minute", BigInteger),
    Column("concurrent_requests", Integer),
    Column("budget_period", String),  # null: the budget is for ever
    Column("suspended_unix_us", BigInteger),
    Column("deleted_unix_us", BigInteger),
)

# People who run the platform, each with a key.
operators = Table(
    "operators",
    metadata,
    Column("operator_id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("role", String, nullable=False),
    Column("mac", String, nullable=False),
    Column("created_unix_us", BigInteger, nullable=False),
    Column("revoked_unix_us", BigInteger),
)

audit = Table(
    "audit",
    metadata,
    Column("audit_id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("at_unix_us", BigInteger, nullable=False),
    Column("actor", String, nullable=False),
    Column("action", String, nullable=False),
    Column("target", String, nullable=False),
    Column("tenant_id", String),  # null: of operators alone
    Column("before", Text),  # JSON
    Column("after", Text),
    Index("ix_audit_tenant_id_audit_id", "tenant_id", "audit_id"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", String, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False, index=True),
    Column("name", String, nullable=False),
    Column("mac", String, nullable=False),
    Column("requests_per_minute", Integer),
    Column("service_class", String),  # null: its tenant's
    Column("created_unix_us", BigInteger, nullable=False),
    Column("revoked_unix_us", BigInteger),
    Column("tokens_per_minute", BigInteger),
    Column("concurrent_requests", Integer),
    Column("budget_nano", BigInteger),
    Column("budget_period", String),
    Column("models", Text),  # a JSON array; null: all of the tenant
    Column("may_manage_keys", Boolean, nullable=False, server_default=true()),
    Column("expires_unix_us", BigInteger),
    Column("paused_unix_us", BigInteger),
    Column("last_used_unix_us", BigInteger),  # written every half minute
    Column("previous_mac", String),  # of the token before the last rotation
    Column("previous_until_unix_us", BigInteger),
)

# Versions as described by the param-store; content-addressed, so tenants with equal uploads share a row.
versions = Table(
    "versions",
    metadata,
    Column("version_id", String, primary_key=True),
    Column("description", Text, nullable=False),
    Column("base_version_id", String, index=True),  # computed from the description (see the migration); null: no base
    Column("stored_bytes", BigInteger, nullable=False),
    Column("created_unix_us", BigInteger, nullable=False),
)

models = Table(
    "models",
    metadata,
    Column("tenant_id", ForeignKey("tenants.tenant_id"), primary_key=True),
    Column("name", String, primary_key=True),
    Column("version_id", ForeignKey("versions.version_id"), nullable=False),
    Column("idle_timeout_s", Float, nullable=False),
    Column("max_instances", Integer, nullable=False),
    Column("min_instances", Integer, nullable=False, server_default="0"),
    Column("schedule", Text, nullable=False, server_default="[]"),  # a JSON array of its entries
    Column("interactive_ttft_s", Float, nullable=False, server_default="0"),
    Column("standard_ttft_s", Float, nullable=False, server_default="0"),
    Column("batch_ttft_s", Float, nullable=False, server_default="0"),
    Column("tbt_target_s", Float, nullable=False, server_default="0"),
    Column("engine", String, nullable=False, server_default="auto"),
    Column("max_concurrency", Integer, nullable=False, server_default="0"),
    Column("threads", Integer, nullable=False, server_default="0"),
    Column("kv_share", Float, nullable=False, server_default="1"),
    Column("hosts", Text, nullable=False, server_default="[]"),  # a JSON array of labels
    Column("source", String, nullable=False, server_default=""),  # of its version (catalog/source.py); empty: not known
    Column("created_unix_us", BigInteger, nullable=False),
    Column("updated_unix_us", BigInteger, nullable=False),
    Index("ix_models_version_tenant", "version_id", "tenant_id"),
)

# Further names of models, which no model of the tenant has.
aliases = Table(
    "aliases",
    metadata,
    Column("tenant_id", ForeignKey("tenants.tenant_id"), primary_key=True),
    Column("alias", String, primary_key=True),
    Column("model", String, nullable=False),
)

# Versions no longer used by any model; their bytes are freed after a while, unless used again. Until then they count in
# the quota of the tenant who used them last.
retired_versions = Table(
    "retired_versions",
    metadata,
    Column("version_id", ForeignKey("versions.version_id"), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False, index=True),
    Column("retired_unix_us", BigInteger, nullable=False),
)

# The versions that a model had before. That such a version still has its bytes is shown by its row in ``versions``.
replaced_versions = Table(
    "replaced_versions",
    metadata,
    Column("tenant_id", ForeignKey("tenants.tenant_id"), primary_key=True),
    Column("model", String, primary_key=True),
    Column("version_id", String, primary_key=True),
    Column("replaced_unix_us", BigInteger, nullable=False),
)

# A price is valid until the next row of the same model and service starts.
prices = Table(
    "prices",
    metadata,
    Column("price_id", String, primary_key=True),
    Column("model", String, nullable=False),
    Column("prompt_nano", BigInteger, nullable=False),
    Column("cached_nano", BigInteger, nullable=False),
    Column("output_nano", BigInteger, nullable=False),
    Column("valid_from_unix_us", BigInteger, nullable=False),
    Column("service", String, nullable=False, server_default=""),  # batch: of lines of batches; empty: of all others
    UniqueConstraint("model", "service", "valid_from_unix_us"),
)

uploads = Table(
    "uploads",
    metadata,
    Column("upload_id", String, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False, index=True),
    Column("model", String, nullable=False),
    Column("declared_bytes", BigInteger, nullable=False),
    Column("source", String, nullable=False, server_default=""),
    Column("created_unix_us", BigInteger, nullable=False),
)

opened = Table(
    "opened",
    metadata,
    Column("request_id", String, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("key_id", String, nullable=False),
    Column("model", String, nullable=False),
    Column("version_id", String, nullable=False),
    Column("price_id", ForeignKey("prices.price_id"), nullable=False),
    Column("num_prompt_tokens", BigInteger, nullable=False),
    Column("max_tokens", BigInteger, nullable=False),
    Column("num_choices", Integer, nullable=False),
    Column("gateway_id", String, nullable=False),
    Column("opened_unix_us", BigInteger, nullable=False),
    Column("batch_id", String, nullable=False, server_default=""),  # of a batch's line
    Column("settled_unix_us", BigInteger),
)
# Partial on PostgreSQL too (see the migration); declaring it here would load that dialect, 3 MB, even with SQLite.
Index("ix_opened_unsettled", opened.c.gateway_id, sqlite_where=text("settled_unix_us IS NULL"))

# One row per choice, and its supplement (billing/ledger_rows.py). Only the first choice carries the prompt tokens, so
# that sums are right.
ledger = Table(
    "ledger",
    metadata,
    Column("request_id", ForeignKey("opened.request_id"), primary_key=True),
    Column("choice", Integer, primary_key=True),
    Column("supplement", Integer, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("key_id", String, nullable=False),
    Column("model", String, nullable=False),
    Column("version_id", String, nullable=False),
    Column("price_id", ForeignKey("prices.price_id"), nullable=False),
    Column("num_prompt_tokens", BigInteger, nullable=False),
    Column("num_cached_prompt_tokens", BigInteger, nullable=False),
    Column("num_output_tokens", BigInteger, nullable=False),
    Column("cost_nano", BigInteger, nullable=False),
    Column("cause", String, nullable=False),
    Column("settled_unix_us", BigInteger, nullable=False),
    # From 1, in the order of commits and without gaps; null: of a gateway of the release before, and not yet counted.
    Column("ledger_id", BigInteger, index=True, unique=True),
    Index("ix_ledger_tenant_settled", "tenant_id", "settled_unix_us"),
    Index("ix_ledger_tenant_number", "tenant_id", "ledger_id"),
)

# The last of the numbers that were given, without gaps, to the rows of a table.
counters = Table(
    "counters", metadata, Column("name", String, primary_key=True), Column("last", BigInteger, nullable=False)
)

# Sums of ledger rows (billing/usage_hours.py) by the hour (UTC) of their settlement.
usage_hours = Table(
    "usage_hours",
    metadata,
    Column("tenant_id", ForeignKey("tenants.tenant_id"), primary_key=True),
    Column("hour_unix_us", BigInteger, primary_key=True),
    Column("key_id", String, primary_key=True),
    Column("model", String, primary_key=True),
    Column("price_id", ForeignKey("prices.price_id"), primary_key=True),
    Column("num_requests", BigInteger, nullable=False),
    Column("num_prompt_tokens", BigInteger, nullable=False),
    Column("num_cached_prompt_tokens", BigInteger, nullable=False),
    Column("num_output_tokens", BigInteger, nullable=False),
    Column("cost_nano", BigInteger, nullable=False),
    Index("ix_usage_hours_key", "tenant_id", "key_id", "hour_unix_us"),
    sqlite_with_rowid=False,
)

balances = Table(
    "balances",
    metadata,
    Column("tenant_id", ForeignKey("tenants.tenant_id"), primary_key=True),
    Column("spent_nano", BigInteger, nullable=False),
)

# Charges beside usage, and credits (negative), which are part of the balance.
adjustments = Table(
    "adjustments",
    metadata,
    Column("adjustment_id", String, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("period", String, nullable=False),  # 2026-11
    Column("amount_nano", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("created_unix_us", BigInteger, nullable=False),
    Index("ix_adjustments_tenant_period", "tenant_id", "period"),
)

# Closed months.
invoices = Table(
    "invoices",
    metadata,
    Column("tenant_id", ForeignKey("tenants.tenant_id"), primary_key=True),
    Column("period", String, primary_key=True),
    Column("number", BigInteger, nullable=False, index=True, unique=True),  # over all tenants, from 1, without gaps
    Column("total_nano", BigInteger, nullable=False),
    Column("closed_unix_us", BigInteger, nullable=False),
)

# Answers to requests with an idempotency key; the last three are null while the first such request runs.
idempotency = Table(
    "idempotency",
    metadata,
    Column("tenant_id", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("digest", String, nullable=False),  # of path and body
    Column("gateway_id", String, nullable=False),
    Column("begun_unix_us", BigInteger, nullable=False, index=True),
    Column("status", Integer),
    Column("headers", Text),  # JSON
    Column("body", LargeBinary),
    Column("num_bytes", Integer),  # of the body
)

# Addresses that get events (webhooks/).
webhooks = Table(
    "webhooks",
    metadata,
    Column("webhook_id", String, primary_key=True),
    Column("tenant_id", String),  # null: events of all tenants
    Column("url", Text, nullable=False),
    Column("secret", String, nullable=False),
    Column("types", Text, nullable=False),  # a JSON array
    Column("created_unix_us", BigInteger, nullable=False),
    Column("last_ledger_id", BigInteger, nullable=False),
    Column("last_event_id", BigInteger, nullable=False),
    Column("num_failures", Integer, nullable=False, server_default="0"),
    Column("next_unix_us", BigInteger, nullable=False, server_default="0"),
    Column("last_error", Text, nullable=False, server_default=""),
)

webhook_events = Table(
    "webhook_events",
    metadata,
    Column("event_id", BigInteger, primary_key=True, autoincrement=False),
    Column("type", String, nullable=False),
    Column("tenant_id", String, nullable=False),
    Column("at_unix_us", BigInteger, nullable=False),
    Column("data", Text, nullable=False),  # JSON
)

# Warnings that were given, so that each is given once.
budget_warnings = Table(
    "budget_warnings",
    metadata,
    Column("scope", String, primary_key=True),  # the id of a key or tenant
    Column("begin_unix_us", BigInteger, primary_key=True),  # of the budget's period
    Column("budget_nano", BigInteger, primary_key=True),
    Column("percent", Integer, primary_key=True),
)

# Live gateway processes: each increments its beat; one that stops is gone (billing/heartbeat.py).
gateways = Table(
    "gateways",
    metadata,
    Column("gateway_id", String, primary_key=True),
    Column("beat", BigInteger, nullable=False),
)

# Files of tenants, whose bytes the param-store has under the same name.
files = Table(
    "files",
    metadata,
    Column("file_id", String, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("filename", String, nullable=False),
    Column("purpose", String, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),  # while it is being sent: as declared
    Column("is_complete", Boolean, nullable=False),
    Column("created_unix_us", BigInteger, nullable=False),
    Index("ix_files_tenant_created", "tenant_id", "created_unix_us"),
)

batches = Table(
    "batches",
    metadata,
    Column("batch_id", String, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("key_id", String, nullable=False),
    Column("endpoint", String, nullable=False),
    Column("input_file_id", String, nullable=False),
    Column("metadata", Text, nullable=False),  # JSON, as are the errors
    Column("status", String, nullable=False),
    Column("errors", Text, nullable=False, server_default="[]"),
    Column("num_lines", Integer, nullable=False, server_default="0"),
    Column("num_completed", Integer, nullable=False, server_default="0"),  # once the batch has ended
    Column("num_failed", Integer, nullable=False, server_default="0"),
    Column("output_file_id", String),
    Column("error_file_id", String),
    Column("created_unix_us", BigInteger, nullable=False),
    Column("expires_unix_us", BigInteger, nullable=False),
    *(
        Column(f"{moment}_unix_us", BigInteger)
        for moment in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    ),
    Column("gateway_id", String, nullable=False, server_default=""),  # that runs it, as long as it is in ``gateways``
    Index("ix_batches_tenant_created", "tenant_id", "created_unix_us"),
)
Index("ix_batches_status", batches.c.status)

# Results of lines, until their batch has its files.
batch_results = Table(
    "batch_results",
    metadata,
    Column("batch_id", ForeignKey("batches.batch_id"), primary_key=True),
    Column("line", Integer, primary_key=True),
    Column("request_id", String, nullable=False),
    Column("status", Integer, nullable=False),
    Column("body", Text, nullable=False),
    Index("ix_batch_results_batch_status", "batch_id", "status"),  # counts them without their bodies
)
