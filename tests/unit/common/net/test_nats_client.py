"""Connections to the broker end with whoever has them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest
from nats.aio.transport import TcpTransport
from structlog.testing import capture_logs

from tests.support.brokers import free_port, nats_server
from tests.support.stalled_broker import stalled_client
from torchrelay.common.net import nats_client
from torchrelay.common.net.urls import with_credentials


async def test_what_is_said_of_a_broker_that_is_away_has_no_password() -> None:
    with capture_logs() as logged:
        connecting = asyncio.create_task(
            nats_client.connect(f"nats://ann:hunter2@127.0.0.1:{free_port()},nats://127.0.0.1:{free_port()}", "test")
        )
        try:
            async with asyncio.timeout(20):
                while not logged:  # noqa: ASYNC110  (nothing else tells of it)
                    await asyncio.sleep(0.01)
        finally:
            connecting.cancel()
            await asyncio.wait({connecting})
    assert logged[0]["event"] == "nats_unreachable" and "127.0.0.1" in str(logged)
    assert "hunter2" not in str(logged)


@pytest.mark.parametrize("user", ["ann", "ann b. > *", "ann@example.com"])
async def test_users_of_another_server_get_their_answers(tmp_path: Path, user: str) -> None:
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


async def test_closing_does_not_wait_for_a_broker_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_client, "CLOSE_TIMEOUT_S", 0.1)
    async with stalled_client() as client, asyncio.timeout(10):
        await client.close()
        assert client.is_closed
        writer = cast(TcpTransport, client._transport)._io_writer
        assert writer is not None and writer.transport.is_closing()  # its socket is given back
