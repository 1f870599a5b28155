"""Channels to workers and stores, one per address: watching and commanding share it, so order is kept on the wire."""

from __future__ import annotations

import asyncio

import grpc

from torchrelay.common.net.rpc import open_channel
from torchrelay.common.tls import Tls


class PeerChannels:
    """Opens a channel at first use."""

    def __init__(self, tls: Tls | None = None) -> None:
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}

    def channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address, self._tls)
        return self._channels[address]

    async def forget(self, address: str) -> None:
        """The peer is gone; calls under way to it fail."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()


async def is_refused(address: str, timeout_s: float = 0.3) -> bool:
    """Whether the host answers that nobody listens there: the process is gone. Silence is not refusal."""
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
