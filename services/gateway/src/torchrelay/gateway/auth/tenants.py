"""Tenants: the owners of keys and models, with their storage quota, budget and service class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, NotFound
from torchrelay.common.ids import new_id
from torchrelay.gateway.core import ServiceClassName
from torchrelay.gateway.resource_names import check_name
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.table_versions import TableVersions, bump_version
from torchrelay.gateway.sql.tables import balances, tenants


@dataclass(frozen=True, slots=True)
class Tenant:
    tenant_id: str
    name: str
    storage_quota_bytes: int | None  # None: unlimited
    budget_nano: int | None
    service_class: ServiceClassName | None  # of requests whose key has none; None: standard
    created_unix_us: int


class Tenants:
    """Owns the tenants table. With ``table_versions`` a change applies here at once."""

    def __init__(self, database: Database, table_versions: TableVersions | None = None) -> None:
        self._database = database
        self._table_versions = table_versions

    async def create(
        self,
        name: str,
        storage_quota_bytes: int | None = None,
        budget_nano: int | None = None,
        service_class: ServiceClassName | None = None,
    ) -> Tenant:
        """Creates a tenant with an empty balance. Raises ``Conflict`` if the name is taken."""
        check_name(name, "name")
        tenant = Tenant(new_id("ten"), name, storage_quota_bytes, budget_nano, service_class, now_unix_us())
        try:
            async with self._database.write() as connection:
                await connection.execute(insert(tenants).values(asdict(tenant)))
                await connection.execute(insert(balances).values(tenant_id=tenant.tenant_id, spent_nano=0))
        except IntegrityError as error:
            raise Conflict(f"tenant {name!r} already exists", field="name") from error
        return tenant

    async def change(self, name: str, settings: Mapping[str, int | str | None]) -> Tenant:
        """Sets the given fields, by name (``None``: no limit, no class). Raises ``NotFound``."""
        async with self._database.write() as connection:
            if settings:
                await connection.execute(update(tenants).where(tenants.c.name == name).values(dict(settings)))
                await bump_version(connection, "keys")  # cached principals include budget and class
        if self._table_versions is not None:
            self._table_versions.invalidate()
        return await self.by_name(name)

    async def by_name(self, name: str) -> Tenant:
        """Raises ``NotFound``."""
        async with self._database.read() as connection:
            row = (await connection.execute(select(tenants).where(tenants.c.name == name))).one_or_none()
        if row is None:
            raise NotFound(f"tenant {name!r} not found", field="tenant")
        return Tenant(*row)

    async def list(self) -> list[Tenant]:
        """All tenants, oldest first."""
        async with self._database.read() as connection:
            rows = (await connection.execute(select(tenants).order_by(tenants.c.created_unix_us))).all()
        return [Tenant(*row) for row in rows]
