"""A closed port shows that a process is gone."""

from __future__ import annotations

import asyncio

from torchrelay.scheduler.service.peer_channels import is_refused


async def test_a_port_nobody_listens_on_is_refused() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert not await is_refused(f"127.0.0.1:{port}")
    server.close()
    await server.wait_closed()
    assert await is_refused(f"127.0.0.1:{port}")
