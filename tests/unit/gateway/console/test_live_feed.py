"""The live figures: what they show of the catalog, and when it is read for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.unit.gateway.catalog.test_catalog import publish, version
from tests.unit.gateway.conftest import AccountingRig
from tests.unit.gateway.scripted_services import serving
from torchrelay.common.health import Health
from torchrelay.gateway.clients.scheduler import SchedulerClient
from torchrelay.gateway.console.core import Listed
from torchrelay.gateway.console.live_feed import LiveFeed
from torchrelay.gateway.core import Principal


class CountingFeed(LiveFeed):
    num_reads = 0

    async def _models(self) -> list[Listed]:
        self.num_reads += 1
        return await super()._models()


async def without_fault() -> str:
    return ""


async def stays() -> None:
    await asyncio.Event().wait()


@pytest.fixture
async def feed(parts: AccountingRig) -> AsyncIterator[CountingFeed]:
    """A watched feed of a gateway without a scheduler."""
    async with serving() as channel:
        scheduler = SchedulerClient(channel, "scheduler:1")
        feed = CountingFeed(parts.database, parts.catalog, scheduler, Health({"database": without_fault}, {}), deque())
        with feed.watched():
            yield feed


async def next_figures(feed: LiveFeed, caller: Principal) -> dict[str, Any]:
    leaving = asyncio.create_task(stays())
    encoded, _ = await asyncio.gather(feed.next(caller, leaving), feed.refresh())  # it waits before they are taken
    leaving.cancel()
    assert encoded is not None
    figures: dict[str, Any] = msgspec.json.decode(encoded)
    return figures


async def test_catalog_is_read_once_for_each_change_and_shown_at_once(parts: AccountingRig, feed: CountingFeed) -> None:
    caller = Principal(parts.acme.tenant_id, "acme", "key-1")
    for num_models in (1, 2):
        await publish(parts, f"model-{num_models}", version(f"v{num_models}"))
        for _ in range(3):
            assert (await next_figures(feed, caller))["num_models"] == num_models
        assert feed.num_reads == num_models
    assert (await next_figures(feed, Principal("ten-other", "other", "key-2")))["num_models"] == 0


async def test_adapter_is_listed_with_the_version_that_serves_it(parts: AccountingRig, feed: CountingFeed) -> None:
    await publish(parts, "base", version())
    await publish(parts, "tuned", replace(version("a1"), pack_bytes=7, base_version_id="v1"))
    (base, tuned) = sorted(await feed._models())
    assert base == Listed("acme/base", parts.acme.tenant_id, "v1", 100)
    assert tuned == Listed("acme/tuned", parts.acme.tenant_id, "v1", 7)
