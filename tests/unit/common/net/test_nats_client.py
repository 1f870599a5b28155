"""Connections to the broker end with whoever has them."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from nats.aio.transport import TcpTransport

from tests.support.stalled_broker import stalled_client
from torchrelay.common.net import nats_client


async def test_closing_does_not_wait_for_a_broker_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_client, "CLOSE_TIMEOUT_S", 0.1)
    async with stalled_client() as client, asyncio.timeout(10):
        await client.close()
        assert client.is_closed
        writer = cast(TcpTransport, client._transport)._io_writer
        assert writer is not None and writer.transport.is_closing()  # its socket is given back
