"""/v1/models: OpenAI's model list, with extensions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, TypeAlias

import msgspec
from fastapi import APIRouter, Header, Query
from pydantic import BaseModel, ConfigDict, Field

from torchrelay.common.errors import Conflict, InvalidRequest, NotFound, PermissionDenied
from torchrelay.control.v1 import types_pb2
from torchrelay.gateway.catalog.model_settings import OPERATORS_FIELDS, ModelSettings
from torchrelay.gateway.core import (
    ANY_ENGINE,
    OWN_ENGINE,
    Principal,
    PublishedModel,
    Version,
)
from torchrelay.gateway.http.dependencies import Caller, Changer, Services, ServicesOf
from torchrelay.gateway.resource_names import check_name

router = APIRouter(prefix="/v1/models")
versions_router = APIRouter(prefix="/v1/versions")
MAX_ALIASES = 16  # of a model
_Entry: TypeAlias = tuple[str, PublishedModel]  # of the list: a model under its name or an alias
AnthropicVersion = Annotated[str | None, Header()]  # Anthropic's clients send it, and expect its format


class AliasesBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    aliases: list[str] = Field(max_length=MAX_ALIASES)


class RollbackBody(BaseModel):
    """``None``: the version that was replaced last."""

    model_config = ConfigDict(extra="forbid", strict=True)
    version: str | None = None


@router.get("")
async def all_models(
    services: ServicesOf,
    caller: Caller,
    anthropic_version: AnthropicVersion = None,
    limit: Annotated[int | None, Query(ge=1, le=1000)] = None,
    after_id: str | None = None,
    before_id: str | None = None,
) -> dict[str, Any]:
    """By default all models; ``limit``, ``after_id`` and ``before_id`` select a page, as in Anthropic's API."""
    async with services.lists.turn(caller.tenant_id):
        models = await services.catalog.models(caller)
    entries, has_more = _page(_entries(models, caller), limit, after_id, before_id)
    if anthropic_version is None:
        return {"object": "list", "data": [_entry(services, name, model) for name, model in entries]}
    ids: list[str | None] = [*(name for name, _ in entries)] or [None]
    listed = [shown_to_anthropic(model) | {"id": name} for name, model in entries]
    return {"data": listed, "has_more": has_more, "first_id": ids[0], "last_id": ids[-1]}


@router.get("/{name:path}")
async def one_model(
    services: ServicesOf, caller: Caller, name: str, anthropic_version: AnthropicVersion = None
) -> dict[str, Any]:
    model = await services.catalog.resolve(caller, name)
    return shown(services, model) if anthropic_version is None else shown_to_anthropic(model)


@router.put("/{name:path}/aliases")
async def set_aliases(services: ServicesOf, caller: Changer, name: str, body: AliasesBody) -> dict[str, Any]:
    """Replaces the further names under which the tenant may call the model; usage and bills name the model."""
    names = [check_name(alias, "aliases") for alias in body.aliases]
    model = await services.catalog.resolve(caller, name)
    await services.catalog.set_aliases(model, names)
    return shown(services, await services.catalog.resolve(caller, model.name))


