"""How far caches of SQL may be trusted: for half a second after SQL confirmed the version of their table.

Every change that must be seen at once (a revoked key, a published model, a new price) raises its table's version in
the same transaction. A gateway that has not confirmed the versions within ``confirm_s`` asks SQL, with one small query
for all tables, before it trusts its caches again; so a revocation holds everywhere within ``confirm_s`` and a query,
whether or not the hint on NATS arrives. When SQL is away, nothing is confirmed and requests are refused with 503.

Redis is no key cache here: a miss costs one primary-key read either way, and a second cache is a second thing to
revoke.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

from sqlalchemy import select, update

from torchrelay.gateway.sql.database import Database, SqlConnection
from torchrelay.gateway.sql.tables import table_versions

TableName = Literal["keys", "catalog"]


async def bump_version(connection: SqlConnection, name: TableName) -> None:
    """Makes every gateway's cache of the table stale once the transaction commits."""
    row = table_versions.c
    await connection.execute(update(table_versions).where(row.name == name).values(version=row.version + 1))


class TableVersions:
    """The versions SQL confirmed last, and when it was asked."""

    def __init__(self, database: Database, confirm_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._confirm_s = confirm_s
        self._clock = clock
        self._versions: dict[str, int] = {}
        self._asked_at = float("-inf")
        self._num_invalidations = 0
        self._asking = asyncio.Lock()

    def invalidate(self) -> None:
        """Something changed (our own commit, or a hint): ask SQL before the next use."""
        self._asked_at = float("-inf")
        self._num_invalidations += 1

    async def confirmed(self, name: TableName) -> int:
        """The table's version, at most ``confirm_s`` old. Raises ``Unavailable`` when SQL is away."""
        if not self._is_fresh():
            async with self._asking:
                if not self._is_fresh():
                    await self._query()
        return self._versions[name]

    def _is_fresh(self) -> bool:
        return self._clock() - self._asked_at < self._confirm_s

    async def _query(self) -> None:
        asked_at, num_invalidations = self._clock(), self._num_invalidations
        async with self._database.read() as connection:
            rows = await connection.execute(select(table_versions.c.name, table_versions.c.version))
            self._versions = {row.name: row.version for row in rows}
        if (
            num_invalidations == self._num_invalidations
        ):  # else the answer may be older than the doubt: use it once only
            self._asked_at = asked_at
