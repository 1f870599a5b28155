"""The param-store as the gateway sees it: the calls of an upload, with its errors as ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc

from torchrelay.common.errors import NotFound, Unavailable
from torchrelay.control.v1 import param_store_pb2, types_pb2
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.gateway.clients.endpoint import param_store_endpoint
from torchrelay.gateway.clients.rechunk import ByteStream, rechunk
from torchrelay.gateway.core import ModelShape, Version

_LOOKUP_TIMEOUT_S = 10.0  # deadline of calls that only look something up


@dataclass(frozen=True, slots=True)
class DeclaredFile:
    path: str
    num_bytes: int
    sha256: str  # hex


@dataclass(frozen=True, slots=True)
class CommitProgress:
    """One step of a commit; ``version`` comes with the last."""

    stage: str
    num_bytes_done: int
    num_bytes_total: int
    version: Version | None


class StoreClient:
    """All methods raise what the store raised, or ``Unavailable`` when it cannot be reached."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = ParamStoreStub(channel)
        self._endpoint = param_store_endpoint(address)

    async def begin(
        self, upload_id: str, tenant_id: str, files: Sequence[DeclaredFile], quota_bytes: int
    ) -> list[param_store_pb2.FileState]:
        declared = [
            param_store_pb2.DeclaredFile(path=file.path, num_bytes=file.num_bytes, sha256=file.sha256) for file in files
        ]
        request = param_store_pb2.BeginUploadRequest(
            upload_id=upload_id, tenant_id=tenant_id, files=declared, quota_bytes=quota_bytes
        )
        try:
            return list((await self._stub.BeginUpload(request, timeout=_LOOKUP_TIMEOUT_S)).files)
        except grpc.aio.AioRpcError as error:
            raise self._endpoint.error(error) from error

    async def describe(self, upload_id: str) -> list[param_store_pb2.FileState]:
        request = param_store_pb2.DescribeUploadRequest(upload_id=upload_id)
        try:
            return list((await self._stub.DescribeUpload(request, timeout=_LOOKUP_TIMEOUT_S)).files)
        except grpc.aio.AioRpcError as error:
            raise self._endpoint.error(error) from error

    async def put_file(self, upload_id: str, path: str, offset: int, body: ByteStream) -> param_store_pb2.FileState:
        """Streams ``body`` into the file. Flow control reaches back to the sender: memory is one slice."""

        call = self._stub.PutFile()
        opening = param_store_pb2.PutFileRequest.Open(upload_id=upload_id, path=path, offset=offset)
        try:
            with suppress(asyncio.InvalidStateError):  # the store has answered already: the call below says what
                await call.write(param_store_pb2.PutFileRequest(open=opening))
                async for data in rechunk(body):
                    await call.write(param_store_pb2.PutFileRequest(data=data))
                await call.done_writing()
            return await call
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.INTERNAL:  # grpcio's own: its write lost the race against the answer
                message = f"the param-store ended the transfer of {path}: go on where the upload's state says it is"
                raise Unavailable(message, field=path) from error
            raise self._endpoint.error(error) from error
        finally:
            call.cancel()

    async def commit(self, upload_id: str, largest_slot_bytes: int) -> AsyncGenerator[CommitProgress]:
        """The steps of a commit as they happen; closing the iterator cancels it."""
        request = param_store_pb2.CommitRequest(upload_id=upload_id, largest_slot_bytes=largest_slot_bytes)
        call = self._stub.Commit(request)
        try:
            async for said in call:
                version = version_of(said.version) if said.HasField("version") else None
                yield CommitProgress(said.stage, said.num_bytes_done, said.num_bytes_total, version)
        except grpc.aio.AioRpcError as error:
            raise self._endpoint.error(error) from error
        finally:
            call.cancel()

    async def abort(self, upload_id: str) -> None:
        """Drops what was received; an upload the store does not know is no error."""
        try:
            await self._stub.AbortUpload(
                param_store_pb2.AbortUploadRequest(upload_id=upload_id), timeout=_LOOKUP_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            mapped = self._endpoint.error(error)
            if not isinstance(mapped, NotFound):
                raise mapped from error

    async def delete_version(self, version_id: str) -> None:
        """Frees a version's bytes; a version the store does not know is no error."""
        try:
            request = param_store_pb2.DeleteVersionRequest(version_id=version_id)
            await self._stub.DeleteVersion(request, timeout=_LOOKUP_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            mapped = self._endpoint.error(error)
            if not isinstance(mapped, NotFound):
                raise mapped from error


def version_of(said: param_store_pb2.VersionDescription) -> Version:
    """The store's description as the catalog keeps it."""
    return Version(
        version_id=said.version_id,
        pack_id=said.pack_id,
        pack_bytes=said.pack_bytes,
        architecture=said.architecture,
        dtype=said.dtype,
        shape=_shape_of(said.shape),
        routing_block_tokens=said.routing_block_tokens,
        stored_bytes=said.stored_bytes,
        eos_token_ids=tuple(said.eos_token_ids),
        file_digests=dict(said.file_digests),
    )


def _shape_of(said: types_pb2.ModelShape) -> ModelShape:
    return ModelShape(
        num_layers=said.num_layers,
        num_kv_heads=said.num_kv_heads,
        head_dim=said.head_dim,
        kv_dtype_bytes=said.kv_dtype_bytes,
        max_context_tokens=said.max_context_tokens,
        vocab_size=said.vocab_size,
    )
