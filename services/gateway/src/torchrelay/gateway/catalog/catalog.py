"""The catalog: published models, their current versions and scaling settings.

A model is addressed as ``tenant/model``, or as ``model`` within the caller's own tenant. Another tenant's model gives
the same ``NotFound`` as one that does not exist.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
from sqlalchemy import (
    ColumnElement,
    Row,
    Select,
    and_,
    delete,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    true,
    tuple_,
    update,
)

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, ModelNotFound, NotFound, PermissionDenied
from torchrelay.gateway.billing.prices import Prices
from torchrelay.gateway.catalog.model_settings import TenantSettings
from torchrelay.gateway.catalog.storage_quota import check_quota, locked_quota, used_bytes
from torchrelay.gateway.core import (
    ANY_ENGINE,
    OWN_ENGINE,
    LatencyTargets,
    Price,
    Principal,
    PublishedModel,
    Resources,
    Version,
)
from torchrelay.gateway.resource_names import is_name
from torchrelay.gateway.sql.audit import record
from torchrelay.gateway.sql.database import Database, SqlConnection
from torchrelay.gateway.sql.table_versions import TableVersions, bump_catalog_of
from torchrelay.gateway.sql.tables import aliases, models, replaced_versions, retired_versions, tenants, versions
from torchrelay.gateway.sql.versioned_cache import VersionedCache

_ROLLBACK_S = 60.0
_adapters = models.alias()
_ALIAS_OF_MODEL = (aliases.c.tenant_id == models.c.tenant_id, aliases.c.model == models.c.name)


@dataclass(frozen=True, slots=True)
class ReplacedVersion:
    """A version that a model had before, and until when the model can be rolled back to it."""

    version: Version
    replaced_unix_us: int
    kept_until_unix_us: int


class Catalog:
    """Owns the tables of models, their aliases and versions."""

    def __init__(
        self,
        database: Database,
        table_versions: TableVersions,
        prices: Prices,
        capacity: int = 10_000,
        *,
        retired_s: float = 600.0,
    ) -> None:
        """``retired_s``: how long after its last use a version is freed, at the earliest."""
        self._database = database
        self._table_versions = table_versions
        self._prices = prices
        # Less than that by the longest transaction, so that no version is freed while a model is rolled back to it.
        self._kept_us = int((retired_s - min(_ROLLBACK_S, retired_s / 2)) * 1e6)
        self._cache: VersionedCache[str, PublishedModel] = VersionedCache(capacity)

    async def resolve(self, principal: Principal, name: str) -> PublishedModel:
        """The model ``name`` refers to, with its current price.

        Raises ``ModelNotFound``, or ``PermissionDenied`` for a model that the key may not call.
        """
        if principal.is_admin and "/" not in name:
            raise _not_found(name, "; with the admin key, its name must include the tenant: TENANT/MODEL")
        full_name = name if "/" in name else f"{principal.tenant}/{name}"
        tenant, _, model = full_name.partition("/")
        if (tenant != principal.tenant and not principal.is_admin) or not is_name(tenant) or not is_name(model):
            raise _not_found(name)
        version = await self._table_versions.catalog_of(principal.tenant_id)
        published = None if principal.is_admin else self._cache.get(full_name, version)
        if published is None:
            published = await self._look_up(tenant, model)
            if published is None:
                raise _not_found(name)
            if not principal.is_admin:  # whose version is not that of the model's tenant
                self._cache.put(full_name, version, published)
        if not _may_call(principal, published):
            raise not_allowed(principal, published.name)
        price = await self._prices.current(published.name)
        return published if published.price is price else replace(published, price=price)

    async def _look_up(self, tenant: str, model: str) -> PublishedModel | None:
        async with self._database.read() as connection:
            of_alias = exists().where(*_ALIAS_OF_MODEL, aliases.c.alias == model)
            query = _joined().where(tenants.c.name == tenant, or_(models.c.name == model, of_alias))
            row = (await connection.execute(query)).one_or_none()
            if row is None:
                return None
            same = and_(models.c.tenant_id == row.tenant_id, models.c.name == row.name)
            named = await _aliases(connection, same)
            parents = await _parents(connection, *_is_base_of(row.tenant_id, row.base_version_id or row.version_id))
        price = await self._prices.current(f"{tenant}/{row.name}")
        return _published(row, price, named, parents)

    async def version(self) -> int:
        """A number that changes with every change of a model. Raises ``Unavailable``."""
        return await self._table_versions.confirmed("catalog")

    async def models(self, principal: Principal) -> list[PublishedModel]:
        """The models that the principal may call (all models for the admin), by name."""
        listed = await self._listed(true() if principal.is_admin else models.c.tenant_id == principal.tenant_id)
        return [each for each in listed if _may_call(principal, each)]

    async def with_minimum(self) -> list[PublishedModel]:
        """The models of active tenants that have a minimum of instances, always or at times. Raises ``Unavailable``."""
        holds = or_(models.c.min_instances > 0, models.c.schedule != "[]")
        suspended = select(tenants.c.tenant_id).where(tenants.c.suspended_unix_us.is_not(None))
        return await self._listed(and_(holds, models.c.tenant_id.not_in(suspended)))

    async def _listed(self, condition: ColumnElement[bool]) -> list[PublishedModel]:
        price_list = await self._prices.all()
        query = _joined().where(condition).order_by(tenants.c.name, models.c.name)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
            named = await _aliases(connection, condition)
            parents = await _parents(connection, _are_bases(condition))
        now = now_unix_us()
        return [_published(row, price_list.at(f"{row.tenant}/{row.name}", now), named, parents) for row in rows]

    async def set_aliases(self, model: PublishedModel, names: Collection[str]) -> None:
        """Replaces the model's aliases. Raises ``Conflict`` for a name that the tenant uses otherwise, and
        ``ModelNotFound`` if the model was deleted meanwhile.
        """
        own_name = model.name.partition("/")[2]
        async with self._database.write() as connection:
            await bump_catalog_of(connection, model.tenant_id)  # first: see publish_in
            if (await connection.execute(select(models.c.name).where(*_is(model)))).one_or_none() is None:
                raise _not_found(model.name)
            of_tenant = aliases.c.tenant_id == model.tenant_id
            await connection.execute(delete(aliases).where(of_tenant, aliases.c.model == own_name))
            same_names = models.c.tenant_id == model.tenant_id, models.c.name.in_(names)
            for taken in (await connection.execute(select(models.c.name).where(*same_names))).scalars():
                raise Conflict(f"{taken!r} is the name of a model", field="aliases")
            others = select(aliases.c.alias, aliases.c.model).where(of_tenant, aliases.c.alias.in_(names))
            for taken, other in await connection.execute(others):
                raise Conflict(f"{taken!r} is an alias of the model {other!r}", field="aliases")
            rows = [{"tenant_id": model.tenant_id, "alias": name, "model": own_name} for name in sorted(set(names))]
            if rows:
                await connection.execute(insert(aliases), rows)
            before, after = {"aliases": list(model.aliases)}, {"aliases": sorted(set(names))}
            await record(connection, "model.aliases", model.name, model.tenant_id, before, after)
        self._table_versions.invalidate()

    async def check_takes_upload(self, tenant_id: str, name: str) -> None:
        """Raises ``Conflict`` if the name is an alias of a model, or that of a model that adapters need."""
        same_model = models.c.tenant_id == tenant_id, models.c.name == name
        async with self._database.read() as connection:
            await _check_is_no_alias(connection, tenant_id, name)
            current = (await connection.execute(select(models.c.version_id).where(*same_model))).scalar_one_or_none()
            if current is not None:
                await _check_has_no_adapters(connection, tenant_id, name, current)

    async def change_settings(self, model: PublishedModel, settings: TenantSettings) -> None:
        """Changes a model's settings without a new version.

        Raises ``ModelNotFound`` if it was deleted meanwhile, and ``Conflict`` for an engine that does not serve the
        adapters that need the model.
        """
        values = settings.columns() | {"updated_unix_us": now_unix_us()}
        async with self._database.write() as connection:
            await bump_catalog_of(connection, model.tenant_id)  # first: see publish_in
            if not _serves_adapters(model.version, settings.engine or ANY_ENGINE):
                own_name = model.name.partition("/")[2]
                await _check_has_no_adapters(connection, model.tenant_id, own_name, model.version.version_id)
            before = (await connection.execute(select(models).where(*_is(model)))).one_or_none()
            if before is None:
                raise _not_found(model.name)
            await connection.execute(update(models).where(*_is(model)).values(values))
            earlier = {name: getattr(before, name) for name in settings.columns()}
            await record(connection, "model.change", model.name, model.tenant_id, earlier, settings.columns())
        self._table_versions.invalidate()

    async def delete(self, model: PublishedModel) -> None:
        """Deletes the model; its version is retired unless another model uses it. Raises ``Conflict`` for a model that
        adapters need.
        """
        async with self._database.write() as connection:
            await bump_catalog_of(connection, model.tenant_id)  # first: see publish_in
            gone = await connection.execute(delete(models).where(*_is(model)).returning(models.c.version_id))
            version_id = gone.scalar_one_or_none()  # may be newer than ``model.version``
            if version_id is None:
                raise _not_found(model.name)
            own_name = model.name.partition("/")[2]
            await _check_has_no_adapters(connection, model.tenant_id, own_name, version_id)
            for table in (aliases, replaced_versions):
                of_model = table.c.tenant_id == model.tenant_id, table.c.model == own_name
                await connection.execute(delete(table).where(*of_model))
            await _retire(self._database, connection, version_id, model.tenant_id)
            await record(connection, "model.delete", model.name, model.tenant_id, {"version": version_id}, None)
        self._table_versions.invalidate()

    async def replaced(self, model: PublishedModel) -> list[ReplacedVersion]:
        """The versions to which the model can be rolled back, the last replaced first."""
        async with self._database.read() as connection:
            return await self._replaced_in(connection, model)

    async def _replaced_in(self, connection: SqlConnection, model: PublishedModel) -> list[ReplacedVersion]:
        # Not by the time of retirement: it would tell that another tenant uses the same files.
        table, own_name = replaced_versions, model.name.partition("/")[2]
        of_model = table.c.tenant_id == model.tenant_id, table.c.model == own_name
        query = select(table.c.replaced_unix_us, versions.c.description)
        query = query.join_from(table, versions, table.c.version_id == versions.c.version_id)
        query = query.where(*of_model, table.c.replaced_unix_us > now_unix_us() - self._kept_us)
        rows = await connection.execute(query.order_by(table.c.replaced_unix_us.desc()))
        return [
            ReplacedVersion(
                msgspec.json.decode(row.description, type=Version),
                row.replaced_unix_us,
                row.replaced_unix_us + self._kept_us,
            )
            for row in rows
        ]

    async def roll_back(self, model: PublishedModel, version_id: str) -> bool:
        """Makes a replaced version the model's version again; its settings stay. False: it is the version already.

        Raises ``NotFound`` if it is not kept, ``ModelNotFound`` if the model was deleted meanwhile, and
        ``QuotaExceeded`` if the version counts for other tenants only and has no place in this tenant's quota.
        """
        async with self._database.write() as connection:
            quota = await locked_quota(connection, model.tenant_id)
            await bump_catalog_of(connection, model.tenant_id)  # first: see publish_in
            current = (await connection.execute(select(models.c.version_id).where(*_is(model)))).scalar_one_or_none()
            if current is None:
                raise _not_found(model.name)
            if current == version_id:
                return False
            kept = {each.version.version_id: each.version for each in await self._replaced_in(connection, model)}
            if version_id not in kept:
                raise NotFound(f"{model.name} has no replaced version {version_id[:100]!r} any more", field="version")
            own_name, used_before = model.name.partition("/")[2], await used_bytes(connection, model.tenant_id)
            await self.publish_in(connection, model.tenant_id, own_name, kept[version_id], TenantSettings())
            if quota is not None and await used_bytes(connection, model.tenant_id) > used_before:
                await check_quota(connection, model.tenant_id, quota, 0, "version")
        self._table_versions.invalidate()
        return True

    async def publish_in(
        self,
        connection: SqlConnection,
        tenant_id: str,
        name: str,
        version: Version,
        settings: TenantSettings,
        source: str = "",
    ) -> None:
        """Within the caller's transaction: makes this the model's version and retires the previous one.

        ``source`` is what the version was packed from; empty: not known. The caller calls ``published()`` after the
        commit. Raises ``Conflict`` if adapters need the previous version, or if the base of an adapter is no longer a
        model of the tenant.
        """
        # First, because it locks a row: changes to the catalog are serialized, so that each sees the versions that
        # the others reference or retire.
        await bump_catalog_of(connection, tenant_id)
        await _check_is_no_alias(connection, tenant_id, name)
        await _check_has_base(connection, tenant_id, name, version)
        now = now_unix_us()
        await self._keep(connection, version)
        await connection.execute(delete(retired_versions).where(retired_versions.c.version_id == version.version_id))
        same_model = (models.c.tenant_id == tenant_id, models.c.name == name)
        previous = (await connection.execute(select(models.c.version_id).where(*same_model))).scalar_one_or_none()
        # With the version: an earlier release changes the version alone.
        source = source and _source_of_version(source, version.version_id)
        values = settings.columns() | {"version_id": version.version_id, "source": source, "updated_unix_us": now}
        before, after = None if previous is None else {"version": previous}, {"version": version.version_id}
        tenant = (await connection.execute(select(tenants.c.name).where(tenants.c.tenant_id == tenant_id))).scalar_one()
        await record(connection, "model.publish", f"{tenant}/{name}", tenant_id, before, after)
        if previous is None:
            defaults = {"idle_timeout_s": 0.0, "max_instances": 0, "created_unix_us": now}
            await connection.execute(insert(models).values(defaults | values | {"tenant_id": tenant_id, "name": name}))
        else:
            if previous != version.version_id:
                await _check_has_no_adapters(connection, tenant_id, name, previous)
            await connection.execute(update(models).where(*same_model).values(values))
            await _retire(self._database, connection, previous, tenant_id)
            await self._note_replaced(connection, tenant_id, name, previous, version.version_id)

    async def packed_from(self, connection: SqlConnection, tenant_id: str, source: str) -> Version | None:
        """The version that a model of the tenant has from this source; None if no model has, or no source is given."""
        if not source:
            return None
        query = select(versions.c.description).join_from(models, versions)
        is_from = models.c.source == literal(_source_of_version(source, "")) + models.c.version_id
        query = query.where(models.c.tenant_id == tenant_id, is_from).limit(1)
        description = (await connection.execute(query)).scalar_one_or_none()
        return None if description is None else msgspec.json.decode(description, type=Version)

    async def _note_replaced(
        self, connection: SqlConnection, tenant_id: str, name: str, previous: str, current: str
    ) -> None:
        """Remembers the previous version of a model; forgets those that are no longer kept, and the current."""
        table, now = replaced_versions, now_unix_us()
        is_over = or_(table.c.version_id.in_((previous, current)), table.c.replaced_unix_us <= now - self._kept_us)
        await connection.execute(delete(table).where(table.c.tenant_id == tenant_id, table.c.model == name, is_over))
        if previous != current:
            row = {"tenant_id": tenant_id, "model": name, "version_id": previous, "replaced_unix_us": now}
            await connection.execute(insert(table).values(row))

    async def retire_in(self, connection: SqlConnection, tenant_id: str, version: Version) -> None:
        """Within the caller's transaction: schedules an unpublished version for deletion, unless a model uses it."""
        await bump_catalog_of(connection, tenant_id)
        await self._keep(connection, version)
        await _retire(self._database, connection, version.version_id, tenant_id)

    async def _keep(self, connection: SqlConnection, version: Version) -> None:
        row = self._database.insert(versions).values(
            version_id=version.version_id,
            description=msgspec.json.encode(version).decode(),
            stored_bytes=version.stored_bytes,
            created_unix_us=now_unix_us(),
        )
        await connection.execute(row.on_conflict_do_nothing())

    def published(self) -> None:
        """Invalidates the caches of this gateway at once, after its own commit."""
        self._table_versions.invalidate()


