"""Tokenizers are read once per digest, verified, and cached within a byte limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from blake3 import blake3

from tests.support.echo_services import EchoStore
from tests.support.sample_tokenizers import tiny_tokenizer
from torchrelay.common.errors import DataCorrupted, InvalidRequest
from torchrelay.common.net.rpc import open_channel
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.gateway.clients.file_reader import StoreFileReader
from torchrelay.gateway.inference.text.tokenizer_cache import BYTES_PER_FILE_BYTE, TokenizerCache

FILES = [tiny_tokenizer(300 + 10 * index) for index in range(4)]
DIGESTS = [blake3(data).hexdigest() for data in FILES]


@pytest.fixture
async def store() -> AsyncIterator[EchoStore]:
    store = EchoStore(dict(zip(DIGESTS, FILES, strict=True)))
    await store.start()
    yield store
    await store.stop()


@pytest.fixture
async def files(store: EchoStore) -> AsyncIterator[StoreFileReader]:
    async with AsyncExitStack() as stack:
        channel = open_channel(store.address)
        stack.push_async_callback(channel.close)
        yield StoreFileReader(ParamStoreStub(channel), store.address)


async def test_askers_share_one_load(store: EchoStore, files: StoreFileReader) -> None:
    cache = TokenizerCache(files, 1 << 30)
    found = await asyncio.gather(*(cache.get(DIGESTS[0]) for _ in range(10)))
    assert all(one is found[0] for one in found)
    assert store.reads == [DIGESTS[0]]
    cache.close()


async def test_the_least_recently_used_goes_first(store: EchoStore, files: StoreFileReader) -> None:
    room = int(sum(map(len, FILES[:3])) * BYTES_PER_FILE_BYTE)
    cache = TokenizerCache(files, room)
    for index in (0, 1, 2, 0, 3):  # 3 is larger than 1: several must be evicted
        await cache.get(DIGESTS[index])
        cache.check_integrity()
    assert 0 < cache.num_bytes <= room
    num_reads = len(store.reads)
    for index in (0, 3):
        await cache.get(DIGESTS[index])
    assert len(store.reads) == num_reads
    await cache.get(DIGESTS[1])
    assert len(store.reads) == num_reads + 1
    cache.close()


async def test_one_larger_than_all_room_still_serves(store: EchoStore, files: StoreFileReader) -> None:
    cache = TokenizerCache(files, 10)
    for digest in DIGESTS[:2]:
        assert (await cache.get(digest)).encode("hello").ids
        cache.check_integrity()
    await cache.get(DIGESTS[1])
    assert store.reads == DIGESTS[:2]
    await cache.get(DIGESTS[0])
    assert store.reads == [*DIGESTS[:2], DIGESTS[0]]
    cache.close()


async def test_damaged_and_senseless_files_are_refused(store: EchoStore, files: StoreFileReader) -> None:
    cache = TokenizerCache(files, 1 << 30)
    store.files[DIGESTS[0]] = FILES[1]
    with pytest.raises(DataCorrupted):
        await cache.get(DIGESTS[0])
    senseless = b'{"model": {"type": "BPE", "vocab": 3, "merges": []}}'
    store.files[blake3(senseless).hexdigest()] = senseless
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json: model\.vocab: "):
        await cache.get(blake3(senseless).hexdigest())
    store.files[DIGESTS[0]] = FILES[0]
    assert await cache.get(DIGESTS[0])
    cache.close()
