"""Tenants: the owners of keys and models, with their storage quota, limits and service class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Row, insert, select, update
from sqlalchemy.exc import IntegrityError

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, NotFound
from torchrelay.common.ids import new_id
from torchrelay.gateway.auth.limit_columns import check_period, limits_of
from torchrelay.gateway.core import Limits, ServiceClassName
from torchrelay.gateway.resource_names import check_name
from torchrelay.gateway.sql.audit import record
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.table_versions import TableVersions, bump_version
from torchrelay.gateway.sql.tables import api_keys, balances, tenants


@dataclass(frozen=True, slots=True)
class Tenant:
    tenant_id: str
    name: str
    storage_quota_bytes: int | None  # None: unlimited
    limits: Limits  # of all its keys together
    service_class: ServiceClassName | None  # the most urgent of its requests; None: any, and standard by default
    created_unix_us: int
    is_suspended: bool  # its keys are refused
    is_deleted: bool  # it has nothing left but its accounts


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
                await record(connection, "tenant.create", name, tenant_id, None, _audited(row))
        except IntegrityError as error:
            raise Conflict(f"tenant {name!r} already exists", field="name") from error
        return _tenant(row)

    async def change(self, name: str, settings: Mapping[str, int | str | None]) -> Tenant:
        """Sets the given columns (``None``: no limit, no class). Raises ``NotFound`` or ``InvalidRequest``."""
        async with self._database.write() as connection:
            await bump_version(connection, "keys")  # cached principals include limits and class; it locks a row
            of_tenant = tenants.c.name == name
            before = (await connection.execute(select(tenants).where(of_tenant))).one_or_none()
            if before is not None and before.deleted_unix_us is not None:
                raise Conflict(f"the tenant {name} is deleted", field="name")
            if before is not None and settings:
                await connection.execute(update(tenants).where(of_tenant).values(dict(settings)))
                row = (await connection.execute(select(tenants).where(of_tenant))).one()
                check_period(limits_of(row))
                await record(connection, "tenant.change", name, row.tenant_id, _audited(before), _audited(row))
        if self._table_versions is not None:
            self._table_versions.invalidate()
        return await self.by_name(name)

    async def mark_deleted(self, tenant: Tenant) -> None:
        """Revokes the tenant's keys for ever. Its ledger, bills and audit log stay, and so its name is not free."""
        now = now_unix_us()
        of_tenant = tenants.c.tenant_id == tenant.tenant_id
        its_keys = api_keys.c.tenant_id == tenant.tenant_id, api_keys.c.revoked_unix_us.is_(None)
        async with self._database.write() as connection:
            await bump_version(connection, "keys")  # first, as wherever keys change
            deleted = {"suspended_unix_us": now, "deleted_unix_us": now}
            await connection.execute(update(tenants).where(of_tenant).values(deleted))
            await connection.execute(update(api_keys).where(*its_keys).values(revoked_unix_us=now))
            await record(connection, "tenant.delete", tenant.name, tenant.tenant_id)
        if self._table_versions is not None:
            self._table_versions.invalidate()

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
        row.tenant_id,
        row.name,
        row.storage_quota_bytes,
        limits_of(row),
        row.service_class,
        row.created_unix_us,
        row.suspended_unix_us is not None,
        row.deleted_unix_us is not None,
    )


def _audited(row: Row[Any]) -> dict[str, Any]:
    """The fields of a tenant that the audit log has."""
    shown = asdict(_tenant(row))
    left_out = "tenant_id", "name", "limits", "created_unix_us"
    return {**{name: shown[name] for name in shown if name not in left_out}, **shown["limits"]}
