"""API keys: created, listed, revoked, and resolved to a ``Principal`` on every request.

Only an HMAC of a key is stored. Its pepper is a setting, or generated at first start and kept beside the keys. Since a
key has 160 random bits, a leaked table is useless even with the pepper; the setting keeps the two apart all the same.
"""

from __future__ import annotations

import hmac
import secrets as random_secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sqlalchemy import Select, func, insert, select, update

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, NotFound, Unauthenticated
from torchrelay.gateway.auth.key_format import key_id_of, mac_of, new_token
from torchrelay.gateway.core import Principal, ServiceClass, ServiceClassName
from torchrelay.gateway.sql.database import ANSWER_LIMIT_S, Database
from torchrelay.gateway.sql.table_versions import TableVersions, bump_version
from torchrelay.gateway.sql.tables import api_keys, secrets, tenants
from torchrelay.gateway.sql.versioned_cache import VersionedCache

MAX_KEYS = 1000  # of a tenant, that are not revoked
ADMIN = Principal(tenant_id="", tenant="", key_id="admin", is_admin=True)


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """A key's metadata, without its secret."""

    key_id: str
    name: str
    tenant: str
    created_unix_us: int
    requests_per_minute: int | None
    service_class: ServiceClassName | None  # None: its tenant's
    is_revoked: bool


async def load_pepper(database: Database, setting: str) -> bytes:
    """The setting (hex), or the pepper in SQL, created by the gateway that starts first."""
    if setting:
        return bytes.fromhex(setting)
    async with database.write() as connection:
        generated = database.insert(secrets).values(name="key_pepper", value=random_secrets.token_hex(32))
        await connection.execute(generated.on_conflict_do_nothing())
        stored = await connection.execute(select(secrets.c.value).where(secrets.c.name == "key_pepper"))
        return bytes.fromhex(stored.scalar_one())


class ApiKeys:
    """Owns the key table. ``announce`` tells the other gateways that a key was revoked; it may be lost."""

    def __init__(
        self,
        database: Database,
        versions: TableVersions,
        pepper: bytes,
        *,
        admin_key: str = "",
        capacity: int = 10_000,
        announce: Callable[[], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._versions = versions
        self._pepper = pepper
        self._admin_mac = mac_of(pepper, admin_key) if admin_key else ""
        self._announce = announce
        self._clock = clock
        self._cache: VersionedCache[str, tuple[str, Principal]] = VersionedCache(capacity)

    async def authenticate(self, authorization: str | None) -> Principal:
        """The principal of the key in the ``Authorization`` header.

        Raises the same ``Unauthenticated`` for malformed, unknown and revoked keys; ``Unavailable`` without SQL.
        """
        token = _token(authorization or "")
        if not token:
            raise Unauthenticated("missing API key: send the header Authorization: Bearer tr-...")
        mac = mac_of(self._pepper, token)
        if self._admin_mac and hmac.compare_digest(mac, self._admin_mac):
            return ADMIN
        key_id = key_id_of(token)
        if key_id is None:
            raise _unknown()
        due_s = self._clock() + ANSWER_LIMIT_S
        version = await self._versions.confirmed("keys")
        entry = self._cache.get(key_id, version)
        if entry is None:  # both queries share one time limit
            entry = await self._database.answer(self._look_up(key_id, version), due_s - self._clock())
        if entry is None or not hmac.compare_digest(entry[0], mac):
            raise _unknown()
        return entry[1]

    async def _look_up(self, key_id: str, version: int) -> tuple[str, Principal] | None:
        query = _joined().where(api_keys.c.key_id == key_id, api_keys.c.revoked_unix_us.is_(None))
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            self._cache.forget(key_id)
            return None
        principal = Principal(
            tenant_id=row.tenant_id,
            tenant=row.tenant,
            key_id=key_id,
            requests_per_minute=row.requests_per_minute,
            budget_nano=row.budget_nano,
            service_class=ServiceClass[(row.service_class or row.tenant_class or "standard").upper()],
        )
        self._cache.put(key_id, version, (row.mac, principal))
        return row.mac, principal

    async def create(
        self,
        tenant: str,
        tenant_id: str,
        name: str = "",
        requests_per_minute: int | None = None,
        service_class: ServiceClassName | None = None,
    ) -> tuple[KeyInfo, str]:
        """Creates a key; returns its metadata and the token, which cannot be retrieved again.

        Raises ``Conflict`` beyond ``MAX_KEYS`` keys that are not revoked.
        """
        key_id, token = new_token()
        info = KeyInfo(key_id, name, tenant, now_unix_us(), requests_per_minute, service_class, is_revoked=False)
        live = select(func.count()).where(api_keys.c.tenant_id == tenant_id, api_keys.c.revoked_unix_us.is_(None))
        async with self._database.write() as connection:
            if (await connection.execute(live)).scalar_one() >= MAX_KEYS:
                raise Conflict(f"tenant {tenant} has {MAX_KEYS} keys; revoke those that are not used", field="tenant")
            await connection.execute(
                insert(api_keys).values(
                    key_id=key_id,
                    tenant_id=tenant_id,
                    name=name,
                    mac=mac_of(self._pepper, token),
                    requests_per_minute=requests_per_minute,
                    service_class=service_class,
                    created_unix_us=info.created_unix_us,
                )
            )
        return info, token

    async def list(self, tenant_id: str | None) -> list[KeyInfo]:
        """The keys of a tenant (``None``: all tenants), including revoked ones, oldest first."""
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
                row.service_class,
                is_revoked=row.revoked_unix_us is not None,
            )
            for row in rows
        ]

    async def revoke(self, key_id: str, tenant_id: str | None) -> None:
        """Revokes a key: at once here, within a second everywhere. Idempotent.

        Raises ``NotFound`` if the key does not exist or belongs to another tenant (``None``: any tenant).
        """
        query = update(api_keys).where(api_keys.c.key_id == key_id)
        revoked_at = func.coalesce(api_keys.c.revoked_unix_us, now_unix_us())
        if tenant_id is not None:
            query = query.where(api_keys.c.tenant_id == tenant_id)
        async with self._database.write() as connection:
            changed = await connection.execute(query.values(revoked_unix_us=revoked_at))
            if changed.rowcount == 0:
                raise NotFound(f"API key {key_id!r} not found", field="key_id")
            await bump_version(connection, "keys")
        self._versions.invalidate()
        if self._announce is not None:
            await self._announce()


def _token(authorization: str) -> str:
    """The token of ``Bearer tr-...``; empty if there is none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _joined() -> Select[tuple[object, ...]]:
    of_tenant = tenants.c.name.label("tenant"), tenants.c.budget_nano, tenants.c.service_class.label("tenant_class")
    return select(api_keys, *of_tenant).join_from(api_keys, tenants)


def _unknown() -> Unauthenticated:
    return Unauthenticated("invalid or revoked API key")
