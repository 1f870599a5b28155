"""A param-store that hangs in the middle of an upload or a commit is named in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.unit.gateway.scripted_services import ScriptedStore, serving_store
from torchrelay.common.errors import Unavailable
from torchrelay.control.v1 import param_store_pb2
from torchrelay.gateway.clients.param_store import StoreClient

SILENT = r"the param-store at store:1 \(TORCHRELAY_STORE_ADDRESS\) does not answer"


class HungStore(ScriptedStore):
    """Its disk does not answer: it takes a stream and reads nothing of it, or tells one step of a commit."""

    async def PutFile(self, request_iterator: AsyncIterator[Any], context: Any) -> param_store_pb2.FileState:
        await asyncio.Event().wait()
        raise AssertionError

    async def Commit(self, request: Any, context: Any) -> AsyncIterator[param_store_pb2.CommitProgress]:
        yield param_store_pb2.CommitProgress(stage="wait")
        await asyncio.Event().wait()


def hung_store() -> HungStore:
    return HungStore()  # type: ignore[abstract]


async def pieces(num_bytes: int) -> AsyncIterator[bytes]:
    yield bytes(num_bytes)


@pytest.mark.parametrize("num_bytes", [10, 16 << 20], ids=["sent", "not taken"])
async def test_a_store_that_takes_no_bytes_is_named(num_bytes: int) -> None:
    async with serving_store(hung_store()) as channel, asyncio.timeout(30):
        client = StoreClient(channel, "store:1", silence_s=0.5)
        with pytest.raises(Unavailable, match=SILENT):
            await client.put_file("u1", "w", 0, pieces(num_bytes))


async def test_a_commit_that_falls_silent_is_named() -> None:
    async with serving_store(hung_store()) as channel, asyncio.timeout(30):
        client, stages = StoreClient(channel, "store:1", silence_s=0.5), list[str]()
        with pytest.raises(Unavailable, match=SILENT):
            async for step in client.commit("u1", 0):
                stages.append(step.stage)
        assert stages == ["wait"]
