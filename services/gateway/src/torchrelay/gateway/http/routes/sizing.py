"""/v1/sizing: the memory that a model takes, and the speed that the platform's slots give it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.catalog.sizing import footprint_of_version, sizing_shown
from torchrelay.gateway.http.dependencies import Caller, ServicesOf
from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.sizing.footprint import footprint_of
from torchrelay.modelspec.sizing.operating_point import Workload

router = APIRouter(prefix="/v1/sizing")
MAX_TOKENS = 10_000_000
PromptTokens = Annotated[int, Query(ge=1, le=MAX_TOKENS)]
AnswerTokens = Annotated[int, Query(ge=1, le=MAX_TOKENS)]
_PROMPT, _ANSWER = 256, 128  # of the curve, unless the caller says


class SizingBody(BaseModel):
    """A model before its upload."""

    model_config = ConfigDict(extra="forbid", strict=True)
    config: dict[str, Any]  # config.json
    weights_bytes: int = Field(0, ge=0, le=1 << 50)  # of its files; 0: by the config's shapes
    quantize: bool = False  # the weights of linear layers will be in int8
    prompt: int = Field(_PROMPT, ge=1, le=MAX_TOKENS)
    answer: int = Field(_ANSWER, ge=1, le=MAX_TOKENS)


@router.get("")
async def sizing_of_model(
    services: ServicesOf,
    caller: Caller,
    model: str,
    prompt: PromptTokens = _PROMPT,
    answer: AnswerTokens = _ANSWER,
) -> dict[str, Any]:
    """The sizes of a published model, the step times that workers have learned, and the latencies by the batch."""
    published = await services.catalog.resolve(caller, model)
    footprint = footprint_of_version(published.version)
    async with services.explanations.turn(caller.tenant_id):
        view = await services.scheduler.cluster()
    version_id = published.version.served_version_id
    shown = sizing_shown(footprint, view, version_id, _work(prompt, answer), is_admin=caller.is_admin)
    names = {"model": published.name, "vocab_size": published.version.shape.vocab_size}
    return {**names, **shown}


@router.post("")
async def sizing_of_config(services: ServicesOf, caller: Caller, body: SizingBody) -> dict[str, Any]:
    """The same before an upload, by config.json: times are estimated by those of the other models."""
    try:
        footprint = footprint_of(body.config, body.weights_bytes, to_int8=body.quantize)
    except UnsupportedModel as error:
        raise InvalidRequest(str(error), field=f"config.{error.field}") from error
    async with services.explanations.turn(caller.tenant_id):
        view = await services.scheduler.cluster()
    return sizing_shown(footprint, view, "", _work(body.prompt, body.answer), is_admin=caller.is_admin)


def _work(prompt: int, answer: int) -> Workload:
    unlimited = float("inf")
    return Workload(1.0, prompt, answer, unlimited, unlimited)
