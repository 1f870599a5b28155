"""``inference.v1.Inference``: the same requests as over REST, with the key in the call's metadata."""

from __future__ import annotations

from typing import Any

import grpc

from torchrelay.common.clock import now_unix_us
from torchrelay.common.ids import new_id
from torchrelay.gateway.core import Principal
from torchrelay.gateway.dialects.inference_v1.messages import AnswerConverter, params_of_request, usage_message
from torchrelay.gateway.grpc.message_decoder import decode
from torchrelay.gateway.grpc.public_calls import Context, PublicCalls
from torchrelay.gateway.inference.core import ClientDisconnected
from torchrelay.gateway.inference.execution.running_request import SETTLE_TIMEOUT_S
from torchrelay.gateway.inference.interfaces import ModelCatalog
from torchrelay.gateway.inference.pipeline import RequestPipeline
from torchrelay.inference.v1 import inference_pb2 as pb


class GatewayServicer:
    """``inference.v1.Inference``."""

    def __init__(self, calls: PublicCalls, catalog: ModelCatalog, pipeline: RequestPipeline) -> None:
        self._calls = calls
        self._catalog = catalog
        self._pipeline = pipeline
        self._shares = calls.shares

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": grpc.stream_stream_rpc_method_handler(
                self.generate,
                response_serializer=pb.GenerateEvent.SerializeToString,
            ),
            "ListModels": grpc.stream_unary_rpc_method_handler(
                self.list_models,
                response_serializer=pb.ListModelsReply.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("torchrelay.inference.v1.Inference", handlers),)
        )

    async def generate(self, _messages: object, context: Context) -> None:
        arrived_unix_us, timeout_s = now_unix_us(), context.time_remaining()
        principal = await self._calls.authenticate(context)
        with self._shares.requests.held(principal.tenant_id):
            try:
                await self._answer(context, principal, arrived_unix_us, timeout_s)
                return
            except ClientDisconnected:
                pass
            await self._calls.abort_untaken(context)

    async def _answer(
        self, context: Context, principal: Principal, arrived_unix_us: int, timeout_s: float | None
    ) -> None:
        with self._shares.body_bytes.account(principal.tenant_id) as body_bytes:
            request = decode(pb.GenerateRequest, await self._calls.receive(context, principal))
            body_bytes.take(request.ByteSize())
            params, request_id = params_of_request(request), new_id("req")
            with_ids = request.return_token_ids
            entering = self._pipeline.session(principal, params, request_id, arrived_unix_us, timeout_s)
            del request, params  # otherwise kept until the end of the answer
            async with entering as session:
                body_bytes.release()  # the prompt is encoded
                answer = AnswerConverter(session, with_ids=with_ids)
                await context.send_initial_metadata(())  # else abort would send it again, beside a write that waits
                while not session.request.is_finished:
                    if new_tokens := await session.request.next():
                        choices = answer.choices_of(new_tokens)
                        await self._calls.write(context, pb.GenerateEvent(request_id=request_id, choices=choices))
                await session.request.settled(SETTLE_TIMEOUT_S)
                usage = usage_message(session.request.usage)
                await self._calls.write(context, pb.GenerateEvent(request_id=request_id, usage=usage))

    async def list_models(self, _messages: object, context: Context) -> pb.ListModelsReply:
        principal = await self._calls.authenticate(context)
        with self._shares.requests.held(principal.tenant_id):
            decode(pb.ListModelsRequest, await self._calls.receive(context, principal))
            async with self._shares.lists.turn(principal.tenant_id):
                models = await self._catalog.models(principal)
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
