"""Reads a version's small files from the param-store and verifies their digests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
from blake3 import blake3

from torchrelay.common.errors import DataCorrupted
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.gateway.clients.endpoint import param_store_endpoint

PART_TIMEOUT_S = 5.0  # between two messages of at most 1 MiB
RESTART_S = 10.0  # for a store that has ended until its supervisor has started another


class StoreFileReader:
    """Reads files by digest, without caching. Waits ``restart_s`` for a store that cannot be reached."""

    def __init__(
        self,
        store: ParamStoreStub,
        address: str,
        part_timeout_s: float = PART_TIMEOUT_S,
        restart_s: float = RESTART_S,
    ) -> None:
        self._store = store
        self._part_timeout_s, self._restart_s = part_timeout_s, restart_s
        self._endpoint = param_store_endpoint(address)

    async def save(self, digest: str, name: str, max_bytes: int, path: Path) -> int:
        """Writes the file to ``path`` with at most one message in memory; returns its size.

        Raises ``DataCorrupted`` naming the file, ``NotFound`` or ``Unavailable``.
        """
        try:
            return await self._save(
                self._store.ReadFile(pb.ReadFileRequest(digest=digest)), digest, name, max_bytes, path
            )
        except grpc.aio.AioRpcError as error:
            if not self._endpoint.is_unreachable(error):
                raise self._endpoint.error(error) from error
        call: Any = self._store.ReadFile(pb.ReadFileRequest(digest=digest), wait_for_ready=True)
        with self._endpoint.mapped_errors():
            try:
                async with asyncio.timeout(self._restart_s):
                    await call.wait_for_connection()
            except TimeoutError:
                call.cancel()
                raise self._endpoint.unreachable() from None
            return await self._save(call, digest, name, max_bytes, path)

    async def _save(self, call: Any, digest: str, name: str, max_bytes: int, path: Path) -> int:
        hasher, num_bytes = blake3(), 0
        try:
            with path.open("wb") as file:
                while (part := await self._endpoint.answered(call.read(), self._part_timeout_s)) is not grpc.aio.EOF:
                    hasher.update(part.data)
                    num_bytes += len(part.data)
                    if num_bytes > max_bytes:
                        raise DataCorrupted(f"the model's {name} is larger than {max_bytes} bytes", field=name)
                    file.write(part.data)
        finally:
            call.cancel()
        if hasher.hexdigest() != digest:
            raise DataCorrupted(f"the model's {name} does not match its digest", field=name)
        return num_bytes
