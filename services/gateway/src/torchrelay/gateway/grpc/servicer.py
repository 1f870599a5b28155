"""``inference.v1.Inference``: the same requests as over REST, with the key in the call's metadata."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from torchrelay.common.clock import now_unix_us
from torchrelay.common.ids import new_id
from torchrelay.gateway.core import Principal
from torchrelay.gateway.grpc.converters import choice_deltas, params_of_request, usage_message
from torchrelay.gateway.inference.execution.running_request import SETTLE_TIMEOUT_S
from torchrelay.gateway.inference.interfaces import Authenticator, ModelCatalog
from torchrelay.gateway.inference.pipeline import RequestPipeline
from torchrelay.inference.v1 import inference_pb2 as pb
from torchrelay.inference.v1.inference_pb2_grpc import InferenceServicer

Context = grpc.aio.ServicerContext[Any, Any]


class GatewayServicer(InferenceServicer):
    """``inference.v1.Inference``."""

    def __init__(self, keys: Authenticator, catalog: ModelCatalog, pipeline: RequestPipeline) -> None:
        self._keys = keys
        self._catalog = catalog
        self._pipeline = pipeline

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateEvent]:
        arrived_unix_us, timeout_s = now_unix_us(), context.time_remaining()
        principal = await self._authenticate(context)
        params, request_id = params_of_request(request), new_id("req")
        async with self._pipeline.session(principal, params, request_id, arrived_unix_us, timeout_s) as session:
            while not session.request.is_finished:
                if new_tokens := await session.request.next():
                    deltas = choice_deltas(session, new_tokens, with_ids=request.return_token_ids)
                    yield pb.GenerateEvent(request_id=request_id, choices=deltas)
            await session.request.settled(SETTLE_TIMEOUT_S)
            yield pb.GenerateEvent(request_id=request_id, usage=usage_message(session.request.usage))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsReply:
        models = await self._catalog.models(await self._authenticate(context))
        return pb.ListModelsReply(
            models=[
                pb.ModelInfo(
                    id=model.name,
                    version=model.version.version_id,
                    created_unix_s=model.created_unix_us // 1_000_000,
                )
                for model in models
            ]
        )

    async def _authenticate(self, context: Context) -> Principal:
        for name, value in context.invocation_metadata() or ():
            if name == "authorization":
                return await self._keys.authenticate(value if isinstance(value, str) else value.decode("latin-1"))
        return await self._keys.authenticate(None)
