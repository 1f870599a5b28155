"""The RPCs about published versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.param_store.remote.versions import Version
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


def version_description(version: Version) -> pb.VersionDescription:
    """The version as the catalog and the scheduler know it."""
    config = version.config
    return pb.VersionDescription(
        version_id=version.version_id,
        pack_id=version.pack_id,
        pack_bytes=version.manifest.num_bytes,
        architecture=version.manifest.architecture,
        dtype=version.manifest.dtype,
        shape=types_pb2.ModelShape(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            kv_dtype_bytes=version.kv_dtype_bytes,
            max_context_tokens=config.max_context_tokens,
            vocab_size=config.vocab_size,
        ),
        routing_block_tokens=version.document.routing_block_tokens,
        file_digests=version.document.files,
        eos_token_ids=version.eos_token_ids,
        stored_bytes=version.stored_bytes,
    )
