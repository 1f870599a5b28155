"""API keys: created, listed, revoked, and resolved to a ``Principal`` on every request.

Only an HMAC of a key is stored. Its pepper is a setting, or generated at first start and kept beside the keys. Since a
key has 160 random bits, a leaked table is useless even with the pepper; the setting keeps the two apart all the same.
"""

from __future__ import annotations

import hmac
import json
import secrets as random_secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, Select, bindparam, func, insert, select, update

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, InvalidRequest, NotFound, PermissionDenied, Unauthenticated
from torchrelay.common.recent import Recent
from torchrelay.gateway.auth.key_format import key_id_of, mac_of, new_token
from torchrelay.gateway.auth.limit_columns import LIMITS, check_period, limits_of
from torchrelay.gateway.core import NO_LIMITS, URGENCY, Limits, Principal, ServiceClass, ServiceClassName
from torchrelay.gateway.sql.audit import record
from torchrelay.gateway.sql.database import ANSWER_LIMIT_S, Database
from torchrelay.gateway.sql.table_versions import TableVersions, bump_version
from torchrelay.gateway.sql.tables import api_keys, secrets, tenants
from torchrelay.gateway.sql.versioned_cache import VersionedCache

_USES_AT_ONCE = 500
MAX_KEYS = 1000  # of a tenant, that are not revoked
ADMIN = Principal(tenant_id="", tenant="", key_id="admin", is_admin=True, person="admin key")


_LAST_USED = func.coalesce(api_keys.c.last_used_unix_us, 0)
_NOTE_USE = (
    update(api_keys)
    .where(api_keys.c.key_id == bindparam("of_key"), bindparam("at") > _LAST_USED)
    .values(last_used_unix_us=bindparam("at"))
)


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """A key's metadata, without its secret."""

    key_id: str
    name: str
    tenant: str
    created_unix_us: int
    limits: Limits
    service_class: ServiceClassName | None  # None: its tenant's
    models: tuple[str, ...] | None  # "tenant/model"; None: all of the tenant
    may_manage_keys: bool
    expires_unix_us: int | None
    is_paused: bool
    is_revoked: bool
    last_used_unix_us: int | None
    previous_until_unix_us: int | None  # until when the token before the last rotation is valid


