"""Operators: the people who run the platform, each with a role and a key of their own."""

from __future__ import annotations

import hmac
from dataclasses import asdict, dataclass, replace

from sqlalchemy import insert, select, update

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, NotFound, Unauthenticated
from torchrelay.gateway.auth.key_format import OPERATOR, key_id_of, mac_of, new_token
from torchrelay.gateway.core import Principal, Role
from torchrelay.gateway.resource_names import check_name
from torchrelay.gateway.sql.audit import record
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.table_versions import TableVersions, bump_version
from torchrelay.gateway.sql.tables import operators
from torchrelay.gateway.sql.versioned_cache import VersionedCache

_MAX_CACHED = 1000


@dataclass(frozen=True, slots=True)
class Operator:
    operator_id: str
    name: str
    role: Role
    created_unix_us: int
    is_revoked: bool


class Operators:
    """Owns the operators table."""

    def __init__(self, database: Database, versions: TableVersions, pepper: bytes) -> None:
        self._database = database
        self._versions = versions
        self._pepper = pepper
        self._cache: VersionedCache[str, tuple[str, Principal]] = VersionedCache(_MAX_CACHED)

    async def authenticate(self, token: str) -> Principal:
        """The operator of a key. Raises ``Unauthenticated``, and ``Unavailable`` without SQL."""
        operator_id = key_id_of(token, OPERATOR)
        if operator_id is None:
            raise _unknown()
        version = await self._versions.confirmed("keys")
        entry = self._cache.get(operator_id, version)
        if entry is None:
            entry = await self._database.answer(self._look_up(operator_id, version))
        if entry is None or not hmac.compare_digest(entry[0], mac_of(self._pepper, token)):
            raise _unknown()
        return entry[1]

    async def _look_up(self, operator_id: str, version: int) -> tuple[str, Principal] | None:
        query = select(operators).where(operators.c.operator_id == operator_id, operators.c.revoked_unix_us.is_(None))
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            return None
        principal = Principal("", "", operator_id, is_admin=True, role=row.role, person=f"operator:{row.name}")
        self._cache.put(operator_id, version, (row.mac, principal))
        return row.mac, principal

    async def create(self, name: str, role: Role) -> tuple[Operator, str]:
        """Creates an operator; returns it and its key, which cannot be retrieved again. Raises ``Conflict``."""
        check_name(name, "name")
        operator_id, token = new_token(prefix=OPERATOR)
        operator = Operator(operator_id, name, role, now_unix_us(), is_revoked=False)
        same = select(operators.c.name).where(operators.c.name == name, operators.c.revoked_unix_us.is_(None))
        async with self._database.write() as connection:
            await bump_version(connection, "keys")  # first: it locks a row, so that a name is taken once
            if (await connection.execute(same)).first() is not None:
                raise Conflict(f"operator {name!r} already exists; revoke the old key first", field="name")
            values = {key: value for key, value in asdict(operator).items() if key != "is_revoked"}
            await connection.execute(insert(operators).values({**values, "mac": mac_of(self._pepper, token)}))
            await record(connection, "operator.create", name, None, None, {"role": role})
        return operator, token

    async def change(self, name: str, role: Role) -> Operator:
        """Gives an operator another role, within a second. Raises ``NotFound``."""
        before = await self._live(name)
        async with self._database.write() as connection:
            await bump_version(connection, "keys")
            of_operator = operators.c.operator_id == before.operator_id
            await connection.execute(update(operators).where(of_operator).values(role=role))
            await record(connection, "operator.change", name, None, {"role": before.role}, {"role": role})
        self._versions.invalidate()
        return replace(before, role=role)

    async def revoke(self, name: str) -> None:
        """Revokes an operator's key, within a second. Raises ``NotFound``."""
        operator = await self._live(name)
        async with self._database.write() as connection:
            await bump_version(connection, "keys")
            of_operator = operators.c.operator_id == operator.operator_id
            await connection.execute(update(operators).where(of_operator).values(revoked_unix_us=now_unix_us()))
            await record(connection, "operator.revoke", name, None, {"role": operator.role}, None)
        self._versions.invalidate()

    async def list(self) -> list[Operator]:
        """All operators, also revoked ones, oldest first."""
        async with self._database.read() as connection:
            rows = await connection.execute(select(operators).order_by(operators.c.created_unix_us))
            return [
                Operator(row.operator_id, row.name, row.role, row.created_unix_us, row.revoked_unix_us is not None)
                for row in rows
            ]

    async def _live(self, name: str) -> Operator:
        named = [each for each in await self.list() if each.name == name and not each.is_revoked]
        if not named:
            raise NotFound(f"operator {name!r} not found", field="name")
        return named[0]


def _unknown() -> Unauthenticated:
    return Unauthenticated("invalid or revoked operator key")
