"""Keys and tenants may have a service class, of their requests that name none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    for table in ("tenants", "api_keys"):
        op.add_column(table, sa.Column("service_class", sa.String()))
