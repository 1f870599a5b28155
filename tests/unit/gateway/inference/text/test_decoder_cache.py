"""Decoders are cached within a byte limit, and loaded for the tenants in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from tests.support.sample_tokenizers import large_tokenizer, tiny_tokenizer
from torchrelay.common.errors import InvalidRequest, QueueFull
from torchrelay.common.tokens.tokenizer import load_decoder
from torchrelay.gateway.inference.text.decoder_cache import MAX_WAITING, DecoderCache
from torchrelay.gateway.inference.text.processes.frames import TOKENIZER
from torchrelay.gateway.inference.text.processes.process_connection import LocalFile

ENCODED = [tiny_tokenizer(300 + 10 * index) for index in range(4)]


def write(folder: Path, encoded: bytes) -> LocalFile:
    digest = blake3(encoded).hexdigest()
    path = folder / digest
    path.write_bytes(encoded)
    return LocalFile((TOKENIZER, digest), path, len(encoded))


@pytest.fixture
def files(tmp_path: Path) -> list[LocalFile]:
    return [write(tmp_path, encoded) for encoded in ENCODED]


def digest(file: LocalFile) -> str:
    return file.id[1]


@pytest.fixture
def cache() -> Iterator[DecoderCache]:
    cache = DecoderCache(1 << 30)
    yield cache
    cache.close()


async def test_concurrent_loads_share_one_decoder(cache: DecoderCache, files: list[LocalFile]) -> None:
    assert cache.get("acme", digest(files[0])) is None
    decoders = await asyncio.gather(*(cache.load("acme", files[0]) for _ in range(10)))
    assert all(decoder is decoders[0] for decoder in decoders)
    assert cache.get("acme", digest(files[0])) is decoders[0]
    assert decoders[0].tokens.decode([5])


async def test_least_recently_used_decoders_are_evicted_first(files: list[LocalFile]) -> None:
    max_bytes = sum(load_decoder(encoded).num_bytes for encoded in ENCODED[:3])
    cache = DecoderCache(max_bytes)
    for index in (0, 1, 2):
        await cache.load("acme", files[index])
    assert cache.get("acme", digest(files[0])) is not None
    await cache.load("acme", files[3])  # 3 is larger than 1: several must be evicted
    cache.check_integrity()
    assert 0 < cache.num_bytes <= max_bytes
    kept = [cache.get("acme", digest(file)) for file in files]
    assert [decoder is not None for decoder in kept] == [True, False, False, True]
    assert cache.num_bytes == sum(decoder.tokens.num_bytes for decoder in kept if decoder is not None)
    cache.close()


async def test_decoder_larger_than_the_cache_still_serves(files: list[LocalFile]) -> None:
    cache = DecoderCache(10)
    for file in files[:2]:
        assert (await cache.load("acme", file)).tokens.decode([5])
        cache.check_integrity()
    assert cache.get("acme", digest(files[1])) is not None and cache.get("acme", digest(files[0])) is None
    cache.close()


async def test_invalid_tokenizer_files_are_refused(cache: DecoderCache, tmp_path: Path, files: list[LocalFile]) -> None:
    senseless = write(tmp_path, b'{"model": {"type": "BPE", "vocab": 3, "merges": []}}')
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        await cache.load("acme", senseless)
    assert await cache.load("acme", files[0])


async def test_tenant_with_many_loads_delays_another_by_one(cache: DecoderCache, tmp_path: Path) -> None:
    """All tenants used to share one queue."""
    order: list[str] = []

    async def load(tenant: str, file: LocalFile) -> None:
        await cache.load(tenant, file)
        order.append(tenant)

    many = [write(tmp_path, large_tokenizer(2000, seed=seed)) for seed in range(6)]
    last = write(tmp_path, large_tokenizer(2000, seed=6))
    await asyncio.gather(*(load("acme", file) for file in many), load("beta", last))
    assert order.index("beta") <= 1


async def test_waiting_loads_per_tenant_are_bounded(cache: DecoderCache, files: list[LocalFile]) -> None:
    waiting = [asyncio.ensure_future(cache.load("acme", files[0])) for _ in range(MAX_WAITING + 1)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="wait for the tokenizers"):
        await cache.load("acme", files[1])
    assert await cache.load("beta", files[1])
    await asyncio.gather(*waiting)


async def test_cancelled_load_passes_its_turn_on(cache: DecoderCache, files: list[LocalFile]) -> None:
    leaving = [asyncio.ensure_future(cache.load("acme", file)) for file in files[:3]]
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    assert await cache.load("acme", files[3])
