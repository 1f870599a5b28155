"""A cluster of scripted hosts for each test of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.unit.scheduler.service.scripted_cluster import ScriptedCluster
from torchrelay.common.net.nats_client import connect


@pytest.fixture
async def it(nats_url: str) -> AsyncIterator[ScriptedCluster]:
    nats = await connect(nats_url, "scripted")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(nats.close)
        yield ScriptedCluster(nats_url, nats, stack)