async def _retire(database: Database, connection: SqlConnection, version_id: str, tenant_id: str) -> None:
    """Schedules a version for deletion unless a model uses it; until it is freed it counts in this tenant's quota."""
    named = exists().where(models.c.version_id == version_id)
    if not (await connection.execute(select(named))).scalar_one():
        values = {"version_id": version_id, "tenant_id": tenant_id, "retired_unix_us": now_unix_us()}
        row = database.insert(retired_versions).values(values)
        await connection.execute(row.on_conflict_do_nothing())


async def _check_has_no_adapters(connection: SqlConnection, tenant_id: str, name: str, version_id: str) -> None:
    """Raises ``Conflict`` if adapters of the tenant change a version that none of its other models has.

    So the pack that an adapter shares is always that of a model, whose size counts in the tenant's quota.
    """
    others = select(models.c.name).where(models.c.tenant_id == tenant_id, models.c.name != name)
    adapters = others.join(versions).where(versions.c.base_version_id == version_id)
    copies = others.where(models.c.version_id == version_id)
    names = sorted((await connection.execute(adapters)).scalars())
    if names and (await connection.execute(copies)).first() is None:
        raise Conflict(f"adapters of {name!r} need it: delete {', '.join(names)} first", field="model")


class BaseLost(Conflict):
    """The base of an adapter was replaced or deleted while the adapter was uploaded."""


