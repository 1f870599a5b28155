"""A closed port shows that a process is gone."""

from __future__ import annotations

import asyncio

import grpc
from pytest import MonkeyPatch

from torchrelay.common.identity.callers import Caller, call_token
from torchrelay.common.identity.keys import derive_node_key
from torchrelay.common.identity.tls import Tls
from torchrelay.scheduler.service import peer_channels
from torchrelay.scheduler.service.peer_channels import PeerChannels, is_refused

CLUSTER_KEY = bytes(32)
ADDRESS = "127.0.0.1:1"


async def test_closed_port_is_refused() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert not await is_refused(f"127.0.0.1:{port}")
    server.close()
    await server.wait_closed()
    assert await is_refused(f"127.0.0.1:{port}")


async def test_peer_is_connected_while_channel_is_ready() -> None:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    channels = PeerChannels(CLUSTER_KEY)
    assert not channels.is_connected(address, "store-1"), "nobody has called it"
    channel = channels.channel(address, "store-1", Caller.STORE)
    assert not channels.is_connected(address, "store-1")
    channel.get_state(try_to_connect=True)
    await channel.channel_ready()
    assert channels.is_connected(address, "store-1")
    await server.stop(None)
    await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
    assert not channels.is_connected(address, "store-1")
    await channels.close()


async def test_nodes_at_one_address_get_own_tokens(monkeypatch: MonkeyPatch) -> None:
    """A port may pass from one process to another before anybody noticed that the first is gone."""
    tokens: list[str] = []

    def note_token(address: str, tls: Tls | None, token: str, callee: Caller, *, is_thin: bool) -> grpc.aio.Channel:
        tokens.append(token)
        return grpc.aio.insecure_channel(address)

    monkeypatch.setattr(peer_channels, "open_channel", note_token)
    channels = PeerChannels(CLUSTER_KEY)
    first, second = (
        channels.worker(ADDRESS, "worker-1"),
        channels.worker(ADDRESS, "worker-2"),
    )
    assert first is not second and channels.worker(ADDRESS, "worker-1") is first
    assert tokens == [
        call_token(derive_node_key(CLUSTER_KEY, each), Caller.SCHEDULER) for each in ("worker-1", "worker-2")
    ]
    other = channels.worker("127.0.0.1:2", "worker-1")
    await channels.forget(ADDRESS)
    assert channels.worker("127.0.0.1:2", "worker-1") is other
    assert channels.worker(ADDRESS, "worker-1") is not first and channels.worker(ADDRESS, "worker-2") is not second
    await channels.close()
