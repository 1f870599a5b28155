"""API keys: made, listed, revoked, and turned into a ``Principal`` at every request.

Only an HMAC of a key is stored. The pepper is a setting, or made at first start and kept beside the keys: a secret has
160 random bits, so a copied table is of no use even with its pepper; a setting keeps the two apart all the same.
"""

from __future__ import annotations

import hmac
import secrets as random_secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sqlalchemy import Select, func, insert, select, update

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import NotFound, Unauthenticated
from torchrelay.gateway.auth.key_format import key_id_of, mac_of, new_token
from torchrelay.gateway.core import Principal
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.table_versions import TableVersions, bump_version
from torchrelay.gateway.sql.tables import api_keys, secrets, tenants
from torchrelay.gateway.sql.versioned_cache import VersionedCache

ADMIN = Principal(tenant_id="", tenant="", key_id="admin", is_admin=True)


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """A key as it may be shown: never its secret."""

    key_id: str
    name: str
    tenant: str
    created_unix_us: int
    requests_per_minute: int | None
    is_revoked: bool


async def load_pepper(database: Database, setting: str) -> bytes:
    """The setting (hex), or the pepper kept in SQL, made by whichever gateway comes first."""
    if setting:
        return bytes.fromhex(setting)
    async with database.write() as connection:
        fresh = database.insert(secrets).values(name="key_pepper", value=random_secrets.token_hex(32))
        await connection.execute(fresh.on_conflict_do_nothing())
        kept = await connection.execute(select(secrets.c.value).where(secrets.c.name == "key_pepper"))
        return bytes.fromhex(kept.scalar_one())


class ApiKeys:
    """Owns the key table. ``announce`` tells the other gateways that a key was revoked; it may fail to, harmlessly."""

    def __init__(
        self,
        database: Database,
        versions: TableVersions,
        pepper: bytes,
        *,
        admin_key: str = "",
        capacity: int = 10_000,
        announce: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._database = database
        self._versions = versions
        self._pepper = pepper
        self._admin_mac = mac_of(pepper, admin_key) if admin_key else ""
        self._announce = announce
        self._cache: VersionedCache[str, tuple[str, Principal]] = VersionedCache(capacity)

    async def authenticate(self, authorization: str | None) -> Principal:
        """Whom the ``Authorization`` header's key stands for.

        Raises ``Unauthenticated`` alike for a malformed, unknown and revoked key, ``Unavailable`` when SQL is away.
        """
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("no API key given: send the header Authorization: Bearer tr-...")
        mac = mac_of(self._pepper, token)
        if self._admin_mac and hmac.compare_digest(mac, self._admin_mac):
            return ADMIN
        key_id = key_id_of(token)
        if key_id is None:
            raise _unknown()
        version = await self._versions.confirmed("keys")
        entry = self._cache.get(key_id, version) or await self._look_up(key_id, version)
        if entry is None or not hmac.compare_digest(entry[0], mac):
            raise _unknown()
        return entry[1]

    async def _look_up(self, key_id: str, version: int) -> tuple[str, Principal] | None:
        query = _joined().where(api_keys.c.key_id == key_id, api_keys.c.revoked_unix_us.is_(None))
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            return None
        principal = Principal(
            tenant_id=row.tenant_id,
            tenant=row.tenant,
            key_id=key_id,
            requests_per_minute=row.requests_per_minute,
            budget_nano=row.budget_nano,
        )
        self._cache.put(key_id, version, (row.mac, principal))
        return row.mac, principal

    async def create(
        self, tenant: str, tenant_id: str, name: str = "", requests_per_minute: int | None = None
    ) -> tuple[KeyInfo, str]:
        """A new key of a tenant: what may be shown of it, and the token, which nobody can ever show again."""
        key_id, token = new_token()
        info = KeyInfo(key_id, name, tenant, now_unix_us(), requests_per_minute, is_revoked=False)
        async with self._database.write() as connection:
            await connection.execute(
                insert(api_keys).values(
                    key_id=key_id,
                    tenant_id=tenant_id,
                    name=name,
                    mac=mac_of(self._pepper, token),
                    requests_per_minute=requests_per_minute,
                    created_unix_us=info.created_unix_us,
                )
            )
        return info, token

    async def list(self, tenant_id: str | None) -> list[KeyInfo]:
        """The keys of a tenant (``None``: of all), revoked ones too, oldest first."""
        query = _joined().order_by(api_keys.c.created_unix_us, api_keys.c.key_id)
        if tenant_id is not None:
            query = query.where(api_keys.c.tenant_id == tenant_id)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return [
            KeyInfo(
                row.key_id,
                row.name,
                row.tenant,
                row.created_unix_us,
                row.requests_per_minute,
                is_revoked=row.revoked_unix_us is not None,
            )
            for row in rows
        ]

    async def revoke(self, key_id: str, tenant_id: str | None) -> None:
        """Refused from now on here, within a second everywhere. Revoking twice is once.

        Raises ``NotFound`` for a key that is not there, or not of this tenant (``None``: of any).
        """
        query = update(api_keys).where(api_keys.c.key_id == key_id)
        first = func.coalesce(api_keys.c.revoked_unix_us, now_unix_us())
        if tenant_id is not None:
            query = query.where(api_keys.c.tenant_id == tenant_id)
        async with self._database.write() as connection:
            changed = await connection.execute(query.values(revoked_unix_us=first))
            if changed.rowcount == 0:
                raise NotFound(f"there is no key {key_id!r}", field="key_id")
            await bump_version(connection, "keys")
        self._versions.invalidate()
        if self._announce is not None:
            await self._announce()


def _joined() -> Select[tuple[object, ...]]:
    return select(api_keys, tenants.c.name.label("tenant"), tenants.c.budget_nano).join_from(api_keys, tenants)


def _unknown() -> Unauthenticated:
    return Unauthenticated("this API key is not known, or was revoked")