@dataclass(frozen=True, slots=True)
class _Entry:
    """A key as it is cached."""

    mac: str
    previous_mac: str
    previous_until_unix_us: int
    is_paused: bool
    is_suspended: bool  # its tenant
    principal: Principal

    def caller(self, mac: str) -> Principal | None:
        """The principal of a token with this hash; None if it is not the key's.

        The token before the rotation manages no keys: whoever stole it could keep the key.
        """
        if hmac.compare_digest(self.mac, mac):
            return self.principal
        if hmac.compare_digest(self.previous_mac, mac) and now_unix_us() < self.previous_until_unix_us:
            return replace(self.principal, may_manage_keys=False, has_old_secret=True)
        return None

    def check(self) -> None:
        """Raises ``Unauthenticated`` for an expired key, ``PermissionDenied`` for a paused key or suspended tenant."""
        expires_us = self.principal.expires_unix_us
        if expires_us is not None and now_unix_us() >= expires_us:
            when = datetime.fromtimestamp(expires_us / 1e6, UTC)
            raise Unauthenticated(f"this API key expired at {when:%Y-%m-%d %H:%M} UTC; ask for a new one")
        if self.is_suspended:
            raise PermissionDenied(f"the tenant {self.principal.tenant} is suspended; ask the platform's operator")
        if self.is_paused:
            raise PermissionDenied("this API key is paused; whoever manages the tenant's keys can resume it")


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
        self._cache: VersionedCache[str, _Entry] = VersionedCache(capacity)
        self._used: Recent[str, int] = Recent(capacity)  # since they were written last, with the time

    async def authenticate(self, authorization: str | None) -> Principal:
        """The principal of the key in the ``Authorization`` header.

        Raises the same ``Unauthenticated`` for malformed, unknown and revoked keys, one with the time for an expired
        key, ``PermissionDenied`` for a paused one, and ``Unavailable`` without SQL.
        """
        token = bearer_token(authorization or "")
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
        caller = None if entry is None else entry.caller(mac)
        if entry is None or caller is None:
            raise _unknown()
        entry.check()
        self._used[key_id] = now_unix_us()
        return caller

    async def caller_of(self, key_id: str) -> Principal:
        """The principal of a key by its id, for what goes on without the key. Raises as ``authenticate`` does."""
        entry = await self._look_up(key_id, await self._versions.confirmed("keys"))
        if entry is None:
            raise Unauthenticated("the key was revoked")
        entry.check()
        return entry.principal

    async def write_last_uses(self) -> None:
        """Writes when keys were used since the last call. Raises ``Unavailable`` without SQL."""
        used = dict(self._used)
        if not used:
            return
        names = sorted(used)  # in one order, so that gateways never deadlock
        for begin in range(0, len(names), _USES_AT_ONCE):
            chunk = names[begin : begin + _USES_AT_ONCE]
            rows = [{"of_key": key_id, "at": used[key_id]} for key_id in chunk]
            await self._database.transact(partial(_note_uses, rows))
            for key_id in chunk:
                if self._used.get(key_id) == used[key_id]:
                    del self._used[key_id]

    async def _look_up(self, key_id: str, version: int) -> _Entry | None:
        query = _joined().where(api_keys.c.key_id == key_id, api_keys.c.revoked_unix_us.is_(None))
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            self._cache.forget(key_id)
            return None
        entry = _Entry(
            row.mac,
            row.previous_mac or "",
            row.previous_until_unix_us or 0,
            row.paused_unix_us is not None,
            row.tenant_suspended_unix_us is not None,
            _principal(row),
        )
        self._cache.put(key_id, version, entry)
        return entry

    async def create(self, tenant_id: str, **settings: Any) -> tuple[KeyInfo, str]:
        """Creates a key with these columns; returns its metadata and the token, which cannot be retrieved again.

        Raises ``Conflict`` beyond ``MAX_KEYS`` keys that are not revoked, and ``InvalidRequest``.
        """
        key_id, token = new_token()
        live = select(func.count()).where(api_keys.c.tenant_id == tenant_id, api_keys.c.revoked_unix_us.is_(None))
        values = {"name": "", **settings, "key_id": key_id, "tenant_id": tenant_id, "mac": mac_of(self._pepper, token)}
        async with self._database.write() as connection:
            if (await connection.execute(live)).scalar_one() >= MAX_KEYS:
                raise Conflict(f"the tenant has {MAX_KEYS} keys; revoke those that are not used", field="tenant")
            await connection.execute(insert(api_keys).values({**_stored(values), "created_unix_us": now_unix_us()}))
            row = (await connection.execute(_joined().where(api_keys.c.key_id == key_id))).one()
            if row.tenant_deleted_unix_us is not None:
                raise Conflict(f"the tenant {row.tenant_name} is deleted", field="tenant")
            _check(row, settings)
            await record(connection, "key.create", key_id, tenant_id, None, _audited(row))
        return _info(row), token

    async def change(self, key_id: str, tenant_id: str | None, settings: Mapping[str, Any]) -> KeyInfo:
        """Sets these columns of a key: at once here, within a second everywhere.

        Raises ``NotFound`` if the key is revoked, does not exist or belongs to another tenant (``None``: any tenant),
        and ``InvalidRequest``.
        """
        mine = api_keys.c.key_id == key_id, api_keys.c.revoked_unix_us.is_(None), *_of(tenant_id)
        action = "key.rotate" if "mac" in settings else "key.change"
        async with self._database.write() as connection:
            await bump_version(connection, "keys")  # first: it locks a row, so that nobody changes the key meanwhile
            before = (await connection.execute(_joined().where(*mine))).one_or_none()
            changed = await connection.execute(
                update(api_keys).where(*mine).values({"key_id": key_id, **_stored(settings)})
            )
            if changed.rowcount == 0 or before is None:
                raise _not_found(key_id)
            row = (await connection.execute(_joined().where(api_keys.c.key_id == key_id))).one()
            _check(row, settings)
            if settings:
                await record(connection, action, key_id, row.tenant_id, _audited(before), _audited(row))
        await self._changed()
        return _info(row)

    async def rotate(self, key_id: str, tenant_id: str | None, overlap_s: float) -> tuple[KeyInfo, str]:
        """Gives the key another secret; the old one stays valid for ``overlap_s``. Raises as ``change`` does."""
        token = new_token(key_id)
        until_us = now_unix_us() + int(overlap_s * 1e6)
        rotated = {
            "previous_mac": api_keys.c.mac,
            "mac": mac_of(self._pepper, token[1]),
            "previous_until_unix_us": until_us,
        }
        return await self.change(key_id, tenant_id, rotated), token[1]

    async def list(self, tenant_id: str | None) -> list[KeyInfo]:
        """The keys of a tenant (``None``: all tenants), including revoked ones, oldest first."""
        query = _joined().order_by(api_keys.c.created_unix_us, api_keys.c.key_id)
        if tenant_id is not None:
            query = query.where(api_keys.c.tenant_id == tenant_id)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return [_info(row) for row in rows]

    async def one(self, key_id: str) -> KeyInfo:
        """A key, revoked or not. Raises ``NotFound``."""
        async with self._database.read() as connection:
            row = (await connection.execute(_joined().where(api_keys.c.key_id == key_id))).one_or_none()
        if row is None:
            raise _not_found(key_id)
        return _info(row)

    async def revoke(self, key_id: str, tenant_id: str | None) -> None:
        """Revokes a key: at once here, within a second everywhere. Idempotent.

        Raises ``NotFound`` if the key does not exist or belongs to another tenant (``None``: any tenant).
        """
        query = update(api_keys).where(api_keys.c.key_id == key_id, *_of(tenant_id))
        revoked_at = func.coalesce(api_keys.c.revoked_unix_us, now_unix_us())
        async with self._database.write() as connection:
            await bump_version(connection, "keys")  # first, as in ``change``
            values = query.values(revoked_unix_us=revoked_at).returning(api_keys.c.tenant_id)
            owner = (await connection.execute(values)).scalar_one_or_none()
            if owner is None:
                raise _not_found(key_id)
            await record(connection, "key.revoke", key_id, owner)
        await self._changed()

    async def _changed(self) -> None:
        self._versions.invalidate()
        if self._announce is not None:
            await self._announce()


