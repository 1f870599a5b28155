"""The background tasks of a store."""

from __future__ import annotations

import asyncio
from pathlib import Path

from torchrelay.common.ids import new_id
from torchrelay.param_store.settings import StoreSettings
from torchrelay.param_store.store import Store


async def test_activity_changes_with_received_bytes(tmp_path: Path) -> None:
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
        before = store.activity()
        assert store.activity() == before
        store.arena.grow(1 << 20)
        assert store.activity() != before
    finally:
        store.close()
