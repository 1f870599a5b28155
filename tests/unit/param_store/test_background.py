"""What a store does by itself ends with it, whatever the broker does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.aio.client import Client

from tests.support.stalled_broker import assert_it_ends, stalled_client
from torchrelay.common.ids import new_id
from torchrelay.control.v1.reports_pb2 import StoreReport
from torchrelay.param_store import background
from torchrelay.param_store.settings import StoreSettings
from torchrelay.param_store.store import Store


async def test_a_cancel_that_the_brokers_client_swallows_ends_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SimpleNamespace(nats_prefix="", nats_url="", store_id="s")
    store = SimpleNamespace(settings=settings, activity=(), report=lambda: StoreReport(store_id="s"))
    async with stalled_client() as client:

        async def connect(url: str, name: str) -> Client:
            return client

        async def close() -> None:
            """It is the test's."""

        monkeypatch.setattr(background, "connect", connect)
        monkeypatch.setattr(client, "close", close)
        await assert_it_ends(background.publish_reports(cast(Any, store)), client)
        monkeypatch.undo()


async def test_a_store_is_active_for_what_it_takes_in(tmp_path: Path) -> None:
    settings = StoreSettings(
        store_id=new_id("sto"),
        node_key="ab" * 32,
        data_dir=tmp_path / "data",
        remote_url=f"file://{tmp_path / 'remote'}",
        arena_path=tmp_path / "arena",
        arena_bytes=32 << 20,
    )
    store = Store(settings, asyncio.get_running_loop())
    try:
        before = store.activity
        assert store.activity == before
        store.arena.grow(1 << 20)
        assert store.activity != before
    finally:
        store.close()
