"""The RPCs about published versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from blake3 import blake3

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.param_store.grpc.messages import version_description
from torchrelay.param_store.remote.keys import compiled_key, file_key
from torchrelay.param_store.remote.versions import check_digest
from torchrelay.param_store.store import Store

Context = grpc.aio.ServicerContext[Any, Any]
log = get_logger(__name__)
_PIECE_BYTES = 1 << 20
_READ_BYTES = 4 << 20  # at a time: an object store takes a request for each
_MAX_COMPILED_BYTES = 256 << 20


class VersionRpcs:
    """Describe, ReadFile, ListVersions, DeleteVersion, DeleteUnnamed, ReadCompiled, WriteCompiled."""

    store: Store
    _writing: asyncio.Semaphore  # for archives, which are in memory until they are complete

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeReply:
        version = await asyncio.to_thread(self.store.versions.describe, request.version_id)
        return pb.DescribeReply(version=version_description(version))

    async def ReadFile(self, request: pb.ReadFileRequest, context: Context) -> AsyncIterator[pb.FileBytes]:
        hasher = blake3()
        async for part in self._parts(file_key(request.digest)):
            hasher.update(part.data)
            yield part
        check_digest(hasher, request.digest)

    async def _parts(self, key: str) -> AsyncIterator[pb.FileBytes]:
        versions = self.store.versions
        num_bytes = await asyncio.to_thread(versions.size, key)
        for begin in range(0, num_bytes, _READ_BYTES):
            part = await asyncio.to_thread(versions.read_part, key, begin, min(_READ_BYTES, num_bytes - begin))
            for offset in range(0, len(part), _PIECE_BYTES):
                yield pb.FileBytes(data=part[offset : offset + _PIECE_BYTES])

    async def DeleteVersion(self, request: pb.DeleteVersionRequest, context: Context) -> pb.DeleteVersionReply:
        delete = self.store.versions.delete
        num_bytes = await asyncio.to_thread(delete, request.version_id, request.published_unix_us)
        log.info("version_deleted", version_id=request.version_id, num_bytes_freed=num_bytes)
        return pb.DeleteVersionReply(num_bytes_freed=num_bytes)

    async def ListVersions(self, request: pb.ListVersionsRequest, context: Context) -> AsyncIterator[pb.StoredVersion]:
        stored = await asyncio.to_thread(self.store.versions.all)
        claims = self.store.uploads.claims()
        for version in stored:
            yield pb.StoredVersion(
                version_id=version.version_id,
                published_unix_us=version.published_unix_us,
                upload_ids=claims.get(version.version_id, ()),
            )

    async def DeleteUnnamed(self, request: pb.DeleteUnnamedRequest, context: Context) -> pb.DeleteUnnamedReply:
        num_bytes = await asyncio.to_thread(self.store.versions.delete_unnamed, request.older_than_s)
        return pb.DeleteUnnamedReply(num_bytes_freed=num_bytes)

    async def ReadCompiled(self, request: pb.CompiledKey, context: Context) -> AsyncIterator[pb.FileBytes]:
        async for part in self._parts(compiled_key(request.pack_id, request.digest)):
            yield part

    async def WriteCompiled(
        self, request_iterator: AsyncIterator[pb.WriteCompiledRequest], context: Context
    ) -> pb.WriteCompiledReply:
        first, archive = await anext(request_iterator, None), bytearray()
        if first is None or first.WhichOneof("part") != "key":
            raise InvalidRequest("the first message of WriteCompiled must be key", field="key")
        key = first.key
        async with self._writing:
            async for part in request_iterator:
                archive += part.data
                if len(archive) > _MAX_COMPILED_BYTES:
                    raise InvalidRequest(f"compiled code may have at most {_MAX_COMPILED_BYTES} bytes", field="data")
            await asyncio.to_thread(self.store.versions.keep_compiled, key.pack_id, key.digest, bytes(archive))
        log.info("compiled_kept", pack_id=key.pack_id, digest=key.digest, num_bytes=len(archive))
        return pb.WriteCompiledReply()
