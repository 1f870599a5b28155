"""Tenants: the owners of keys and models, with their storage quota, limits and service class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, insert, select, update
from sqlalchemy.exc import IntegrityError

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, NotFound
from torchrelay.common.ids import new_id
from torchrelay.gateway.auth.limit_columns import check_period, limits_of
from torchrelay.gateway.core import Limits, ServiceClassName
from torchrelay.gateway.resource_names import check_name
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.table_versions import TableVersions, bump_version
from torchrelay.gateway.sql.tables import balances, tenants


@dataclass(frozen=True, slots=True)
class Tenant:
    tenant_id: str
    name: str
    storage_quota_bytes: int | None  # None: unlimited
    limits: Limits  # of all its keys together
    service_class: ServiceClassName | None  # the most urgent of its requests; None: any, and standard by default
    created_unix_us: int


class Tenants:
    """Owns the tenants table. With ``table_versions`` a change applies here at once."""

    def __init__(self, database: Database, table_versions: TableVersions | None = None) -> None:
        self._database = database
        self._table_versions = table_versions

    async def create(self, name: str, **settings: int | str | None) -> Tenant:
        """Creates a tenant with these columns and an empty balance. Raises ``Conflict`` if the name is taken."""
        check_name(name, "name")
        tenant_id = new_id("ten")
        values = {**settings, "tenant_id": tenant_id, "name": name, "created_unix_us": now_unix_us()}
        try:
            async with self._database.write() as connection:
                await connection.execute(insert(tenants).values(values))
                await connection.execute(insert(balances).values(tenant_id=tenant_id, spent_nano=0))
                row = (await connection.execute(select(tenants).where(tenants.c.tenant_id == tenant_id))).one()
                check_period(limits_of(row))
        except IntegrityError as error:
            raise Conflict(f"tenant {name!r} already exists", field="name") from error
        return _tenant(row)

    async def change(self, name: str, settings: Mapping[str, int | str | None]) -> Tenant:
        """Sets the given columns (``None``: no limit, no class). Raises ``NotFound`` or ``InvalidRequest``."""
        async with self._database.write() as connection:
            if settings:
                of_tenant = tenants.c.name == name
                await connection.execute(update(tenants).where(of_tenant).values(dict(settings)))
                for row in await connection.execute(select(tenants).where(of_tenant)):
                    check_period(limits_of(row))
                await bump_version(connection, "keys")  # cached principals include limits and class
        if self._table_versions is not None:
            self._table_versions.invalidate()
        return await self.by_name(name)

    async def by_name(self, name: str) -> Tenant:
        """Raises ``NotFound``."""
        async with self._database.read() as connection:
            row = (await connection.execute(select(tenants).where(tenants.c.name == name))).one_or_none()
        if row is None:
            raise NotFound(f"tenant {name!r} not found", field="tenant")
        return _tenant(row)

    async def list(self) -> list[Tenant]:
        """All tenants, oldest first."""
        async with self._database.read() as connection:
            rows = (await connection.execute(select(tenants).order_by(tenants.c.created_unix_us))).all()
        return [_tenant(row) for row in rows]


def _tenant(row: Row[Any]) -> Tenant:
    return Tenant(
        row.tenant_id, row.name, row.storage_quota_bytes, limits_of(row), row.service_class, row.created_unix_us
    )
