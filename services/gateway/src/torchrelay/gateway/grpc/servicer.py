"""``inference.v1.Inference``: the same requests as over REST, with the key in the call's metadata.

Both methods are registered as if their request were a stream: grpcio then calls them when the metadata has arrived, and
the message is received only after the key has been checked, and in the tenant's turn. It is received as bytes, because
grpcio ends a call whose message it cannot decode with an internal error.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import DeadlineExceeded, InvalidRequest
from torchrelay.common.ids import new_id
from torchrelay.common.net.rpc.errors import status_of
from torchrelay.gateway.core import Principal
from torchrelay.gateway.edge.grpc_server import show_key
from torchrelay.gateway.grpc.converters import choice_deltas, params_of_request, usage_message
from torchrelay.gateway.grpc.message_decoder import decode
from torchrelay.gateway.inference.core import ClientDisconnected
from torchrelay.gateway.inference.execution.running_request import SETTLE_TIMEOUT_S
from torchrelay.gateway.inference.interfaces import Authenticator, ModelCatalog
from torchrelay.gateway.inference.pipeline import RequestPipeline
from torchrelay.gateway.limits.connection_shares import ConnectionShares
from torchrelay.inference.v1 import inference_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]
_MESSAGES_AWAITED = 4  # that take the whole time limit, before a call's own; else silent calls delay it forever


class GatewayServicer:
    """``inference.v1.Inference``.

    ``message_timeout_s``: how long a message may take to arrive. ``answer_silence_s``: how long a client may take
    nothing of its answer.
    """

    def __init__(
        self,
        keys: Authenticator,
        catalog: ModelCatalog,
        pipeline: RequestPipeline,
        shares: ConnectionShares,
        message_timeout_s: float,
        answer_silence_s: float,
    ) -> None:
        self._keys = keys
        self._catalog = catalog
        self._pipeline = pipeline
        self._shares = shares
        self._message_timeout_s = message_timeout_s
        self._answer_silence_s = answer_silence_s

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
        principal = await self._authenticate(context)
        with self._shares.requests.held(principal.tenant_id):
            try:
                await self._answer(context, principal, arrived_unix_us, timeout_s)
                return
            except ClientDisconnected:
                pass
            message = f"nothing of the answer was taken for {self._answer_silence_s:g} s (setting answer_silence_s)"
            # grpcio cannot reset a call: this waits until the client reads on or leaves, in its tenant's share.
            await context.abort(*status_of(DeadlineExceeded(message)))

    async def _answer(
        self, context: Context, principal: Principal, arrived_unix_us: int, timeout_s: float | None
    ) -> None:
        with self._shares.body_bytes.account(principal.tenant_id) as body_bytes:
            request = decode(pb.GenerateRequest, await self._receive(context, principal))
            body_bytes.take(request.ByteSize())
            params, request_id = params_of_request(request), new_id("req")
            wants_ids = request.return_token_ids
            entering = self._pipeline.session(principal, params, request_id, arrived_unix_us, timeout_s)
            del request, params  # otherwise kept until the end of the answer
            async with entering as session:
                body_bytes.release()  # the prompt is encoded
                await context.send_initial_metadata(())  # else abort would send it again, beside a write that waits
                while not session.request.is_finished:
                    if new_tokens := await session.request.next():
                        deltas = choice_deltas(session, new_tokens, with_ids=wants_ids)
                        await self._write(context, pb.GenerateEvent(request_id=request_id, choices=deltas))
                await session.request.settled(SETTLE_TIMEOUT_S)
                usage = usage_message(session.request.usage)
                await self._write(context, pb.GenerateEvent(request_id=request_id, usage=usage))

    async def _write(self, context: Context, event: pb.GenerateEvent) -> None:
        try:
            async with asyncio.timeout(self._answer_silence_s):
                await context.write(event)
        except TimeoutError:
            raise ClientDisconnected from None

    async def list_models(self, _messages: object, context: Context) -> pb.ListModelsReply:
        principal = await self._authenticate(context)
        with self._shares.requests.held(principal.tenant_id):
            decode(pb.ListModelsRequest, await self._receive(context, principal))
            async with self._shares.queries.turn(principal.tenant_id):
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

    async def _receive(self, context: Context, principal: Principal) -> bytes:
        """The encoded request. gRPC buffers 64 KiB of it; a longer message arrives in the tenant's turn."""
        limit_s = self._message_timeout_s
        try:
            # A message first waits for the tenant's other messages, then has a time limit of its own.
            async with (
                asyncio.timeout(_MESSAGES_AWAITED * limit_s),
                self._shares.messages.turn(principal.tenant_id),
                asyncio.timeout(limit_s),
            ):
                # By the iterator, grpcio would keep it to the end of the call, and beyond.
                message: bytes | object = await context.read()
        except TimeoutError:
            # Also when it waited for the tenant's other messages all that time.
            raise DeadlineExceeded(f"the message did not arrive within {self._message_timeout_s:g} s") from None
        if not isinstance(message, bytes):  # grpc.aio.EOF
            raise InvalidRequest("the call has no message")
        return message

    async def _authenticate(self, context: Context) -> Principal:
        metadata = context.invocation_metadata() or ()
        key = next((value for name, value in metadata if name == "authorization"), None)
        principal = await self._keys.authenticate(key.decode("latin-1") if isinstance(key, bytes) else key)
        show_key(principal.tenant_id)
        return principal
