"""/v1/files: the inputs of batches and their results, as OpenAI's clients send and read them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from torchrelay.common.errors import InvalidRequest, PermissionDenied
from torchrelay.gateway.batches.core import MAX_FILE_BYTES, Purpose, StoredFile
from torchrelay.gateway.core import Principal
from torchrelay.gateway.http.dependencies import Caller, Changer, ServicesOf
from torchrelay.gateway.http.multipart_file import FormFile

router = APIRouter(prefix="/v1/files")
MAX_LISTED = 10_000
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}


@router.post("", openapi_extra=_FORM)
async def create(
    services: ServicesOf,
    caller: Changer,
    request: Request,
    content_type: Annotated[str, Header(include_in_schema=False)] = "",
    content_length: Annotated[int, Header(include_in_schema=False)] = MAX_FILE_BYTES,
) -> dict[str, Any]:
    """Stores the input of a batch, as it arrives."""
    if caller.is_admin:
        raise PermissionDenied("files belong to tenants; use a tenant's key")
    form = FormFile(content_type, _body_of(request))
    await form.begin()
    return shown(await services.files.receive(caller.tenant_id, form.filename, form.content(), content_length))


@router.get("")
async def all_files(
    services: ServicesOf,
    caller: Caller,
    purpose: Purpose | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = MAX_LISTED,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    """The tenant's files, of all tenants with the admin key."""
    async with services.lists.turn(caller.tenant_id):
        listed, has_more = await services.files.page(
            tenant_of(caller), purpose, limit, after, newest_first=order == "desc"
        )
    return page([shown(file) for file in listed], has_more)


@router.get("/{file_id}")
async def one_file(services: ServicesOf, caller: Caller, file_id: str) -> dict[str, Any]:
    return shown(await services.files.find(tenant_of(caller), file_id))


@router.get("/{file_id}/content", response_class=StreamingResponse)
async def content(services: ServicesOf, caller: Caller, file_id: str) -> StreamingResponse:
    file = await services.files.find(tenant_of(caller), file_id)
    parts = services.files.content(file)
    first = await anext(parts, b"")  # so that a store that is away is told by the status

    async def all_parts() -> AsyncIterator[bytes]:
        yield first
        async for part in parts:
            yield part

    headers = {"content-length": str(file.num_bytes)}
    return StreamingResponse(all_parts(), media_type="application/octet-stream", headers=headers)


@router.delete("/{file_id}")
async def delete(services: ServicesOf, caller: Changer, file_id: str) -> dict[str, Any]:
    await services.files.delete(await services.files.find(tenant_of(caller), file_id))
    return {"id": file_id, "object": "file", "deleted": True}


def tenant_of(caller: Principal) -> str | None:
    """The tenant whose files and batches the caller sees; None: all."""
    return None if caller.is_admin else caller.tenant_id


def page(listed: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page of a list in OpenAI's form."""
    first, last = (listed[0]["id"], listed[-1]["id"]) if listed else (None, None)
    return {"object": "list", "data": listed, "first_id": first, "last_id": last, "has_more": has_more}


def shown(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_unix_us // 1_000_000,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "expires_at": None,
    }


async def _body_of(request: Request) -> AsyncIterator[bytes]:
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect:
        raise InvalidRequest("the client left before the end of the form") from None
