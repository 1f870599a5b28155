"""Validates caches of SQL tables: each is trusted for half a second after SQL confirmed its table's version.

Every change that must take effect at once (a revoked key, a published model, a new price) bumps its table's version in
the same transaction. After ``confirm_s`` without confirmation a gateway queries all versions before it trusts its
caches again. A revocation thus takes effect everywhere within ``confirm_s`` plus one query, whether or not the NATS
hint arrives. Without SQL nothing is confirmed and requests fail with 503.

A change of a tenant's models is one of the catalog, but leaves other tenants' caches valid: such changes are counted as
well, and each tenant has a row with the number of its last. What remains of the catalog's version counts the changes
that concern everybody: prices, and all those of gateways of earlier releases.

Redis does not cache keys: a miss costs one primary-key read either way, and a second cache would need revocation too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

from sqlalchemy import Update, insert, select, update

from torchrelay.gateway.sql.database import Database, SqlConnection
from torchrelay.gateway.sql.tables import table_versions

TableName = Literal["keys", "catalog"]


_TENANTS_CHANGES = "tenants_changes"
_CATALOG_OF = "catalog/"  # a tenant's id follows


async def bump_version(connection: SqlConnection, name: TableName) -> None:
    """Invalidates every gateway's cache of the table once the transaction commits."""
    await connection.execute(_rise(name))


async def bump_catalog_of(connection: SqlConnection, tenant_id: str) -> None:
    """Invalidates every gateway's cache of the tenant's models once the transaction commits."""
    await bump_version(connection, "catalog")  # first, since it locks the row: changes of all tenants are serialized
    number = (await connection.execute(_rise(_TENANTS_CHANGES).returning(table_versions.c.version))).scalar_one()
    row = {"name": f"{_CATALOG_OF}{tenant_id}", "version": number}
    of_tenant = update(table_versions).where(table_versions.c.name == row["name"])
    if (await connection.execute(of_tenant.values(row))).rowcount == 0:
        await connection.execute(insert(table_versions).values(row))


def _rise(name: str) -> Update:
    row = table_versions.c
    return update(table_versions).where(row.name == name).values(version=row.version + 1)


class TableVersions:
    """The last confirmed versions, and when they were queried."""

    def __init__(self, database: Database, confirm_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._confirm_s = confirm_s
        self._clock = clock
        self._versions: dict[str, int] = {}
        self._of_tenants: dict[str, int] = {}
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

    async def everybodys_catalog(self) -> int:
        """The number of changes of the catalog that concern every tenant; raises as ``confirmed`` does."""
        return await self.confirmed("catalog") - self._versions[_TENANTS_CHANGES]

    async def catalog_of(self, tenant_id: str) -> int:
        """A number that rises with every change that concerns the tenant; raises as ``confirmed`` does."""
        return await self.everybodys_catalog() + self._of_tenants.get(f"{_CATALOG_OF}{tenant_id}", 0)

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
            query, row = select(table_versions.c.name, table_versions.c.version), table_versions.c
            names = "keys", "catalog", _TENANTS_CHANGES
            versions = _by_name(await connection.execute(query.where(row.name.in_(names))))
            known = self._versions.get(_TENANTS_CHANGES, 0)
            if versions[_TENANTS_CHANGES] > known:
                later = query.where(row.name.startswith(_CATALOG_OF), row.version > known)
                self._of_tenants |= _by_name(await connection.execute(later))
            self._versions = versions
        # Invalidated during the query: its result may be outdated, so the next use queries again.
        if num_invalidations == self._num_invalidations:
            self._queried_at = queried_at


def _by_name(rows: Iterable[Any]) -> dict[str, int]:
    return {row.name: row.version for row in rows}
