"""The order of offers that wait for pages."""

from __future__ import annotations

import asyncio

import pytest

from torchrelay.decode.page_queue import PageQueue
from torchrelay.engine.core import KvPoolFull


class Pool:
    """Counts free pages, and lists the offers that asked for pages and got them."""

    def __init__(self, num_free: int) -> None:
        self.num_free = num_free
        self.asked: list[str] = []
        self.served: list[str] = []
        self.unwanted: set[str] = set()
        self.queue = PageQueue()

    async def offer(self, name: str, num_pages: int) -> str | None:
        async def reserve() -> str:
            self.asked.append(name)
            await asyncio.sleep(0)
            if num_pages > self.num_free:
                raise KvPoolFull("no pages")
            self.num_free -= num_pages
            self.served.append(name)
            return name

        return await self.queue.reserve(reserve, lambda: name not in self.unwanted)

    async def free(self, num_pages: int) -> None:
        self.num_free += num_pages
        self.queue.pages_freed()
        for _ in range(20):
            await asyncio.sleep(0)


async def waiting(pool: Pool, *offers: tuple[str, int]) -> list[asyncio.Task[str | None]]:
    tasks = []
    for offer in offers:
        tasks.append(asyncio.ensure_future(pool.offer(*offer)))
        await asyncio.sleep(0)
    await pool.free(0)
    return tasks


async def test_small_offers_do_not_overtake_large_offer() -> None:
    """If all waiting offers were woken together, the first to reach the engine would take the pages."""
    pool = Pool(num_free=0)
    tasks = await waiting(pool, ("large", 8), ("small 1", 1), ("small 2", 1))
    for _ in range(7):
        await pool.free(1)
    assert pool.served == [] and set(pool.asked) == {"large"}
    await pool.free(2)
    assert pool.served == ["large", "small 1"]
    await pool.free(1)
    assert await asyncio.gather(*tasks) == ["large", "small 1", "small 2"]


async def test_next_offer_tries_when_offer_ends() -> None:
    pool = Pool(num_free=1)
    large, unwanted, small = await waiting(pool, ("large", 8), ("unwanted", 8), ("small", 1))
    pool.unwanted.add("unwanted")
    pool.queue.attempt_ended()
    assert await unwanted is None and pool.served == []
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    assert await small == "small"


async def test_next_offer_tries_when_offer_fails() -> None:
    pool = Pool(num_free=0)

    async def mismatch() -> None:
        raise ValueError("another layout")

    (small,) = await waiting(pool, ("small", 1))
    failing = asyncio.ensure_future(pool.queue.reserve(mismatch, lambda: True))
    await pool.free(1)
    assert await small == "small"
    with pytest.raises(ValueError, match="another layout"):
        await failing
