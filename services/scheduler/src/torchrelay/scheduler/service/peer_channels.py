"""Channels to workers and stores, one per peer: streams and commands share it, so the wire keeps their order."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import grpc

from torchrelay.common.identity.callers import Caller, call_token
from torchrelay.common.identity.keys import derive_node_key
from torchrelay.common.identity.tls import Tls
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import param_store_pb2_grpc, worker_pb2_grpc
from torchrelay.scheduler.policy.types import Peer

_Key: TypeAlias = tuple[str, Peer]  # with the address: a port may pass from one peer to another, and a token is one's


class PeerChannels:
    """Opens channels on first use."""

    def __init__(self, cluster_key: bytes, tls: Tls | None = None) -> None:
        self._cluster_key, self._tls = cluster_key, tls
        # With a stub, which costs as much as a call to make.
        self._opened: dict[_Key, tuple[grpc.aio.Channel, Any]] = {}

    def stub(self, address: str, peer: Peer) -> Any:
        """The stub of the worker or store, whose asynchronous methods exist in the type stubs only."""
        opened = self._opened.get((address, peer))
        if opened is None:
            token = call_token(derive_node_key(self._cluster_key, peer.node_id), Caller.SCHEDULER)
            callee = Caller.STORE if peer.is_store else Caller.WORKER
            channel = open_channel(address, self._tls, token, callee, is_thin=True)
            kind = param_store_pb2_grpc.ParamStoreStub if peer.is_store else worker_pb2_grpc.WorkerStub
            opened = self._opened[address, peer] = channel, kind(channel)
        return opened[1]

    def is_connected(self, address: str, peer: Peer) -> bool:
        """Whether the connection to the peer stands now."""
        opened = self._opened.get((address, peer))
        return opened is not None and opened[0].get_state() is grpc.ChannelConnectivity.READY

    async def forget(self, address: str) -> None:
        """Closes the channels to an address whose process is gone; running calls fail."""
        for key in [key for key in self._opened if key[0] == address]:
            await self._opened.pop(key)[0].close()

    async def close(self) -> None:
        while self._opened:
            await self._opened.popitem()[1][0].close()


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
