"""The calls of the Open Inference Protocol, with the keys, limits and bills of the other dialects."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from importlib.metadata import version
from typing import Any

import grpc

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import InvalidRequest, NotFound, TorchrelayError
from torchrelay.common.ids import new_id
from torchrelay.common.net.rpc.health import Faults
from torchrelay.gateway.core import Principal, PublishedModel
from torchrelay.gateway.dialects.open_inference.answers import InferAnswer
from torchrelay.gateway.dialects.open_inference.parameters import params_of
from torchrelay.gateway.dialects.open_inference.tensors import check_outputs, input_metadata, inputs_of, output_metadata
from torchrelay.gateway.grpc.message_decoder import decode
from torchrelay.gateway.grpc.public_calls import Context, PublicCalls
from torchrelay.gateway.inference.core import ClientDisconnected
from torchrelay.gateway.inference.execution.running_request import SETTLE_TIMEOUT_S
from torchrelay.gateway.inference.interfaces import ModelCatalog
from torchrelay.gateway.inference.pipeline import RequestPipeline
from torchrelay.inference.v2 import open_inference_pb2 as pb

SERVICE = "inference.GRPCInferenceService"


class OpenInferenceServicer:
    """``inference.GRPCInferenceService``. ``fault`` says why the gateway cannot serve; empty if it can."""

    def __init__(self, calls: PublicCalls, catalog: ModelCatalog, pipeline: RequestPipeline, fault: Faults) -> None:
        self._calls = calls
        self._catalog = catalog
        self._pipeline = pipeline
        self._fault = fault

    def add_to(self, server: grpc.aio.Server) -> None:
        unary: dict[str, tuple[Callable[..., Awaitable[Any]], Any]] = {
            "ServerLive": (self.server_live, pb.ServerLiveResponse),
            "ServerReady": (self.server_ready, pb.ServerReadyResponse),
            "ServerMetadata": (self.server_metadata, pb.ServerMetadataResponse),
            "ModelReady": (self.model_ready, pb.ModelReadyResponse),
            "ModelMetadata": (self.model_metadata, pb.ModelMetadataResponse),
            "ModelInfer": (self.model_infer, pb.ModelInferResponse),
        }
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.stream_unary_rpc_method_handler(call, response_serializer=reply.SerializeToString)
            for name, (call, reply) in unary.items()
        }
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self.model_stream_infer, response_serializer=pb.ModelStreamInferResponse.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    # -- without a key, hence without their messages, which are empty ----------------------------------------------

    async def server_live(self, _messages: object, _context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, _messages: object, _context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=not await self._fault())

    async def server_metadata(self, _messages: object, _context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="torchrelay", version=version("torchrelay-gateway"))

    # -- with a key ------------------------------------------------------------------------------------------------

    async def model_ready(self, _messages: object, context: Context) -> pb.ModelReadyResponse:
        principal = await self._calls.authenticate(context)
        with self._calls.shares.requests.held(principal.tenant_id):
            request = decode(pb.ModelReadyRequest, await self._calls.receive(context, principal))
            try:
                await self._model(principal, request.name, request.version)
            except NotFound:
                return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    async def model_metadata(self, _messages: object, context: Context) -> pb.ModelMetadataResponse:
        principal = await self._calls.authenticate(context)
        with self._calls.shares.requests.held(principal.tenant_id):
            request = decode(pb.ModelMetadataRequest, await self._calls.receive(context, principal))
            model = await self._model(principal, request.name, request.version)
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=[model.version.version_id],
            platform="torchrelay",
            inputs=input_metadata(),
            outputs=output_metadata(),
        )

    async def model_infer(self, _messages: object, context: Context) -> pb.ModelInferResponse:
        arrived_unix_us = now_unix_us()
        principal = await self._calls.authenticate(context)
        with self._calls.shares.requests.held(principal.tenant_id):
            request = decode(pb.ModelInferRequest, await self._calls.receive(context, principal))
            responses = self._answer(context, principal, request, arrived_unix_us, allows_stream=False)
            del request  # otherwise kept until the end of the answer, as each request of a stream would be
            return [response async for response in responses][-1]

    async def model_stream_infer(self, _messages: object, context: Context) -> None:
        principal = await self._calls.authenticate(context)
        with self._calls.stream_held(principal):
            await context.send_initial_metadata(())  # else abort would send it again, beside a write that waits
            try:
                while await self._answer_next(context, principal):
                    pass
                return
            except ClientDisconnected:
                pass
            await self._calls.abort_untaken(context)

    async def _answer_next(self, context: Context, principal: Principal) -> bool:
        """Answers the next request of a stream, which goes on if the request fails; whether there was one."""
        encoded = await self._calls.receive_next(context)
        if encoded is None:
            return False
        principal = await self._calls.authenticate(context)  # the stream may be older than the key's revocation
        arrived_unix_us, request_id = now_unix_us(), ""
        try:
            request = decode(pb.ModelInferRequest, encoded)
            request_id = request.id
            answering = self._answer(context, principal, request, arrived_unix_us, allows_stream=True)
            del encoded, request
            async with aclosing(answering) as responses:
                async for response in responses:
                    await self._calls.write(context, pb.ModelStreamInferResponse(infer_response=response))
        except TorchrelayError as error:
            failed = pb.ModelStreamInferResponse(error_message=f"{error.code}: {error.message}")
            failed.infer_response.id = request_id
            await self._calls.write(context, failed)
        return True

    async def _answer(
        self,
        context: Context,
        principal: Principal,
        request: pb.ModelInferRequest,
        arrived_unix_us: int,
        *,
        allows_stream: bool,
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        """The responses to a request: a final one, after one for each step if it is streamed."""
        with self._calls.shares.body_bytes.account(principal.tenant_id) as body_bytes:
            body_bytes.take(request.ByteSize())
            check_outputs(request)
            params, is_stream = params_of(request, inputs_of(request))
            if is_stream and not allows_stream:
                raise InvalidRequest(
                    "stream: true is for ModelStreamInfer; ModelInfer has one response", field="stream"
                )
            await self._model(principal, request.model_name, request.model_version)
            entering = self._pipeline.session(
                principal, params, new_id("req"), arrived_unix_us, context.time_remaining()
            )
            del params  # otherwise kept until the end of the answer
            async with entering as session:
                answer = InferAnswer(request, session)
                del request
                body_bytes.release()  # the prompt is encoded
                running = session.request
                while not running.is_finished:
                    if deltas := await running.next():
                        answer.add(deltas)
                        if is_stream and not running.is_finished:
                            yield answer.response(running.usage, is_final=False)
                await running.settled(SETTLE_TIMEOUT_S)
                yield answer.response(running.usage, is_final=True)

    async def _model(self, principal: Principal, name: str, version_id: str) -> PublishedModel:
        """The model in this version, which must be the current one if it is given. Raises ``NotFound``."""
        model = await self._catalog.resolve(principal, name)
        if version_id not in ("", model.version.version_id):
            message = f"{model.name} has no version {version_id[:80]!r}; its version is {model.version.version_id}"
            raise NotFound(message, field="model_version")
        return model
