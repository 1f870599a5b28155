"""/v1/uploads: declare files, send each in one or more parts, commit."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect

from torchrelay.common.errors import InvalidRequest, ModelNotFound, TorchrelayError
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import param_store_pb2
from torchrelay.gateway.catalog.catalog import not_allowed
from torchrelay.gateway.catalog.model_settings import Engine, TenantSettings
from torchrelay.gateway.catalog.uploads import MAX_FILES, Files, Upload
from torchrelay.gateway.core import ANY_ENGINE, OWN_ENGINE, PublishedModel
from torchrelay.gateway.exchange.errors import error_body
from torchrelay.gateway.http.dependencies import Caller, Changer, Services, ServicesOf, tenant_of
from torchrelay.gateway.http.routes.models import shown
from torchrelay.gateway.resource_names import check_name
from torchrelay.gateway.whole_number import WholeNumber

log = get_logger(__name__)
router = APIRouter(prefix="/v1/uploads")
NDJSON = "application/x-ndjson"
Quantize: TypeAlias = Literal["int8"]


class FileBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    path: str = Field(min_length=1, max_length=500)
    size: WholeNumber = Field(ge=0, lt=2**50)
    sha256: str = Field(pattern="^[0-9a-fA-F]{64}$")


class NewUpload(BaseModel):
    """``engine``: the one that the model needs; the upload is refused if no worker has it. None: any. ``quantize``: as
    the commit will have it.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    files: list[FileBody] = Field(min_length=1, max_length=MAX_FILES)
    engine: Engine | None = None
    quantize: Quantize | None = None


class CommitBody(TenantSettings):
    """``base``: the model that the uploaded LoRA adapter changes; None: the upload is a model. ``quantize``: what
    the weights of linear layers become; None: they stay as they are.
    """

    base: str | None = Field(default=None, max_length=200)
    quantize: Quantize | None = None


@router.post("", status_code=201)
async def begin(services: ServicesOf, caller: Changer, body: NewUpload) -> dict[str, Any]:
    named, slash, model = body.model.rpartition("/")
    tenant = await tenant_of(services, caller, named if slash else None)
    check_name(model, "model")
    if not caller.may_call(f"{tenant.name}/{model}"):
        raise not_allowed(caller, f"{tenant.name}/{model}")
    if body.engine is not None:
        (await services.scheduler.slots()).check_engine(body.engine)
    await services.catalog.check_takes_upload(tenant.tenant_id, model)
    files = [
        param_store_pb2.DeclaredFile(path=file.path, num_bytes=file.size, sha256=file.sha256.lower())
        for file in body.files
    ]
    return _shown(*await services.uploads.begin(tenant, model, files, body.quantize or ""))


@router.get("")
async def open_uploads(services: ServicesOf, caller: Caller) -> dict[str, Any]:
    """The tenant's open uploads, of all tenants with the admin key."""
    lease_us = int(services.uploads.limits.lease_s * 1e6)
    listed = [
        {
            "id": upload.upload_id,
            "object": "upload",
            "model": upload.full_name,
            "size_bytes": upload.declared_bytes,
            "created": upload.created_unix_us // 1_000_000,
            "expires": (upload.created_unix_us + lease_us) // 1_000_000,
        }
        for upload in await services.uploads.list(caller)
    ]
    return {"object": "list", "data": listed}


@router.get("/{upload_id}")
async def state(services: ServicesOf, caller: Caller, upload_id: str) -> dict[str, Any]:
    upload = await services.uploads.find(caller, upload_id)
    return _shown(upload, await services.uploads.files(upload))


@router.put("/{upload_id}/files/{path:path}")
async def put_file(
    services: ServicesOf,
    caller: Caller,
    request: Request,
    upload_id: str,
    path: str,
    upload_offset: Annotated[int, Header(ge=0, lt=1 << 63)] = 0,
    content_length: Annotated[int, Header(include_in_schema=False)] = 0,
) -> dict[str, Any]:
    """Appends to a file at ``upload_offset``; a complete file sent again stays as it is."""
    await services.uploads.find(caller, upload_id)
    state = await services.store.put_file(upload_id, path, upload_offset, _body_of(request), content_length)
    return _file(state)


@router.delete("/{upload_id}", status_code=204)
async def abort(services: ServicesOf, caller: Caller, upload_id: str) -> None:
    await services.uploads.abort(await services.uploads.find(caller, upload_id))


