"""A version names its base in a column, for the adapters of a version to be looked up by an index.

The database computes it from the description, so that versions published by gateways of earlier releases have it, too.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    is_postgresql = op.get_bind().dialect.name == "postgresql"
    base = (
        "description::json ->> 'base_version_id'" if is_postgresql else "json_extract(description, '$.base_version_id')"
    )
    computed = sa.Computed(f"nullif({base}, '')", persisted=is_postgresql)  # SQLite adds no persisted column
    op.add_column("versions", sa.Column("base_version_id", sa.String(), computed))
    op.create_index("ix_versions_base_version_id", "versions", ["base_version_id"])
    op.create_index("ix_models_version_tenant", "models", ["version_id", "tenant_id"])
    op.drop_index("ix_models_version_id", "models")
