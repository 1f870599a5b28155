"""Channels to workers and stores, one per peer: streams and commands share it, so the wire keeps their order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeAlias

import grpc

from torchrelay.common.identity.callers import Caller, call_token
from torchrelay.common.identity.keys import derive_node_key
from torchrelay.common.identity.tls import Tls
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import param_store_pb2_grpc, worker_pb2_grpc

if TYPE_CHECKING:
    from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreAsyncStub
    from torchrelay.control.v1.worker_pb2_grpc import WorkerAsyncStub  # exists in the stubs only

_Key: TypeAlias = tuple[str, str]  # address and node: a token is one node's


class PeerChannels:
    """Opens channels on first use."""

    def __init__(self, cluster_key: bytes, tls: Tls | None = None) -> None:
        self._cluster_key, self._tls = cluster_key, tls
        self._channels: dict[_Key, grpc.aio.Channel] = {}
        self._workers: dict[_Key, WorkerAsyncStub] = {}  # to make a stub costs as much as a call
        self._stores: dict[_Key, ParamStoreAsyncStub] = {}

    def worker(self, address: str, worker_id: str) -> WorkerAsyncStub:
        stub = self._workers.get((address, worker_id))
        if stub is None:
            channel = self.channel(address, worker_id, Caller.WORKER)
            stub = self._workers[address, worker_id] = worker_pb2_grpc.WorkerStub(channel)
        return stub

    def store(self, address: str, store_id: str) -> ParamStoreAsyncStub:
        stub = self._stores.get((address, store_id))
        if stub is None:
            channel = self.channel(address, store_id, Caller.STORE)
            stub = self._stores[address, store_id] = param_store_pb2_grpc.ParamStoreStub(channel)
        return stub

    def channel(self, address: str, node_id: str, callee: Caller) -> grpc.aio.Channel:
        key = address, node_id
        if key not in self._channels:
            token = call_token(derive_node_key(self._cluster_key, node_id), Caller.SCHEDULER)
            self._channels[key] = open_channel(address, self._tls, token, callee, is_thin=True)
        return self._channels[key]

    def is_connected(self, address: str, node_id: str) -> bool:
        """Whether the connection to the peer stands now."""
        channel = self._channels.get((address, node_id))
        return channel is not None and channel.get_state() is grpc.ChannelConnectivity.READY

    async def forget(self, address: str) -> None:
        """Closes the channels to an address whose process is gone; running calls fail."""
        for key in [key for key in self._channels if key[0] == address]:
            self._workers.pop(key, None)
            self._stores.pop(key, None)
            await self._channels.pop(key).close()

    async def close(self) -> None:
        self._workers.clear()
        self._stores.clear()
        while self._channels:
            await self._channels.popitem()[1].close()


async def is_refused(address: str, timeout_s: float = 0.3) -> bool:
    """Whether the host refuses the connection: the process is gone. A timeout is not a refusal."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