def bearer_token(authorization: str) -> str:
    """The token of ``Bearer ...``; empty if there is none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


_TENANT_COLUMNS: Final = ("name", "service_class", "suspended_unix_us", "deleted_unix_us", *LIMITS)
_OF_TENANT: Final = tuple(tenants.c[name].label(f"tenant_{name}") for name in _TENANT_COLUMNS)


def _joined() -> Select[Any]:
    return select(api_keys, *_OF_TENANT).join_from(api_keys, tenants)


def _of(tenant_id: str | None) -> list[ColumnElement[bool]]:
    return [] if tenant_id is None else [api_keys.c.tenant_id == tenant_id]


def _stored(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as columns; the list of models as JSON."""
    models = settings.get("models")
    return {**settings, **({} if models is None else {"models": json.dumps(sorted(models))})}


def _check(row: Row[Any], settings: Mapping[str, Any]) -> None:
    """Raises ``InvalidRequest`` for settings that contradict each other."""
    limits = limits_of(row)
    check_period(limits)
    if settings.get("may_manage_keys") and _is_limited(row):
        message = (
            "a key with limits, models, a class or an expiry of its own cannot manage keys, since another key would"
        )
        message += " have none of them"
        raise InvalidRequest(message, field="may_manage_keys")


def _may_manage_keys(row: Row[Any]) -> bool:
    return bool(row.may_manage_keys) and not _is_limited(row)


def _is_limited(row: Row[Any]) -> bool:
    own = row.models, row.service_class, row.expires_unix_us
    return any(each is not None for each in own) or limits_of(row) != NO_LIMITS


def _principal(row: Row[Any]) -> Principal:
    classes = [ServiceClass[name.upper()] for name in (row.service_class, row.tenant_service_class) if name]
    top = min(classes, default=ServiceClass.INTERACTIVE, key=URGENCY.index)
    return Principal(
        tenant_id=row.tenant_id,
        tenant=row.tenant_name,
        key_id=row.key_id,
        limits=limits_of(row),
        tenant_limits=limits_of(row, "tenant_"),
        service_class=top if classes else ServiceClass.STANDARD,
        top_class=top,
        models=None if row.models is None else frozenset(json.loads(row.models)),
        may_manage_keys=_may_manage_keys(row),
        expires_unix_us=row.expires_unix_us,
    )


def _info(row: Row[Any]) -> KeyInfo:
    return KeyInfo(
        row.key_id,
        row.name,
        row.tenant_name,
        row.created_unix_us,
        limits_of(row),
        row.service_class,
        None if row.models is None else tuple(json.loads(row.models)),
        _may_manage_keys(row),
        row.expires_unix_us,
        row.paused_unix_us is not None,
        row.revoked_unix_us is not None,
        row.last_used_unix_us,
        row.previous_until_unix_us,
    )


def _audited(row: Row[Any]) -> dict[str, Any]:
    """The fields of a key that the audit log has: all but its secrets and times of use."""
    shown = asdict(_info(row))
    left_out = "key_id", "tenant", "limits", "created_unix_us", "last_used_unix_us"
    return {**{name: shown[name] for name in shown if name not in left_out}, **shown["limits"]}


def _note_uses(rows: Sequence[Mapping[str, Any]], connection: Connection) -> None:
    connection.execute(_NOTE_USE, rows)


def _unknown() -> Unauthenticated:
    return Unauthenticated("invalid or revoked API key")


def _not_found(key_id: str) -> NotFound:
    return NotFound(f"API key {key_id!r} not found", field="key_id")
