"""What a store does by itself ends with it, whatever the broker does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.aio.client import Client

from tests.support.stalled_broker import assert_it_ends, stalled_client
from torchrelay.control.v1.reports_pb2 import StoreReport
from torchrelay.param_store import background


async def test_a_cancel_that_the_brokers_client_swallows_ends_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SimpleNamespace(nats_prefix="", nats_url="", store_id="s")
    store = SimpleNamespace(settings=settings, report=lambda: StoreReport(store_id="s"))
    async with stalled_client() as client:

        async def connect(url: str, name: str) -> Client:
            return client

        async def close() -> None:
            """It is the test's."""

        monkeypatch.setattr(background, "connect", connect)
        monkeypatch.setattr(client, "close", close)
        await assert_it_ends(background.publish_reports(cast(Any, store)), client)
        monkeypatch.undo()
