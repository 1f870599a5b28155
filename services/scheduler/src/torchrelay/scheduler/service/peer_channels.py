"""Channels to workers and stores, one per peer: streams and commands share it, so the wire keeps their order."""

from __future__ import annotations

import asyncio

import grpc

from torchrelay.common.identity.callers import Caller, call_token
from torchrelay.common.identity.keys import derive_node_key
from torchrelay.common.identity.tls import Tls
from torchrelay.common.net.rpc.channels import open_channel


class PeerChannels:
    """Opens channels on first use."""

    def __init__(self, cluster_key: bytes, tls: Tls | None = None) -> None:
        self._cluster_key, self._tls = cluster_key, tls
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}  # by address and node: a token is one node's

    def channel(self, address: str, node_id: str, callee: Caller) -> grpc.aio.Channel:
        key = address, node_id
        if key not in self._channels:
            token = call_token(derive_node_key(self._cluster_key, node_id), Caller.SCHEDULER)
            self._channels[key] = open_channel(address, self._tls, token, callee)
        return self._channels[key]

    async def forget(self, address: str) -> None:
        """Closes the channels to an address whose process is gone; running calls fail."""
        for channel in [self._channels.pop(key) for key in [*self._channels] if key[0] == address]:
            await channel.close()

    async def close(self) -> None:
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