@versions_router.get("")
async def all_versions(services: ServicesOf, caller: Caller, model: str) -> dict[str, Any]:
    """The current version of a model, and the replaced versions to which it can be rolled back, the last first."""
    current = await services.catalog.resolve(caller, model)
    async with services.lists.turn(caller.tenant_id):
        replaced = await services.catalog.replaced(current)
    entries = [_version_entry(current.version)]
    for each in replaced:
        times = {"replaced": each.replaced_unix_us // 1_000_000, "kept_until": each.kept_until_unix_us // 1_000_000}
        entries.append(_version_entry(each.version) | times)
    return {"object": "list", "model": current.name, "data": entries}


def _version_entry(version: Version) -> dict[str, Any]:
    return {
        "id": version.version_id,
        "object": "version",
        "architecture": version.architecture,
        "dtype": version.dtype,
        "size_bytes": version.own_bytes,
        "replaced": None,
        "kept_until": None,
    }


@router.post("/{name:path}/rollback")
async def roll_back(
    services: ServicesOf, caller: Changer, name: str, body: RollbackBody | None = None
) -> dict[str, Any]:
    """Makes a replaced version current again, without an upload; running requests finish on their version. A version
    that is current already stays it.
    """
    model = await services.catalog.resolve(caller, name)
    version_id = None if body is None else body.version
    if version_id is None:
        replaced = await services.catalog.replaced(model)
        if not replaced:
            raise NotFound(f"{model.name} has no other version to return to", field="version")
        version_id = replaced[0].version.version_id
    is_changed = await services.catalog.roll_back(model, version_id)
    model = await services.catalog.resolve(caller, model.name)
    if is_changed:
        await services.model_changed("published", model.name, model)
    return shown(services, model)


@router.patch("/{name:path}")
async def change(services: ServicesOf, caller: Changer, name: str, body: ModelSettings) -> dict[str, Any]:
    """Takes effect with the model's next request, which carries the settings to the scheduler; a minimum of instances
    and its schedule within seconds.
    """
    for field in OPERATORS_FIELDS:
        if getattr(body, field) is not None and not caller.is_admin:
            raise PermissionDenied(f"{field} requires the admin key", field=field)
    model = await services.catalog.resolve(caller, name)
    if body.engine is not None:
        needed = model.version.needed_engine
        if needed and body.engine.partition(":")[0] not in (ANY_ENGINE, needed):
            raise InvalidRequest(f"{model.name} needs the engine {needed}, for its weights", field="engine")
        served_by = needed or OWN_ENGINE
        if model.has_adapters and body.engine.partition(":")[0] not in (ANY_ENGINE, served_by):
            message = f"{model.name} has adapters, which need the engine {served_by}; delete them first"
            raise InvalidRequest(message, field="engine")
    if body.engine is not None or body.hosts or body.kv_share is not None:
        slots = await services.scheduler.slots()
        slots.check_engine(body.engine or ANY_ENGINE)
        engine = body.engine or model.engine
        if engine == ANY_ENGINE:
            engine = model.version.needed_engine or (OWN_ENGINE if model.has_adapters else ANY_ENGINE)
        if body.hosts:
            slots.check_hosts(body.hosts, engine)
        elif body.engine is not None and body.hosts is None:
            slots.check_hosts(model.resources.hosts, engine, field="engine")
        slots.check_kv_share(body.kv_share or 1.0, model.version.shape)
    await services.catalog.change_settings(model, body)
    return shown(services, await services.catalog.resolve(caller, name))


@router.delete("/{name:path}")
async def delete(services: ServicesOf, caller: Changer, name: str) -> dict[str, Any]:
    model = await services.catalog.resolve(caller, name)
    own = model.name.partition("/")[2]
    if name.rpartition("/")[2] != own:
        message = f"{name} is an alias of {model.name}: PUT /v1/models/{own}/aliases removes it, and "
        raise Conflict(f"{message}DELETE /v1/models/{own} the model with all its aliases", field="name")
    await services.catalog.delete(model)
    await services.model_changed("deleted", model.name, None)
    return {"id": model.name, "object": "model", "deleted": True}


def _entries(models: Iterable[PublishedModel], caller: Principal) -> Iterator[_Entry]:
    """Each model, followed by its aliases; without the tenant in the tenant's own list, as its clients send them."""
    for model in models:
        yield model.name, model
        tenant = model.name.partition("/")[0]
        yield from ((f"{tenant}/{alias}" if caller.is_admin else alias, model) for alias in model.aliases)


def _entry(services: Services, name: str, model: PublishedModel) -> dict[str, Any]:
    alias = {} if name == model.name else {"id": name, "alias_of": model.name}
    return shown(services, model) | alias


def _page(
    listed: Iterable[_Entry], limit: int | None, after_id: str | None, before_id: str | None
) -> tuple[list[_Entry], bool]:
    """The first entries after ``after_id``, or the last ones before ``before_id``; and whether there are more."""
    if after_id is not None and before_id is not None:
        raise InvalidRequest("after_id and before_id exclude each other", field="before_id")
    within = list(listed)
    places = {name: place for place, (name, _) in enumerate(within)}
    for field, name in (("after_id", after_id), ("before_id", before_id)):
        if name is not None and name not in places:
            raise InvalidRequest(f"{field} must be the id of a listed model, not {name[:200]!r}", field=field)
    if after_id is not None:
        within = within[places[after_id] + 1 :]
    if before_id is not None:
        within = within[: places[before_id]]
    size = len(within) if limit is None else limit
    page = within[-size:] if before_id is not None and size else within[:size]
    return page, len(page) < len(within)


def shown_to_anthropic(model: PublishedModel) -> dict[str, Any]:
    """A model in Anthropic's format."""
    created = datetime.fromtimestamp(model.created_unix_us // 1_000_000, UTC)
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.version.shape.max_context_tokens,
    }


def tasks_of(version: Version) -> list[str]:
    """The results that a model gives, in vLLM's words: generate (tokens), embed, score (of reranked documents)."""
    if version.embedding is not None and version.embedding.pooling == types_pb2.POOLING_SCORE:
        return ["score"]
    tasks = [] if version.has_no_head else ["generate"]
    return [*tasks, "embed"] if version.embedding is not None else tasks


def shown(services: Services, model: PublishedModel) -> dict[str, Any]:
    """A model in OpenAI's format, extended by its version and settings."""
    version = model.version
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_unix_us // 1_000_000,
        "owned_by": model.name.partition("/")[0],
        "root": model.parent or model.name,
        "parent": model.parent or None,
        "version": version.version_id,
        "context_length": version.shape.max_context_tokens,
        "vocab_size": version.shape.vocab_size,
        "tasks": tasks_of(version),
        "architecture": version.architecture,
        "dtype": version.dtype,
        "size_bytes": version.own_bytes,
        "idle_timeout_s": model.idle_timeout_s,
        "max_instances": model.max_instances,
        "engine": model.engine,
        "min_instances": model.min_instances,
        "schedule": model.schedule,
        "aliases": model.aliases,
        **msgspec.to_builtins(model.targets),
        **msgspec.to_builtins(model.resources),
        "effective_idle_timeout_s": model.idle_timeout_s or services.default_idle_timeout_s or None,
        "effective_max_instances": model.max_instances or services.default_max_instances,
    }
