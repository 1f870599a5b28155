"""/v1/batches: the lines of a file, each run as a request, as OpenAI's clients ask for it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from torchrelay.common.errors import PermissionDenied
from torchrelay.gateway.batches.core import Batch
from torchrelay.gateway.http.dependencies import Caller, Changer, ServicesOf
from torchrelay.gateway.http.routes.files import page, tenant_of

router = APIRouter(prefix="/v1/batches")
_MOMENTS = (
    "created",
    "in_progress",
    "expires",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
)


class NewBatch(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: (
        dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]] | None
    ) = Field(default=None, max_length=16)


@router.post("")
async def create(services: ServicesOf, caller: Changer, body: NewBatch) -> dict[str, Any]:
    """Begins a batch, which runs until its lines have ended, or its window."""
    if caller.is_admin or caller.person:  # lines run as long as the key that began them is valid
        raise PermissionDenied("a batch runs with a tenant's key; create one (torchrelay key create)")
    batch = await services.batches.create(caller, body.endpoint, body.input_file_id, body.metadata or {})
    return _shown(batch, (0, 0))


@router.get("")
async def all_batches(
    services: ServicesOf,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> dict[str, Any]:
    """The tenant's batches, of all tenants with the admin key; the newest first."""
    async with services.lists.turn(caller.tenant_id):
        listed, has_more = await services.batches.page(tenant_of(caller), limit, after)
        counts = await services.batches.counts(listed)
    return page([_shown(batch, counts[batch.batch_id]) for batch in listed], has_more)


@router.get("/{batch_id}")
async def one_batch(services: ServicesOf, caller: Caller, batch_id: str) -> dict[str, Any]:
    async with services.lists.turn(caller.tenant_id):
        batch = await services.batches.find(tenant_of(caller), batch_id)
        counts = await services.batches.counts([batch])
    return _shown(batch, counts[batch_id])


@router.post("/{batch_id}/cancel")
async def cancel(services: ServicesOf, caller: Changer, batch_id: str) -> dict[str, Any]:
    """Ends the batch with the results that it has."""
    batch = await services.batches.cancel(tenant_of(caller), batch_id)
    return _shown(batch, (await services.batches.counts([batch]))[batch_id])


def _shown(batch: Batch, counts: tuple[int, int]) -> dict[str, Any]:
    errors, metadata = json.loads(batch.errors), json.loads(batch.metadata)
    times = {f"{moment}_at": _seconds(getattr(batch, f"{moment}_unix_us")) for moment in _MOMENTS}
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        **times,
        "request_counts": {"total": batch.num_lines, "completed": counts[0], "failed": counts[1]},
        "metadata": metadata or None,
    }


def _seconds(unix_us: int | None) -> int | None:
    return None if unix_us is None else unix_us // 1_000_000
