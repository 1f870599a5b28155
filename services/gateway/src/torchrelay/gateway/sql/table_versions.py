"""Validates caches of SQL tables: each is trusted for half a second after SQL confirmed its table's version.

Every change that must take effect at once (a revoked key, a published model, a new price) bumps its table's version in
the same transaction. After ``confirm_s`` without confirmation a gateway queries all versions before it trusts its
caches again. A revocation thus takes effect everywhere within ``confirm_s`` plus one query, whether or not the NATS
hint arrives. Without SQL nothing is confirmed and requests fail with 503.

Redis does not cache keys: a miss costs one primary-key read either way, and a second cache would need revocation too.
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
    """Invalidates every gateway's cache of the table once the transaction commits."""
    row = table_versions.c
    await connection.execute(update(table_versions).where(row.name == name).values(version=row.version + 1))


class TableVersions:
    """The last confirmed versions, and when they were queried."""

    def __init__(self, database: Database, confirm_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._confirm_s = confirm_s
        self._clock = clock
        self._versions: dict[str, int] = {}
        self._queried_at = float("-inf")
        self._num_invalidations = 0
        self._querying: asyncio.Future[None] | None = None

    def invalidate(self) -> None:
        """Forces a query before the next use, after an own commit or a hint."""
        self._queried_at = float("-inf")
        self._num_invalidations += 1

    async def confirmed(self, name: TableName) -> int:
        """The table's version, at most ``confirm_s`` old.

        Raises ``Unavailable`` without SQL, for all waiting callers at once when SQL is silent for ``ANSWER_LIMIT_S``.
        """
        if not self._is_fresh():
            await self._database.answer(self._refresh())
        return self._versions[name]

    async def _refresh(self) -> None:
        """Queries the versions. Callers that come while a query runs wait for it, and share the next one if needed."""
        if (running := self._querying) is not None:
            await asyncio.shield(running)
        if not self._is_fresh():
            if self._querying is None:
                self._querying = self._database.own(asyncio.ensure_future(self._query()))
                self._querying.add_done_callback(self._queried)
            await asyncio.shield(self._querying)

    def _queried(self, _: asyncio.Future[None]) -> None:
        self._querying = None

    def _is_fresh(self) -> bool:
        return self._clock() - self._queried_at < self._confirm_s

    async def _query(self) -> None:
        queried_at, num_invalidations = self._clock(), self._num_invalidations
        async with self._database.read() as connection:
            rows = await connection.execute(select(table_versions.c.name, table_versions.c.version))
            self._versions = {row.name: row.version for row in rows}
        # Invalidated during the query: its result may be outdated, so the next use queries again.
        if num_invalidations == self._num_invalidations:
            self._queried_at = queried_at
