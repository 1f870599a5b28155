"""A NATS broker that reads nothing any more, and who publishes to it all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from nats.aio.client import Client

from torchrelay.common.net.nats_client import connect

INFO = b'INFO {"server_id":"stalled","version":"2.9.0","max_payload":1048576,"proto":1,"headers":true}\r\n'

_FULL_BYTES = 1 << 20


@asynccontextmanager
async def stalled_client() -> AsyncIterator[Client]:
    """A connection whose buffers are full: whoever publishes waits."""
    met: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(writer)
        writer.write(INFO)
        while not (await reader.readline()).startswith(b"PING"):
            pass
        writer.write(b"PONG\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    client = await connect(f"nats://{host}:{port}", "test")
    try:
        while client.pending_data_size < _FULL_BYTES:  # until the sockets take no more
            await client.publish("anything", bytes(1 << 19))
            await asyncio.sleep(0.001)
        client._max_pending_size = _FULL_BYTES
        yield client
    finally:
        server.close()
        for writer in met:
            writer.transport.abort()
        with suppress(ConnectionResetError):
            await client.close()


async def assert_it_ends(publishing: Coroutine[Any, Any, None], client: Client) -> None:
    """Asserts that a single cancel ends a publishing loop, though nats-py swallows it."""
    before = client.pending_data_size
    task = asyncio.create_task(publishing)
    async with asyncio.timeout(10):
        while client.pending_data_size == before:  # noqa: ASYNC110  (until it waits within ``publish``)
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=10)
    has_ended = task.cancelled()
    while not task.done():
        task.cancel()
        await asyncio.sleep(0.01)
    assert has_ended
