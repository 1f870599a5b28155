"""Client of the param-store: the calls of an upload, with its errors mapped to ours."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

import grpc
import msgspec

from torchrelay.common.errors import Conflict, NotFound, TorchrelayError, Unavailable
from torchrelay.common.net.rpc.errors import is_from_peer
from torchrelay.common.net.rpc.options import ACCEPTED
from torchrelay.control.v1 import param_store_pb2
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.gateway.clients.client_stream import write_while_open
from torchrelay.gateway.clients.endpoint import param_store_endpoint
from torchrelay.gateway.clients.rechunk import ByteStream, rechunk
from torchrelay.gateway.core import EmbeddingSpec, ModelShape, Version

_LOOKUP_TIMEOUT_S = 10.0  # for calls that move no model bytes
_LIST_TIMEOUT_S = 60.0
_LEAST_BYTES_PER_S = 5e6  # at which the store sends a file to its remote store
_SILENCE_S = 30.0  # in an upload or a commit; the store tells a long stage again every few seconds
OBJECT_PART_BYTES = 1 << 20
_DIGEST_BYTES_PER_S = 64 << 20  # a store that was restarted reads what it has; all of a file must reach its disk


class StoreClient:
    """All methods raise the store's errors, or ``Unavailable`` if it cannot be reached."""

    def __init__(self, channel: grpc.aio.Channel, address: str, silence_s: float = _SILENCE_S) -> None:
        self._stub = ParamStoreStub(channel)
        self._silence_s = silence_s
        self._endpoint = param_store_endpoint(address)

    async def begin(
        self, upload_id: str, tenant_id: str, files: Sequence[param_store_pb2.DeclaredFile], quota_bytes: int
    ) -> list[param_store_pb2.FileState]:
        request = param_store_pb2.BeginUploadRequest(
            upload_id=upload_id, tenant_id=tenant_id, files=files, quota_bytes=quota_bytes
        )
        with self._endpoint.mapped_errors():
            return list((await self._stub.BeginUpload(request, timeout=_LOOKUP_TIMEOUT_S)).files)

    async def describe(self, upload_id: str) -> param_store_pb2.UploadState:
        request = param_store_pb2.DescribeUploadRequest(upload_id=upload_id)
        with self._endpoint.mapped_errors():
            return await self._stub.DescribeUpload(request, timeout=_LOOKUP_TIMEOUT_S)

    async def put_file(
        self, upload_id: str, path: str, offset: int, body: ByteStream, body_bytes: int = 0
    ) -> param_store_pb2.FileState:
        """Streams ``body`` into the file, holding one slice in memory; flow control reaches back to the client.

        ``body_bytes``: the length that the body declares, 0 if it declares none. Raises ``Conflict`` if the file
        continues at another offset, ``UploadRefused`` for more bytes than the file declares, ``Unavailable`` also if
        the store stops reading.
        """
        call = self._stub.PutFile()
        opening = param_store_pb2.PutFileRequest.Open(
            upload_id=upload_id, path=path, offset=offset, num_bytes=body_bytes
        )
        try:
            limit_s = await write_while_open(call, self._write_file(call, opening, body))
            return await self._endpoint.answered(call, limit_s or self._silence_s)
        except grpc.aio.AioRpcError as error:
            raise self._transfer_error(error, path) from error
        finally:
            call.cancel()

    def _transfer_error(self, error: grpc.aio.AioRpcError, path: str) -> TorchrelayError:
        """The error of an interrupted transfer, which can be resumed."""
        mapped = self._endpoint.error(error)
        if is_from_peer(error):
            return mapped
        cause = mapped.message if isinstance(mapped, Unavailable) else "the param-store ended the transfer"
        return Unavailable(f"{cause}; resume {path} at the offset in the upload's state", field=path)

    async def _write_file(self, call: Any, opening: param_store_pb2.PutFileRequest.Open, body: ByteStream) -> float:
        """Sends the body once the store has accepted its opening. Returns how long the store may then take to answer,
        in seconds.
        """
        limit_s = self._silence_s + opening.offset / _DIGEST_BYTES_PER_S
        await self._endpoint.answered(call.write(param_store_pb2.PutFileRequest(open=opening)), limit_s)
        metadata = await self._endpoint.answered(call.initial_metadata(), limit_s)
        if ACCEPTED not in tuple(metadata or ()):  # refused: the status tells why, and the body is not asked for
            return limit_s
        async for data in rechunk(body):
            limit_s += len(data) / _DIGEST_BYTES_PER_S
            await self._endpoint.answered(call.write(param_store_pb2.PutFileRequest(data=data)), limit_s)
        await call.done_writing()
        return limit_s

    async def commit(
        self,
        upload_id: str,
        largest_slot_bytes: int,
        base_version_id: str = "",
        engines: Sequence[str] = (),
        quantize: str = "",
    ) -> AsyncGenerator[param_store_pb2.CommitProgress]:
        """The steps of a commit as they happen, the last one with its version; closing the iterator cancels the commit.

        ``base_version_id`` is that of the model that an adapter changes, ``engines`` are those that may compute the
        model; none: they are not known. ``quantize``: "int8", or empty. Raises ``Unavailable`` also if the store falls
        silent.
        """
        request = param_store_pb2.CommitRequest(
            upload_id=upload_id,
            largest_slot_bytes=largest_slot_bytes,
            base_version_id=base_version_id,
            engines=engines,
            quantize=quantize,
        )
        call: Any = self._stub.Commit(request)
        try:
            with self._endpoint.mapped_errors():
                while (step := await self._endpoint.answered(call.read(), self._silence_s)) is not grpc.aio.EOF:
                    yield step
        finally:
            call.cancel()

    async def abort(self, upload_id: str) -> None:
        """Deletes the received bytes, or confirms the publication. An upload unknown to the store is not an error."""
        request = param_store_pb2.AbortUploadRequest(upload_id=upload_id)
        with suppress(NotFound), self._endpoint.mapped_errors():
            await self._stub.AbortUpload(request, timeout=_LOOKUP_TIMEOUT_S)

    async def put_object(self, tenant_id: str, name: str, body: ByteStream, max_bytes: int) -> int:
        """Streams a tenant's file to the store; returns its size. Raises ``InvalidRequest`` if it is larger."""
        call: Any = self._stub.PutObject()
        num_sent = 0
        opening = param_store_pb2.PutObjectRequest.Open(object=_object(tenant_id, name), max_bytes=max_bytes)

        async def write() -> None:
            await self._endpoint.answered(call.write(param_store_pb2.PutObjectRequest(open=opening)), self._silence_s)
            await self._endpoint.answered(call.initial_metadata(), self._silence_s)
            async for data in rechunk(body):
                await self._endpoint.answered(call.write(param_store_pb2.PutObjectRequest(data=data)), self._silence_s)
                nonlocal num_sent
                num_sent += len(data)
            await call.done_writing()

        try:
            with self._endpoint.mapped_errors():
                await write_while_open(call, write())
                publishing_s = _LIST_TIMEOUT_S + num_sent / _LEAST_BYTES_PER_S
                reply: param_store_pb2.PutObjectReply = await self._endpoint.answered(call, publishing_s)
                return reply.num_bytes
        finally:
            call.cancel()

    async def read_object(self, tenant_id: str, name: str, num_bytes: int) -> AsyncGenerator[bytes]:
        """The content of a tenant's file, of which one part is in memory."""
        for offset in range(0, num_bytes, OBJECT_PART_BYTES):
            length = min(OBJECT_PART_BYTES, num_bytes - offset)
            request = param_store_pb2.ReadObjectRequest(
                object=_object(tenant_id, name), offset=offset, num_bytes=length
            )
            with self._endpoint.mapped_errors():
                part = await self._stub.ReadObject(request, timeout=_LOOKUP_TIMEOUT_S)
            yield part.data

    async def delete_object(self, tenant_id: str, name: str) -> None:
        with self._endpoint.mapped_errors():
            await self._stub.DeleteObject(_object(tenant_id, name), timeout=_LOOKUP_TIMEOUT_S)

    async def version(self, version_id: str) -> Version | None:
        """A version in the remote store; None if it has no version with this id."""
        request = param_store_pb2.DescribeRequest(version_id=version_id)
        with suppress(NotFound), self._endpoint.mapped_errors():
            return version_of((await self._stub.Describe(request, timeout=_LOOKUP_TIMEOUT_S)).version)
        return None

    async def versions(self) -> list[param_store_pb2.StoredVersion]:
        """All versions in the remote store."""
        with self._endpoint.mapped_errors():
            call = self._stub.ListVersions(param_store_pb2.ListVersionsRequest(), timeout=_LIST_TIMEOUT_S)
            return [version async for version in call]

    async def delete_version(self, version: param_store_pb2.StoredVersion) -> bool:
        """Frees a version's bytes; returns False if it was published again since it was listed."""
        request = param_store_pb2.DeleteVersionRequest(
            version_id=version.version_id, published_unix_us=version.published_unix_us
        )
        try:
            with suppress(NotFound), self._endpoint.mapped_errors():
                await self._stub.DeleteVersion(request, timeout=_LIST_TIMEOUT_S)
        except Conflict:
            return False
        return True

    async def delete_unnamed(self, older_than_s: float) -> int:
        """Frees packs and files that no version names; returns the bytes."""
        request = param_store_pb2.DeleteUnnamedRequest(older_than_s=older_than_s)
        with self._endpoint.mapped_errors():
            return (await self._stub.DeleteUnnamed(request, timeout=_LIST_TIMEOUT_S)).num_bytes_freed


def _object(tenant_id: str, name: str) -> param_store_pb2.ObjectName:
    return param_store_pb2.ObjectName(tenant_id=tenant_id, name=name)


def version_of(description: param_store_pb2.VersionDescription) -> Version:
    """The store's description of a version as the catalog stores it."""
    return Version(
        version_id=description.version_id,
        pack_id=description.pack_id,
        pack_bytes=description.pack_bytes,
        architecture=description.architecture,
        dtype=description.dtype,
        shape=msgspec.convert(description.shape, ModelShape, from_attributes=True),
        routing_block_tokens=description.routing_block_tokens,
        stored_bytes=description.stored_bytes,
        eos_token_ids=tuple(description.eos_token_ids),
        file_digests=dict(description.file_digests),
        has_no_head=description.has_no_head,
        base_version_id=description.base_version_id,
        engine=description.engine,
        embedding=_embedding_of(description.embedding) if description.HasField("embedding") else None,
    )


def _embedding_of(declared: param_store_pb2.Embedding) -> EmbeddingSpec:
    return EmbeddingSpec(declared.pooling, declared.num_dimensions, declared.is_normalized)