async def _check_has_base(connection: SqlConnection, tenant_id: str, name: str, version: Version) -> None:
    if not version.base_version_id:
        return
    same = models.c.tenant_id == tenant_id, models.c.version_id == version.base_version_id, models.c.name != name
    engines = (await connection.execute(select(models.c.engine).where(*same))).scalars().all()
    if not engines:
        message = (
            f"no model but {name!r} itself has the base version: it was replaced, deleted, or has the adapter's name"
        )
        raise BaseLost(message, field="base")
    if not any(_serves_adapters(version, engine) for engine in engines):
        raise BaseLost(f"the engine of the base was changed to {engines[0]}, which serves no adapters", field="base")


def _serves_adapters(version: Version, engine: str) -> bool:
    """Whether adapters may have a base with this version, or be this version, whose settings name the engine."""
    return engine.partition(":")[0] in (ANY_ENGINE, version.needed_engine or OWN_ENGINE)


def _is_base_of(tenant_id: str, version_id: str) -> Sequence[ColumnElement[bool]]:
    """The conditions of a tenant's models that have a version which its adapters change."""
    of_version = select(versions.c.version_id).where(versions.c.base_version_id == version_id)
    adapters = exists().where(_adapters.c.tenant_id == tenant_id, _adapters.c.version_id.in_(of_version))
    return models.c.tenant_id == tenant_id, models.c.version_id == version_id, adapters


