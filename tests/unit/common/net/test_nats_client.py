"""Connections to the broker: warnings, users, closing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import pytest
from nats.aio.transport import TcpTransport
from structlog.testing import capture_logs

from tests.support.brokers import free_port, nats_server
from tests.support.stalled_broker import stalled_client
from tests.support.wait import eventually
from torchrelay.common.net import nats_client
from torchrelay.common.net.urls import with_credentials


async def test_warning_of_absent_broker_hides_password() -> None:
    with capture_logs() as logged:
        connecting = asyncio.create_task(
            nats_client.connect(f"nats://ann:hunter2@127.0.0.1:{free_port()},nats://127.0.0.1:{free_port()}", "test")
        )
        try:
            await eventually(lambda: logged, "a warning")
        finally:
            connecting.cancel()
            await asyncio.wait({connecting})
    assert logged[0]["event"] == "nats_unreachable" and "127.0.0.1" in str(logged)
    assert "hunter2" not in str(logged)


@pytest.mark.parametrize("user", ["ann", "ann b. > *", "ann@example.com"])
async def test_foreign_users_receive_replies(tmp_path: Path, user: str) -> None:
    secret = "p:@/w"
    users = f'authorization {{ users: [ {{ user: "{user}", password: "{secret}" }} ] }}'
    with nats_server(tmp_path, authorization=users) as url:
        client = await nats_client.connect(with_credentials(url, user, secret), "test")
        try:
            js = client.jetstream()
            await nats_client.ensure_streams(js, nats_client.Subjects())
            made = await js.stream_info(nats_client.HISTORY_STREAM)
            assert made.config.max_bytes == nats_client.MIN_STREAM_BYTES
        finally:
            await client.close()


async def test_close_does_not_wait_for_stalled_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_client, "CLOSE_TIMEOUT_S", 0.1)
    async with stalled_client() as client, asyncio.timeout(60):
        await client.close()
        assert client.is_closed
        writer = cast(TcpTransport, client._transport)._io_writer
        assert writer is not None and writer.transport.is_closing()  # its socket is given back


async def test_flush_follows_what_was_subscribed(tmp_path: Path) -> None:
    sent = bytearray()
    relayed = asyncio.Event()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, copy: bytearray) -> None:
        while data := await reader.read(1 << 16):
            copy.extend(data)
            writer.write(data)
        writer.close()
        await writer.wait_closed()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(url)
        server_reader, server_writer = await asyncio.open_connection(parts.hostname, parts.port)
        await asyncio.gather(forward(reader, server_writer, sent), forward(server_reader, writer, bytearray()))
        relayed.set()

    with nats_server(tmp_path) as url:
        async with asyncio.timeout(60), await asyncio.start_server(relay, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            client = await nats_client.connect(f"nats://{host}:{port}", "test")
            sent.clear()
            await client.subscribe("reports")
            await client.flush()
            assert sent.startswith(b"SUB reports") and sent.endswith(b"PING\r\n")
            await client.close()
            await relayed.wait()
