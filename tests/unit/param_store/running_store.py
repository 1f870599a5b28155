"""Real stores in this process, each with its arena, data plane and gRPC server, and what tests do with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.support.callers import every_token
from tests.support.guard import shared_memory_path
from tests.support.wait import HANG_S
from tests.unit.param_store.model_folders import sha256_of
from torchrelay.common.errors import TorchrelayError
from torchrelay.common.ids import new_id
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.control.v1 import reports_pb2, types_pb2
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.gateway.clients.client_stream import write_while_open
from torchrelay.param_store.main import Work, serving
from torchrelay.param_store.settings import StoreSettings
from torchrelay.transfer.arena.mapped_slab import MappedSlab
from torchrelay.transfer.protocol.tickets import TicketIssuer, derive_node_key

if TYPE_CHECKING:
    from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreAsyncStub

CLUSTER_KEY = bytes(range(32))
OFFICE = TicketIssuer(CLUSTER_KEY)
REMOTE = types_pb2.Source(holder_id="remote")


@dataclass
class RunningStore:
    stub: ParamStoreAsyncStub
    settings: StoreSettings
    data_address: str

    @property
    def store_id(self) -> str:
        return self.settings.store_id

    def source(self, pack_id: str, receiver: RunningStore) -> types_pb2.Source:
        return peer(self.store_id, self.data_address, pack_id, receiver)

    async def report(self) -> reports_pb2.StoreReport:
        watching = self.stub.WatchCopies(pb.WatchCopiesRequest())
        report: reports_pb2.StoreReport = await anext(aiter(watching))
        watching.cancel()
        return report

    async def copy(self, pack_id: str) -> reports_pb2.PackCopy | None:
        return next((copy for copy in (await self.report()).copies if copy.pack_id == pack_id), None)

    async def until(self, wanted: Callable[[reports_pb2.StoreReport], bool]) -> reports_pb2.StoreReport:
        """The first report that is as wanted."""
        watching = self.stub.WatchCopies(pb.WatchCopiesRequest())
        try:
            async with asyncio.timeout(HANG_S):
                async for report in watching:
                    if wanted(report):
                        return report
        finally:
            watching.cancel()
        raise AssertionError("the store stopped reporting")

    async def until_complete(self, pack_id: str) -> reports_pb2.PackCopy:
        report = await self.until(lambda report: any(is_complete(copy, pack_id) for copy in report.copies))
        return next(copy for copy in report.copies if copy.pack_id == pack_id)

    async def until_failed(self) -> str:
        """The error of the first copy."""
        report = await self.until(lambda report: bool(report.copies) and report.copies[0].error != "")
        return report.copies[0].error

    async def relay(self, pack_id: str, *sources: types_pb2.Source, epoch: int = 0) -> bool:
        request = pb.RelayRequest(epoch=epoch, pack_id=pack_id, sources=sources, relay_id=new_id("rel"))
        return (await self.stub.Relay(request)).already_complete

    async def fetch(self, pack_id: str, *sources: types_pb2.Source) -> reports_pb2.PackCopy:
        """Relays a pack from the remote store, or from these sources, until it is complete."""
        await self.relay(pack_id, *(sources or (REMOTE,)))
        return await self.until_complete(pack_id)

    @asynccontextmanager
    async def held(self, pack_id: str, waits_for_relay: bool = False) -> AsyncIterator[AsyncIterator[pb.HoldReply]]:
        call = self.stub.Hold(pb.HoldRequest(pack_id=pack_id, owner_id="wrk-1", waits_for_relay=waits_for_relay))
        try:
            yield aiter(call)
        finally:
            call.cancel()

    async def refusal_of_hold(self, pack_id: str, waits_for_relay: bool = False) -> TorchrelayError:
        async with self.held(pack_id, waits_for_relay) as replies:
            return await refusal(anext(replies))

    async def drop(self, pack_id: str, epoch: int = 0) -> bool:
        return (await self.stub.Drop(pb.DropRequest(pack_id=pack_id, epoch=epoch))).dropped

    async def bytes_in(self, pack_id: str) -> bytes:
        """The pack as a worker of the store's host sees it."""
        async with self.held(pack_id) as replies:
            reply = await anext(replies)
            slab = MappedSlab(Path(reply.arena_path), reply.slab_offset, reply.slab_bytes)
            try:
                assert slab.num_verified == slab.manifest.num_chunks
                assert len(slab.manifest.segments) == reply.num_segments_ready
                return bytes(slab.data)
            finally:
                slab.close()

    async def put(
        self, upload_id: str, path: str, data: bytes, offset: int = 0, part_bytes: int = 1 << 20
    ) -> pb.FileState:
        opening = pb.PutFileRequest.Open(upload_id=upload_id, path=path, offset=offset)
        parts = (pb.PutFileRequest(data=data[begin : begin + part_bytes]) for begin in range(0, len(data), part_bytes))
        return await self.put_requests(pb.PutFileRequest(open=opening), *parts)

    async def put_requests(self, *requests: pb.PutFileRequest) -> pb.FileState:
        """Sends the messages until the store ends the call, as the gateway does, so that the store's status arrives."""
        call = self.stub.PutFile()

        async def write() -> None:
            for request in requests:
                await call.write(request)
            await call.done_writing()

        await write_while_open(call, write())
        state: pb.FileState = await call
        return state

    async def begin(
        self, folder: Path, upload_id: str, quota_bytes: int = 0, tenant_id: str = "ten-1"
    ) -> pb.UploadState:
        request = pb.BeginUploadRequest(
            upload_id=upload_id, tenant_id=tenant_id, files=declared(folder), quota_bytes=quota_bytes
        )
        state: pb.UploadState = await self.stub.BeginUpload(request)
        return state

    async def upload_state(self, upload_id: str) -> pb.UploadState:
        state: pb.UploadState = await self.stub.DescribeUpload(pb.DescribeUploadRequest(upload_id=upload_id))
        return state

    async def send(self, folder: Path, upload_id: str, tenant_id: str = "ten-1") -> None:
        """Begins the upload and sends the files that the store does not have."""
        state = await self.begin(folder, upload_id, tenant_id=tenant_id)
        for path in (file.path for file in state.files if not file.complete):
            assert (await self.put(upload_id, path, contents(folder)[path])).complete

    async def commit(
        self,
        upload_id: str,
        largest_slot_bytes: int = 0,
        engines: Sequence[str] = (),
        quantize: str = "",
        base_version_id: str = "",
    ) -> list[pb.CommitProgress]:
        request = pb.CommitRequest(
            upload_id=upload_id,
            largest_slot_bytes=largest_slot_bytes,
            engines=engines,
            quantize=quantize,
            base_version_id=base_version_id,
        )
        return [progress async for progress in self.stub.Commit(request)]

    async def abort(self, upload_id: str) -> None:
        await self.stub.AbortUpload(pb.AbortUploadRequest(upload_id=upload_id))


