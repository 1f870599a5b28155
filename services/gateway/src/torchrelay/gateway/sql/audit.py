"""The audit log: a row for each change of what operators and tenants manage, in the transaction of the change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

from sqlalchemy import insert

from torchrelay.common.clock import now_unix_us
from torchrelay.gateway.sql.database import SqlConnection
from torchrelay.gateway.sql.tables import audit

ACTOR: Final[ContextVar[str]] = ContextVar("actor", default="platform")  # of the request that this task handles


async def record(
    connection: SqlConnection,
    action: str,
    target: str,
    tenant_id: str | None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Notes a change of ``target`` (``action``: "key.change"), with the fields that differ.

    ``tenant_id``: the tenant that may read it; None: operators alone. ``before`` and ``after``: None where the target
    did not exist.
    """
    if before is not None and after is not None:
        changed = {name for name in after if name not in before or before[name] != after[name]}
        before, after = ({name: each[name] for name in sorted(changed & each.keys())} for each in (before, after))
    await connection.execute(
        insert(audit).values(
            at_unix_us=now_unix_us(),
            actor=ACTOR.get(),
            action=action,
            target=target,
            tenant_id=tenant_id,
            before=None if before is None else json.dumps(before),
            after=None if after is None else json.dumps(after),
        )
    )
