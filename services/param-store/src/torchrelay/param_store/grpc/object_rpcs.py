"""The RPCs about files of tenants, which the gateway names and counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import grpc

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.host.disk import write_error
from torchrelay.common.net.rpc.options import ACCEPTED
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.param_store.grpc.upload_rpcs import MAX_PART_BYTES
from torchrelay.param_store.remote.keys import object_key
from torchrelay.param_store.store import DRAFT_PREFIX, Store

Context = grpc.aio.ServicerContext[Any, Any]


class ObjectRpcs:
    """PutObject, ReadObject, DeleteObject."""

    store: Store

    async def PutObject(
        self, request_iterator: AsyncIterator[pb.PutObjectRequest], context: Context
    ) -> pb.PutObjectReply:
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("part") != "open":
            raise InvalidRequest("the first message of PutObject must be open", field="open")
        key = object_key(first.open.object.tenant_id, first.open.object.name)
        max_bytes, num_bytes = min(first.open.max_bytes, self.store.settings.max_upload_bytes), 0
        await context.send_initial_metadata((ACCEPTED,))
        folder = self.store.settings.data_dir
        try:
            with NamedTemporaryFile(dir=folder, prefix=DRAFT_PREFIX) as draft:
                async for part in request_iterator:
                    num_bytes += len(part.data)
                    if len(part.data) > MAX_PART_BYTES or num_bytes > max_bytes:
                        raise InvalidRequest(f"the file has more than {max_bytes:,} bytes", field="file")
                    await asyncio.to_thread(draft.write, part.data)
                await asyncio.to_thread(draft.flush)
                await asyncio.to_thread(self.store.versions.put_object, key, Path(draft.name))
        except OSError as error:
            raise write_error(error, "the file cannot be written", folder) from error
        return pb.PutObjectReply(num_bytes=num_bytes)

    async def ReadObject(self, request: pb.ReadObjectRequest, context: Context) -> pb.FileBytes:
        key = object_key(request.object.tenant_id, request.object.name)
        if request.num_bytes > MAX_PART_BYTES:
            raise InvalidRequest(f"at most {MAX_PART_BYTES} bytes are read at once", field="num_bytes")
        data = await asyncio.to_thread(self.store.versions.read_part, key, request.offset, request.num_bytes)
        return pb.FileBytes(data=data)

    async def DeleteObject(self, request: pb.ObjectName, context: Context) -> pb.DeleteObjectReply:
        await asyncio.to_thread(self.store.versions.delete_object, object_key(request.tenant_id, request.name))
        return pb.DeleteObjectReply()
