"""Server reflection for the public services, with a key: a call without one would hold a connection for nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2 as pb
from grpc_reflection.v1alpha.reflection import SERVICE_NAME, aio

from torchrelay.gateway.grpc.message_decoder import decode
from torchrelay.gateway.grpc.public_calls import Context, PublicCalls
from torchrelay.gateway.inference.core import ClientDisconnected
from torchrelay.inference.v1 import inference_pb2
from torchrelay.inference.v2 import open_inference_pb2

_FILES: Final[tuple[Any, ...]] = (inference_pb2, open_inference_pb2, health_pb2, pb)
_V1: Final = SERVICE_NAME.replace("v1alpha", "v1")  # the same messages under the name of today


class ReflectionServicer:
    """``grpc.reflection.v1.ServerReflection``, and its alpha. It shows no contract between services."""

    def __init__(self, calls: PublicCalls) -> None:
        self._calls = calls
        files: list[FileDescriptor] = [module.DESCRIPTOR for module in _FILES]
        names = [service.full_name for file in files for service in file.services_by_name.values()]
        self._reflection = aio.ReflectionServicer([*names, _V1], _pool(files))

    def add_to(self, server: grpc.aio.Server) -> None:
        handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            self.reflect, response_serializer=pb.ServerReflectionResponse.SerializeToString
        )
        server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
                for name in (_V1, SERVICE_NAME)
            ]
        )

    async def reflect(self, _messages: object, context: Context) -> None:
        principal = await self._calls.authenticate(context)
        with self._calls.stream_held(principal):
            await context.send_initial_metadata(())
            try:
                replies: Any = self._reflection.ServerReflectionInfo(self._requests(context), context)
                async for reply in replies:
                    await self._calls.write(context, reply)
                return
            except ClientDisconnected:
                pass
            await self._calls.abort_untaken(context)

    async def _requests(self, context: Context) -> AsyncIterator[pb.ServerReflectionRequest]:
        while (encoded := await self._calls.receive_next(context)) is not None:
            await self._calls.authenticate(context)  # the stream may be older than the key's revocation
            yield decode(pb.ServerReflectionRequest, encoded)


def _pool(files: Iterable[FileDescriptor]) -> DescriptorPool:
    pool = DescriptorPool()
    for file in files:
        pool.AddSerializedFile(file.serialized_pb)
    return pool