@router.post("/{upload_id}/commit")
async def commit(
    services: ServicesOf,
    caller: Caller,
    upload_id: str,
    body: CommitBody | None = None,
    accept: Annotated[str, Header()] = "",
) -> Response:
    """Publishes the model. With ``Accept: application/x-ndjson`` each step is a line, and the last line the result."""
    upload = await services.uploads.find(caller, upload_id)
    settings, slots = body or CommitBody(), await services.scheduler.slots()
    base_version_id = ""
    if settings.base is not None:
        base = await _base_of(services, caller, upload, settings.base)
        base_version_id = base.version.version_id
        served_by = base.engine if base.num_devices > 1 else base.version.needed_engine or OWN_ENGINE
        if settings.engine not in (None, ANY_ENGINE, served_by):
            raise InvalidRequest(f"an adapter of {base.name} needs the engine {served_by}", field="engine")
        slots.check_engine(served_by)
        if base.num_devices > 1:  # to the scheduler, both are names of one version
            settings = settings.model_copy(update={"engine": served_by})
    elif settings.engine is not None:
        slots.check_engine(settings.engine)
    engine = settings.engine or await _present_engine(services, caller, upload)
    engines = {each.partition(":")[0] for each in (slots.engines if engine == ANY_ENGINE else (engine,))}
    quantize = settings.quantize or ""
    steps = services.uploads.commit(upload, settings, slots.largest_bytes, base_version_id, sorted(engines), quantize)
    if NDJSON in accept:
        return StreamingResponse(_lines(services, caller, upload, steps), media_type=NDJSON)
    notes: list[str] = []
    async with aclosing(steps):
        async for step in steps:
            notes += step.notes
    return JSONResponse(await _published(services, caller, upload, notes))


async def _present_engine(services: Services, caller: Caller, upload: Upload) -> str:
    """The engine that the model's settings name; that of a new model is any."""
    try:
        return (await services.catalog.resolve(caller, f"{upload.tenant}/{upload.model}")).engine
    except ModelNotFound:
        return ANY_ENGINE


async def _base_of(services: Services, caller: Caller, upload: Upload, name: str) -> PublishedModel:
    """The base model of an adapter, which must be of the same tenant."""
    full_name = name if "/" in name else f"{upload.tenant}/{name}"
    base = await services.catalog.resolve(caller, full_name)
    if base.tenant_id != upload.tenant_id:
        raise InvalidRequest("the base model must be of the same tenant", field="base")
    if base.needed_engine not in ("", OWN_ENGINE, base.version.needed_engine):
        message = f"adapters of {base.name} need the engine {OWN_ENGINE}, not {base.needed_engine}, which it names"
        raise InvalidRequest(message, field="base")
    if base.version.base_version_id:
        raise InvalidRequest(f"{base.name} is an adapter itself; name the model that it adapts", field="base")
    return base


async def _lines(
    services: Services, caller: Caller, upload: Upload, steps: AsyncGenerator[param_store_pb2.CommitProgress]
) -> AsyncIterator[bytes]:
    notes: list[str] = []
    try:
        async with aclosing(steps):
            async for step in steps:
                notes += step.notes
                yield _line({"stage": step.stage, "done": step.num_bytes_done, "total": step.num_bytes_total})
        yield _line({"model": await _published(services, caller, upload, notes)})
    except TorchrelayError as error:  # the status has been sent: the result is in the last line
        yield _error_line(error)
    except Exception:  # the app's own handler could no longer write the last line
        log.exception("commit_crashed", upload_id=upload.upload_id)
        yield _error_line(TorchrelayError("internal error during the commit"))


async def _published(services: Services, caller: Caller, upload: Upload, notes: list[str]) -> dict[str, Any]:
    """The model, with ``notes`` about its weights if there are any."""
    model = await services.catalog.resolve(caller, upload.full_name)
    await services.model_changed("published", model.name, model)
    return shown(services, model) | ({"notes": notes} if notes else {})


async def _body_of(request: Request) -> AsyncIterator[bytes]:
    """The body as it arrives; a disconnect ends it early, and the received part can be resumed."""
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect:
        log.info("upload_interrupted")


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _error_line(error: TorchrelayError) -> bytes:
    """The error with the status that a reply of one piece would have had."""
    return _line({**error_body(error), "status": error.http_status})


def _shown(upload: Upload, files: Files) -> dict[str, Any]:
    return {
        "id": upload.upload_id,
        "object": "upload",
        "model": upload.full_name,
        "files": [_file(file) for file in files],
    }


def _file(state: param_store_pb2.FileState) -> dict[str, Any]:
    return {
        "path": state.path,
        "size": state.num_bytes,
        "sha256": state.sha256,
        "received": state.num_bytes_received,
        "complete": state.complete,
    }
