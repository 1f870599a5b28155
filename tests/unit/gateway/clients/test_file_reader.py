"""Files of a version, read from the param-store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from blake3 import blake3

from tests.support.echo_services import EchoStore
from tests.support.wait import eventually
from torchrelay.common.errors import Unavailable
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.gateway.clients.file_reader import StoreFileReader

DATA = bytes(3 << 20)
DIGEST = blake3(DATA).hexdigest()


@pytest.fixture
async def store() -> AsyncIterator[EchoStore]:
    store = EchoStore({DIGEST: DATA})
    await store.start()
    yield store
    store.answers.set()
    await store.stop()


async def test_hung_store_is_named(store: EchoStore, tmp_path: Path) -> None:
    path = tmp_path / "file"
    async with open_channel(store.address) as channel:
        stub = ParamStoreStub(channel)
        slow, quick = (StoreFileReader(stub, store.address, part_timeout_s) for part_timeout_s in (60.0, 0.2))
        for _ in range(2):
            assert await slow.save(DIGEST, "tokenizer.json", 4 << 20, path) == len(DATA)
            assert path.read_bytes() == DATA
            store.answers.clear()
            with pytest.raises(
                Unavailable, match=r"the param-store at .* \(TORCHRELAY_STORE_ADDRESS\) does not answer"
            ):
                await quick.save(DIGEST, "tokenizer.json", 4 << 20, path)
            store.answers.set()


async def test_read_waits_for_store_that_restarts(store: EchoStore, tmp_path: Path) -> None:
    path = tmp_path / "file"
    async with open_channel(store.address) as channel:
        reader = StoreFileReader(ParamStoreStub(channel), store.address, restart_s=60.0)
        await store.stop()
        reading = asyncio.create_task(reader.save(DIGEST, "tokenizer.json", 4 << 20, path))
        await eventually(lambda: channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE)
        assert not reading.done()
        await store.revive()
        assert await reading == len(DATA)
    assert path.read_bytes() == DATA


async def test_store_that_stays_away_is_named(store: EchoStore, tmp_path: Path) -> None:
    async with open_channel(store.address) as channel:
        reader = StoreFileReader(ParamStoreStub(channel), store.address, restart_s=0.2)
        await store.stop()
        with pytest.raises(Unavailable, match=r"\(TORCHRELAY_STORE_ADDRESS\) cannot be reached"):
            await reader.save(DIGEST, "tokenizer.json", 4 << 20, tmp_path / "file")