async def refusal(call: Awaitable[object]) -> TorchrelayError:
    """The error that a call of a store ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


def is_complete(copy: reports_pb2.PackCopy, pack_id: str) -> bool:
    return copy.pack_id == pack_id and copy.num_chunks > 0 and copy.num_chunks_verified == copy.num_chunks


def peer(holder_id: str, data_address: str, pack_id: str, receiver: RunningStore) -> types_pb2.Source:
    expires_unix_ms = int(time.time() * 1000) + 60_000
    ticket = OFFICE.issue(pack_id, holder_id, receiver.store_id, expires_unix_ms)
    return types_pb2.Source(holder_id=holder_id, data_address=data_address, ticket=ticket)


@asynccontextmanager
async def running_store(folder: Path, background: tuple[Work, ...] = (), **changes: Any) -> AsyncIterator[RunningStore]:
    """A store whose uploads and remote store lie below ``folder``."""
    store_id = changes.pop("store_id", new_id("sto"))
    values = {
        "store_id": store_id,
        "node_key": derive_node_key(CLUSTER_KEY, store_id).hex(),
        "data_dir": folder / "data",
        "remote_url": f"file://{folder / 'remote'}",
        "arena_path": shared_memory_path(store_id),
        "arena_bytes": 32 << 20,
        **changes,
    }
    settings = StoreSettings(**values)
    token = every_token(CLUSTER_KEY, store_id)
    async with (
        serving(settings, background) as addresses,
        open_channel(addresses["grpc"], settings.tls, token) as channel,
    ):
        yield RunningStore(ParamStoreStub(channel), settings, addresses["data"])


def declared(folder: Path) -> list[pb.DeclaredFile]:
    return [
        pb.DeclaredFile(path=name, num_bytes=len(content), sha256=sha256_of(content))
        for name, content in contents(folder).items()
    ]


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


async def publish(store: RunningStore, folder: Path, base_version_id: str = "") -> pb.VersionDescription:
    """Uploads a folder, commits it, and confirms it as a gateway does. ``base_version_id``: of an adapter."""
    upload_id = new_id("upl")
    await store.send(folder, upload_id)
    version: pb.VersionDescription = (await store.commit(upload_id, base_version_id=base_version_id))[-1].version
    await store.abort(upload_id)
    return version
