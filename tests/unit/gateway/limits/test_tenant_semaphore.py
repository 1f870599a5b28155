from __future__ import annotations

import asyncio

import pytest

from torchrelay.common.errors import Overloaded
from torchrelay.gateway.limits.shares import ShareLimits, Shares
from torchrelay.gateway.limits.tenant_semaphore import TenantSemaphore


def semaphore_of(*, per_tenant: int = 8, at_once: int = 1, total_at_once: int = 1) -> TenantSemaphore:
    limits = ShareLimits("queries", 100, "max_queries", per_tenant, "max_queries_per_tenant")
    return TenantSemaphore(Shares(limits), at_once=at_once, total_at_once=total_at_once)


async def test_tenants_alternate_regardless_of_arrival() -> None:
    semaphore, order = semaphore_of(), list[str]()

    async def query(tenant_id: str) -> None:
        async with semaphore.turn(tenant_id):
            order.append(tenant_id)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for tenant_id in "aaaaaab":
            tasks.create_task(query(tenant_id))
    assert order.index("b") <= 1
    assert order.count("a") == 6


async def test_waiting_queries_per_tenant_are_bounded() -> None:
    semaphore, go_on = semaphore_of(per_tenant=2), asyncio.Event()

    async def query() -> None:
        async with semaphore.turn("a"):
            await go_on.wait()

    waiting = [asyncio.ensure_future(query()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="max_queries_per_tenant"):
        await query()
    waiting[1].cancel()  # frees its place
    await asyncio.wait({waiting[1]})
    waiting[1] = asyncio.ensure_future(query())
    go_on.set()
    await asyncio.gather(*waiting)


async def test_tenant_without_a_turn_leaves_no_semaphore() -> None:
    semaphore = TenantSemaphore(None, at_once=1, total_at_once=1)
    async with semaphore.turn("a"):
        assert list(semaphore._semaphores) == ["a"]
    assert not semaphore._semaphores
