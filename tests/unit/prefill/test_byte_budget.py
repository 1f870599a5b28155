"""The budget of KV bytes that wait for decode workers: its bound, its order, and its releases."""

from __future__ import annotations

import asyncio

from torchrelay.prefill.byte_budget import ByteBudget


async def test_requests_are_granted_in_order() -> None:
    budget = ByteBudget(100)
    await budget.acquire(60)
    large, small = (asyncio.ensure_future(budget.acquire(size)) for size in (80, 10))
    await asyncio.sleep(0)
    assert not large.done() and not small.done()  # the small request does not overtake the large one
    budget.release(60)
    await large
    await small
    assert budget.num_granted == 90


async def test_request_above_whole_budget_is_granted_alone() -> None:
    budget = ByteBudget(100)
    await budget.acquire(10)
    huge = asyncio.ensure_future(budget.acquire(500))
    await asyncio.sleep(0)
    assert not huge.done()
    budget.release(10)
    await huge
    assert budget.num_granted == 500
    budget.release(500)
    assert budget.num_granted == 0


async def test_cancelled_wait_takes_nothing() -> None:
    budget = ByteBudget(100)
    await budget.acquire(100)
    waiting, granted = (asyncio.ensure_future(budget.acquire(50)) for _ in range(2))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    budget.release(100)
    granted.cancel()
    await asyncio.gather(granted, return_exceptions=True)
    assert budget.num_granted == 0
