from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.common.errors import AtCapacity, Overloaded, QueueFull, RateLimited
from torchrelay.gateway.limits.change_rate import BURST, PER_S, ChangeRate
from torchrelay.gateway.limits.shares import ShareLimits, Shares
from torchrelay.gateway.limits.tenant_turns import TenantTurns

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


def turns_of(*, per_tenant: int = 8, at_once: int = 1, total_at_once: int = 1) -> TenantTurns:
    limits = ShareLimits("queries", 100, "max_queries", per_tenant, "max_queries_per_tenant")
    return TenantTurns(at_once=at_once, total_at_once=total_at_once, shares=Shares(limits))


async def test_tenants_alternate_regardless_of_arrival() -> None:
    turns, order = turns_of(), list[str]()

    async def query(tenant_id: str) -> None:
        async with turns.turn(tenant_id):
            order.append(tenant_id)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for tenant_id in "aaaaaab":
            tasks.create_task(query(tenant_id))
    assert order.index("b") <= 1
    assert order.count("a") == 6


async def test_waiting_queries_per_tenant_are_bounded() -> None:
    turns, go_on = turns_of(per_tenant=2), asyncio.Event()

    async def query() -> None:
        async with turns.turn("a"):
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


async def test_turns_at_once_are_bounded_by_tenant_and_in_all() -> None:
    turns, running, seen = TenantTurns(at_once=2, total_at_once=3), list[str](), set[tuple[str, ...]]()

    async def operation(tenant_id: str) -> None:
        async with turns.turn(tenant_id):
            running.append(tenant_id)
            seen.add(tuple(sorted(running)))
            try:
                await asyncio.sleep(0)
            finally:
                running.remove(tenant_id)

    operations = [asyncio.ensure_future(operation(tenant_id)) for tenant_id in "aaaaabbbbb"]
    await asyncio.sleep(0)
    operations[2].cancel()  # waiting
    operations[0].cancel()  # running
    await asyncio.gather(*operations, return_exceptions=True)
    assert max(map(len, seen)) == 3 and max(each.count("a") for each in seen) == 2


async def test_waiting_turns_beyond_the_limit_are_refused() -> None:
    turns = TenantTurns(at_once=1, total_at_once=1, max_waiting=1)
    begin_s = await turns.acquire("a")
    waiting = asyncio.ensure_future(turns.acquire("a"))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="1 of your requests already wait"):
        await turns.acquire("a")
    turns.release("a", begin_s)
    turns.release("a", await waiting)
    turns.release("b", await turns.acquire("b"))


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