def _are_bases(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """The condition of models that adapters change, in the tenants of the models that fulfil a condition."""
    bases = select(_adapters.c.tenant_id, versions.c.base_version_id)
    bases = bases.join_from(_adapters, versions, _adapters.c.version_id == versions.c.version_id)
    bases = bases.where(_adapters.c.tenant_id.in_(select(models.c.tenant_id).where(condition).correlate(None)))
    return tuple_(models.c.tenant_id, models.c.version_id).in_(bases)


async def _parents(connection: SqlConnection, *conditions: ColumnElement[bool]) -> dict[tuple[str, str], str]:
    """The names of the models that fulfil the conditions, the first of those with the same version, by (tenant,
    version).
    """
    key = models.c.tenant_id, models.c.version_id
    rows = await connection.execute(select(*key, func.min(models.c.name)).where(*conditions).group_by(*key))
    return {(tenant_id, version_id): name for tenant_id, version_id, name in rows}


def _joined() -> Select[tuple[object, ...]]:
    query = select(models, tenants.c.name.label("tenant"), versions.c.description, versions.c.base_version_id)
    return query.join_from(models, tenants).join(versions)


async def _aliases(connection: SqlConnection, condition: ColumnElement[bool]) -> dict[tuple[str, str], list[str]]:
    """The aliases of models that fulfil a condition, by (tenant, model)."""
    query = select(aliases).select_from(models).join(aliases, and_(*_ALIAS_OF_MODEL)).where(condition)
    by_model: dict[tuple[str, str], list[str]] = {}
    for row in await connection.execute(query.order_by(aliases.c.alias)):
        by_model.setdefault((row.tenant_id, row.model), []).append(row.alias)
    return by_model


async def _check_is_no_alias(connection: SqlConnection, tenant_id: str, name: str) -> None:
    query = select(aliases.c.model).where(aliases.c.tenant_id == tenant_id, aliases.c.alias == name)
    if (model := (await connection.execute(query)).scalar_one_or_none()) is not None:
        raise Conflict(f"{name!r} is an alias of the model {model!r}; choose another name", field="model")


def _published(
    row: Row[tuple[object, ...]],
    price: Price,
    named: Mapping[tuple[str, str], Sequence[str]],
    parents: Mapping[tuple[str, str], str],
) -> PublishedModel:
    parent = parents.get((row.tenant_id, row.base_version_id))
    return PublishedModel(
        name=f"{row.tenant}/{row.name}",
        tenant_id=row.tenant_id,
        version=msgspec.json.decode(row.description, type=Version),
        price=price,
        idle_timeout_s=row.idle_timeout_s,
        max_instances=row.max_instances,
        created_unix_us=row.created_unix_us,
        min_instances=row.min_instances,
        schedule=msgspec.json.decode(row.schedule, type=tuple[str, ...]),
        targets=LatencyTargets(row.interactive_ttft_s, row.standard_ttft_s, row.batch_ttft_s, row.tbt_target_s),
        engine=row.engine,
        aliases=tuple(named.get((row.tenant_id, row.name), ())),
        parent=f"{row.tenant}/{parent}" if parent else "",
        has_adapters=(row.tenant_id, row.version_id) in parents,
        resources=Resources(
            row.max_concurrency, row.threads, row.kv_share, msgspec.json.decode(row.hosts, type=tuple[str, ...])
        ),
    )


def _is(model: PublishedModel) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return models.c.tenant_id == model.tenant_id, models.c.name == model.name.partition("/")[2]


def _not_found(name: str, hint: str = "") -> ModelNotFound:
    return ModelNotFound(f"the model {name[:200]!r} does not exist{hint}", field="model")


def _may_call(principal: Principal, model: PublishedModel) -> bool:
    return principal.may_call(model.name, *(f"{principal.tenant}/{alias}" for alias in model.aliases))


def not_allowed(principal: Principal, name: str) -> PermissionDenied:
    """The refusal of a model that the key may neither call nor publish."""
    allowed = ", ".join(sorted(principal.models or ()))
    return PermissionDenied(f"this key may not use {name}; its models: {allowed}", field="model")


def _source_of_version(source: str, version_id: str) -> str:
    return f"{source}@{version_id}"
