"""A bell rings for news and ticks without them."""

from __future__ import annotations

import asyncio

from torchrelay.gateway.inference.bell import Bell


async def test_rings_are_heard_once_whenever_they_come() -> None:
    bell = Bell(10, 10)
    bell.ring()
    bell.ring()
    assert await bell.wait()
    waiting = asyncio.ensure_future(bell.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    bell.ring()
    assert await waiting
    bell.close()


async def test_it_ticks_while_nobody_rings_and_not_after_its_end() -> None:
    bell = Bell(0.01, 0.02)
    assert not await bell.wait()
    assert not await bell.wait()
    bell.close()
    waiting = asyncio.ensure_future(bell.wait())
    done, _ = await asyncio.wait({waiting}, timeout=0.1)
    assert not done
    waiting.cancel()


async def test_a_cancelled_wait_loses_nothing() -> None:
    bell = Bell(10, 10)
    waiting = asyncio.ensure_future(bell.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    bell.ring()
    assert await bell.wait()
    bell.close()


async def test_a_rest_hears_no_ring_but_can_be_ended() -> None:
    bell = Bell(10, 10)
    await bell.rest(0.01)
    bell.end_rest()  # nobody rests
    resting = asyncio.ensure_future(bell.rest(10))
    await asyncio.sleep(0)
    bell.ring()
    await asyncio.sleep(0)
    assert not resting.done()
    bell.end_rest()
    await resting
    assert await bell.wait()
    bell.close()
