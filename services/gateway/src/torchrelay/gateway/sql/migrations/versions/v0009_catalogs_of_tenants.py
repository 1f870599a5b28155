"""Changes of tenants to the catalog are counted, and each tenant's last one is kept."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.execute("INSERT INTO table_versions (name, version) VALUES ('tenants_changes', 1)")
