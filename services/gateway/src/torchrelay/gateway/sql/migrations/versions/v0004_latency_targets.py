"""Models may have targets for the time to their first token, by class, and for the time between tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    # The defaults are for gateways of the earlier schema, which go on beside this one while it is replaced.
    for name in ("interactive_ttft_s", "standard_ttft_s", "batch_ttft_s", "tbt_target_s"):
        op.add_column("models", sa.Column(name, sa.Float(), nullable=False, server_default="0"))
