"""Holders of packs that tests control, damage to a copy, and stores before a faulty server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.s3_server import FaultyProxy
from tests.unit.param_store.model_folders import StoredPack
from tests.unit.param_store.running_store import CLUSTER_KEY, RunningStore, peer, running_store
from torchrelay.control.v1 import types_pb2
from torchrelay.param_store.main import Work
from torchrelay.transfer.buffers import MemoryBuffer
from torchrelay.transfer.manifest import decode_manifest
from torchrelay.transfer.protocol.tickets import derive_node_key
from torchrelay.transfer.serve.holder import HolderServer
from torchrelay.transfer.transport.tcp import TcpTransport


class SlowHolder:
    """A holder whose chunks appear when the test says so."""

    def __init__(self, pack: StoredPack) -> None:
        self._data = pack.data
        encoded = pack.path.with_suffix(".manifest").read_bytes()
        self.manifest = decode_manifest(encoded)
        spans = [self.manifest.chunk_range(i) for i in range(self.manifest.num_chunks)]
        self.buffer = MemoryBuffer(pack.pack_id, [span.end - span.begin for span in spans])
        self.buffer.head = encoded
        key = derive_node_key(CLUSTER_KEY, "slow")
        listener = TcpTransport().listen("127.0.0.1", 0)
        self.server = HolderServer("slow", key, {pack.pack_id: self.buffer}.get, listener)

    def source(self, receiver: RunningStore) -> types_pb2.Source:
        return peer("slow", self.server.address, self.buffer.buffer_id, receiver)

    def show(self, index: int) -> None:
        span = self.manifest.chunk_range(index)
        self.buffer.publish(index, self._data[span.begin : span.end])


@contextmanager
def slow_holder(pack: StoredPack) -> Iterator[SlowHolder]:
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


@dataclass
class RemoteScene:
    """A pack in a bucket that tests only read, and stores of one host that reach it by way of the proxy."""

    folder: Path
    proxy: FaultyProxy
    url: str
    pack: StoredPack

    def store(self, *background: Work, name: str = "host", **changes: Any) -> AbstractAsyncContextManager[RunningStore]:
        settings = {"remote_url": self.url, "remote_endpoint": self.proxy.endpoint, "remote_give_up_s": 0.3}
        return running_store(self.folder / name, background, **settings | changes)
