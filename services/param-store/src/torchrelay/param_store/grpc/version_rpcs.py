"""The RPCs about published versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.param_store.grpc.messages import version_description
from torchrelay.param_store.store import Store

Context = grpc.aio.ServicerContext[Any, Any]
log = get_logger(__name__)
_PIECE_BYTES = 1 << 20


class VersionRpcs:
    """Describe, ReadFile, DeleteVersion."""

    store: Store

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeReply:
        version = await asyncio.to_thread(self.store.versions.describe, request.version_id)
        return pb.DescribeReply(version=version_description(version))

    async def ReadFile(self, request: pb.ReadFileRequest, context: Context) -> AsyncIterator[pb.FileBytes]:
        data = await asyncio.to_thread(self.store.versions.read_file, request.digest)
        for begin in range(0, len(data), _PIECE_BYTES):
            yield pb.FileBytes(data=data[begin : begin + _PIECE_BYTES])

    async def DeleteVersion(self, request: pb.DeleteVersionRequest, context: Context) -> pb.DeleteVersionReply:
        num_bytes = await asyncio.to_thread(self.store.versions.delete, request.version_id)
        log.info("version_deleted", version_id=request.version_id, num_bytes_freed=num_bytes)
        return pb.DeleteVersionReply(num_bytes_freed=num_bytes)
