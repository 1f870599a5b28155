"""Holders of packs that tests control, and what a worker or a faulty disk does to a copy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from tests.unit.param_store.running_store import CLUSTER_KEY, RunningStore
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.transfer.arena.mapped_slab import MappedSlab
from torchrelay.transfer.buffers import MemoryBuffer
from torchrelay.transfer.manifest import decode_manifest
from torchrelay.transfer.protocol.tickets import derive_node_key
from torchrelay.transfer.serve.holder import HolderServer
from torchrelay.transfer.transport.tcp import TcpTransport


@asynccontextmanager
async def held(
    store: RunningStore, pack_id: str, waits_for_relay: bool = False
) -> AsyncIterator[AsyncIterator[pb.HoldReply]]:
    call = store.stub.Hold(pb.HoldRequest(pack_id=pack_id, owner_id="wrk-1", waits_for_relay=waits_for_relay))
    try:
        yield aiter(call)
    finally:
        call.cancel()


async def drop(store: RunningStore, pack_id: str, epoch: int = 0) -> bool:
    return (await store.stub.Drop(pb.DropRequest(pack_id=pack_id, epoch=epoch))).dropped


async def bytes_in(store: RunningStore, pack_id: str) -> bytes:
    """The pack as a worker of the store's host sees it."""
    async with held(store, pack_id) as replies:
        reply = await anext(replies)
        slab = MappedSlab(Path(reply.arena_path), reply.slab_offset, reply.slab_bytes)
        try:
            assert slab.num_verified == slab.manifest.num_chunks
            assert len(slab.manifest.segments) == reply.num_segments_ready
            return bytes(slab.data)
        finally:
            slab.close()


class SlowHolder:
    """A holder whose chunks appear when the test says so."""

    def __init__(self, pack: Path) -> None:
        self._data = pack.read_bytes()
        encoded = pack.with_suffix(".manifest").read_bytes()
        self.manifest = decode_manifest(encoded)
        spans = [self.manifest.chunk_range(i) for i in range(self.manifest.num_chunks)]
        self.buffer = MemoryBuffer(pack.name, [span.end - span.begin for span in spans])
        self.buffer.head = encoded
        key = derive_node_key(CLUSTER_KEY, "slow")
        listener = TcpTransport().listen("127.0.0.1", 0)
        self.server = HolderServer("slow", key, {pack.name: self.buffer}.get, listener)

    def show(self, index: int) -> None:
        span = self.manifest.chunk_range(index)
        self.buffer.publish(index, self._data[span.begin : span.end])


@contextmanager
def slow_holder(pack: Path) -> Iterator[SlowHolder]:
    holder = SlowHolder(pack)
    holder.server.start()
    try:
        yield holder
    finally:
        holder.server.close()


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
