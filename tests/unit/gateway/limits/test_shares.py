from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.common.errors import AtCapacity, Overloaded, RateLimited
from torchrelay.gateway.limits.change_rate import BURST, PER_S, ChangeRate
from torchrelay.gateway.limits.shares import ShareLimits, Shares
from torchrelay.gateway.limits.tenant_semaphore import TenantSemaphore

LIMITS = ShareLimits("open requests", 5, "max_open_requests", 3, "max_open_requests_per_tenant")


def test_takes_above_share_or_total_are_refused() -> None:
    shares = Shares(LIMITS)
    shares.take("acme", 3)
    with pytest.raises(Overloaded, match=r"has 3 open requests .* share is 3 .*max_open_requests_per_tenant") as own:
        shares.take("acme")
    assert (own.value.http_status, own.value.code) == (429, "overloaded")
    shares.take("zoo", 2)
    with pytest.raises(AtCapacity, match=r"5 open requests, and its limit is 5 .setting max_open_requests.") as total:
        shares.take("zoo")
    assert (total.value.http_status, total.value.grpc_status, total.value.retry_after_s) == (503, "UNAVAILABLE", 1.0)
    shares.give_back("acme")
    shares.take("zoo")


def test_blocks_and_accounts_release_their_amounts() -> None:
    shares = Shares(LIMITS)
    with pytest.raises(ZeroDivisionError), shares.held("acme"), shares.account("acme") as account:
        account.take(2)
        assert (shares.num_held, shares.held_by("acme"), account.amount) == (3, 3, 2)
        account.release(1)
        account.release(2)
        assert (shares.num_held, shares.held_by("acme"), account.amount) == (2, 2, 1)
        account.release()
        account.release()
        assert shares.num_held == 1
        raise ZeroDivisionError
    assert (shares.num_held, shares.held_by("acme")) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4))))
def test_shares_are_exact_and_never_exceeded(takes: list[tuple[str, int]]) -> None:
    shares = Shares(LIMITS)
    held: list[tuple[str, int]] = []
    for tenant, amount in takes:
        try:
            shares.take(tenant, amount)
            held.append((tenant, amount))
        except Overloaded:
            if held:
                shares.give_back(*held.pop(0))
        for each in "abc":
            assert shares.held_by(each) == sum(amount for tenant, amount in held if tenant == each) <= 3
        assert shares.num_held == sum(amount for _, amount in held) <= 5


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


def test_changes_of_a_tenant_have_a_rate() -> None:
    now = 0.0
    changes = ChangeRate(lambda: now)
    for _ in range(BURST):
        changes.take("acme")
    with pytest.raises(RateLimited) as refused:
        changes.take("acme")
    assert refused.value.retry_after_s == 1 / PER_S
    changes.take("zoo")
    now = 1 / PER_S
    changes.take("acme")
    with pytest.raises(RateLimited):
        changes.take("acme")
