from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import update

from tests.support.brokers import free_port
from tests.support.silent_proxy import SilentProxy
from tests.support.wait import eventually
from tests.unit.gateway.conftest import AccountingRig, Clock
from torchrelay.common.errors import QuotaExceeded, RateLimited
from torchrelay.gateway.core import ModelShape, Price, Principal, PublishedModel, RequestRate, Version
from torchrelay.gateway.limits import script_runner
from torchrelay.gateway.limits.circuit import Circuit
from torchrelay.gateway.limits.limiter import Limiter, RequestRateExceeded
from torchrelay.gateway.limits.script_runner import SKIP_S, RedisScriptRunner
from torchrelay.gateway.sql.tables import balances

PRICE = Price("p", "", 1, 1, 10, 0)
VERSION = Version("v", "p", 1, "LlamaForCausalLM", "float32", ModelShape(1, 1, 1, 4, 128, 64), 64, 1)
MODEL = PublishedModel("acme/m", "t", VERSION, PRICE, 0, 0, 0)


@pytest.fixture
def principal(parts: AccountingRig) -> Principal:
    return Principal(parts.acme.tenant_id, "acme", f"key-{secrets.token_hex(4)}")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def limits(
    parts: AccountingRig, redis_url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Limiter]:
    """A limiter that waits long for Redis: on a busy machine half a second can pass."""
    monkeypatch.setattr(script_runner, "RedisScriptRunner", partial(RedisScriptRunner, answer_limit_s=60))
    made = Limiter(redis_url, parts.database, lease_s=60, clock=clock)
    yield made
    await made.close()


async def set_spent(parts: AccountingRig, spent_nano: int) -> None:
    async with parts.database.write() as connection:
        await connection.execute(update(balances).values(spent_nano=spent_nano))


async def test_principal_without_limits_needs_no_redis(parts: AccountingRig, principal: Principal) -> None:
    connections: list[object] = []
    redis = await asyncio.start_server(lambda _reader, writer: connections.append(writer), "127.0.0.1", 0)
    async with redis:
        url = f"redis://127.0.0.1:{redis.sockets[0].getsockname()[1]}/0"
        limits = Limiter(url, parts.database, lease_s=60)
        reservation = await limits.admit(principal, MODEL, 10, 100)
        assert reservation.reserved_nano == 0
        await limits.release(reservation, 5)
    assert not connections


async def test_requests_per_minute_of_a_key_are_limited(limits: Limiter, clock: Clock, principal: Principal) -> None:
    limited = replace(principal, requests_per_minute=30)
    results: list[Any] = await asyncio.gather(
        *(limits.admit(limited, MODEL, 1, 1) for _ in range(40)), return_exceptions=True
    )
    refused = [result for result in results if isinstance(result, RateLimited)]
    assert len(refused) == 10
    assert all(0 < error.retry_after_s <= 2 for error in refused)
    clock.now += 2.0  # one token is refilled every two seconds
    await limits.admit(limited, MODEL, 1, 1)
    with pytest.raises(RateLimited):
        await limits.admit(limited, MODEL, 1, 1)
    other_key = replace(limited, key_id=f"{limited.key_id}-other")
    await limits.admit(other_key, MODEL, 1, 1)


async def test_what_is_left_of_a_rate_is_reported(limits: Limiter, clock: Clock, principal: Principal) -> None:
    limited = replace(principal, requests_per_minute=3)
    for num_left in (2, 1, 0):
        assert (await limits.admit(limited, MODEL, 1, 1)).rate == RequestRate(3, num_left)
    clock.now += 10
    with pytest.raises(RequestRateExceeded) as caught:
        await limits.admit(limited, MODEL, 1, 1)
    assert (caught.value.rate, caught.value.rate.full_in_s) == (RequestRate(3, 0.5), 50)
    clock.now += 20  # 1.5 are left, before this request
    both = await limits.admit(replace(limited, budget_nano=10**6), MODEL, 1, 1)
    assert (both.rate, both.reserved_nano) == (RequestRate(3, 0.5), 11)
    assert (await limits.admit(replace(principal, budget_nano=10**6), MODEL, 1, 1)).rate is None
    assert (await limits.admit(principal, MODEL, 1, 1)).rate is None


async def test_largest_cost_is_reserved_until_the_release(
    parts: AccountingRig, limits: Limiter, principal: Principal
) -> None:
    await set_spent(parts, 400)
    budgeted = replace(principal, budget_nano=2500)
    first = await limits.admit(budgeted, MODEL, 10, 100)  # 1010 at most
    assert first.reserved_nano == 1010
    await limits.admit(budgeted, MODEL, 10, 100)
    with pytest.raises(RateLimited) as waiting:  # what is reserved comes back soon, for the most part
        await limits.admit(budgeted, MODEL, 10, 100)
    assert "running requests reserve $0.00000202 of the budget of $0.0000025" in waiting.value.message
    assert waiting.value.retry_after_s == 1.0
    with pytest.raises(QuotaExceeded) as refused:  # it would not fit if nothing ran
        await limits.admit(budgeted, MODEL, 10, 210)
    numbers = (
        "budget of $0.0000025 of tenant acme exceeded: $0.0000004 spent, $0.00000202 reserved",
        "may cost $0.00000211",
    )
    assert all(part in refused.value.message for part in (*numbers, "torchrelay tenant set acme --budget"))
    await limits.release(first, 50)  # now 450 spent, 1010 reserved
    await limits.admit(budgeted, MODEL, 10, 100)
    with pytest.raises(RateLimited):
        await limits.admit(budgeted, MODEL, 10, 3)
    await limits.admit(budgeted, MODEL, 20, 1)


@pytest.mark.parametrize(
    ("spent_nano", "num_wanted", "num_choices", "num_output_tokens"),
    [
        (0, 100, 1, 100),
        (990, 100, 1, 100),
        (991, 100, 1, 99),  # of 1009 left 10 are the prompt's
        (1900, 100, 1, 9),
        (1971, 100, 1, 1),
        (1980, 100, 1, 1),
        (1900, 400, 4, 8),  # an equal part for each choice
    ],
)
async def test_rest_of_budget_is_reserved_for_answer_without_limit(
    parts: AccountingRig,
    limits: Limiter,
    principal: Principal,
    spent_nano: int,
    num_wanted: int,
    num_choices: int,
    num_output_tokens: int,
) -> None:
    await set_spent(parts, spent_nano)
    budgeted = replace(principal, budget_nano=2000)
    reservation = await limits.admit(budgeted, MODEL, 10, num_wanted, num_choices)
    assert reservation.max_output_tokens == num_output_tokens
    assert reservation.reserved_nano == 10 + 10 * num_output_tokens
    await limits.release(reservation, 0)  # all that is reserved comes back
    assert (await limits.admit(budgeted, MODEL, 10, num_wanted, num_choices)).max_output_tokens == num_output_tokens


async def test_spent_budget_refuses_answer_without_limit(
    parts: AccountingRig, limits: Limiter, principal: Principal
) -> None:
    await set_spent(parts, 1981)
    budgeted = replace(principal, budget_nano=2000)
    with pytest.raises(QuotaExceeded, match=r"costs at least \$0\.00000002; shorten the prompt, or ask the admin"):
        await limits.admit(budgeted, MODEL, 10, 100, 1)
    free = replace(MODEL, price=replace(PRICE, output_nano=0))
    assert (await limits.admit(budgeted, free, 10, 100, 1)).max_output_tokens == 100


async def test_reservations_of_others_do_not_shorten_answers(
    parts: AccountingRig, limits: Limiter, principal: Principal
) -> None:
    """They come back: the request may wait for that, and then gets all it asks for."""
    budgeted = replace(principal, budget_nano=2000)
    first = await limits.admit(budgeted, MODEL, 10, 100)
    with pytest.raises(RateLimited) as waiting:
        await limits.admit(budgeted, MODEL, 10, 100, 1)
    assert waiting.value.retry_after_s == 1.0
    await limits.release(first, 500)
    assert (await limits.admit(budgeted, MODEL, 10, 100, 1)).max_output_tokens == 100


async def test_repeated_release_counts_once(parts: AccountingRig, limits: Limiter, principal: Principal) -> None:
    budgeted = replace(principal, budget_nano=2220)
    first = await limits.admit(budgeted, MODEL, 10, 100)
    await limits.admit(budgeted, MODEL, 10, 100)
    for _ in range(3):  # as after lost answers
        assert await limits.release(first, 200)
    await limits.admit(budgeted, MODEL, 10, 100)  # 200 spent, 1010 reserved
    with pytest.raises(RateLimited):
        await limits.admit(budgeted, MODEL, 1, 0)


async def test_release_without_an_answer_is_repeatable(
    parts: AccountingRig, principal: Principal, redis_url: str
) -> None:
    budgeted = replace(principal, budget_nano=1010)
    async with SilentProxy(redis_url).serving() as proxy:
        limits = Limiter(proxy.url, parts.database, lease_s=60)
        first = await limits.admit(budgeted, MODEL, 10, 100)
        proxy.fall_silent()
        assert not await limits.release(first, 0)
        assert not await limits.release(first, 0), "the circuit is open"
        proxy.speak()
        await eventually(lambda: limits.release(first, 0))
        await limits.admit(budgeted, MODEL, 10, 100)
        await limits.close()


async def test_unreleased_reservation_ends_with_its_lease(
    parts: AccountingRig, limits: Limiter, clock: Clock, principal: Principal
) -> None:
    budgeted = replace(principal, budget_nano=1010)
    await limits.admit(budgeted, MODEL, 10, 100)
    clock.now += 59
    with pytest.raises(RateLimited):
        await limits.admit(budgeted, MODEL, 10, 100)
    clock.now += 1
    await limits.admit(budgeted, MODEL, 10, 100)


async def test_concurrent_reservations_stay_within_the_budget(
    parts: AccountingRig, limits: Limiter, principal: Principal
) -> None:
    budgeted = replace(principal, budget_nano=5 * 1010)
    results = await asyncio.gather(*(limits.admit(budgeted, MODEL, 10, 100) for _ in range(20)), return_exceptions=True)
    assert sum(not isinstance(result, BaseException) for result in results) == 5


async def test_emptied_redis_is_filled_from_sql(
    parts: AccountingRig, limits: Limiter, principal: Principal, redis_url: str
) -> None:
    budgeted = replace(principal, budget_nano=3000)
    await limits.admit(budgeted, MODEL, 10, 100)
    await set_spent(parts, 2500)
    redis = Redis.from_url(redis_url)
    async for key in redis.scan_iter(f"relay:{{{principal.tenant_id}}}:*"):
        await redis.delete(key)
    await redis.aclose()
    with pytest.raises(QuotaExceeded):
        await limits.admit(budgeted, MODEL, 10, 100)


async def test_without_redis_requests_are_allowed(parts: AccountingRig, principal: Principal) -> None:
    for url in ("", f"redis://127.0.0.1:{free_port()}/0"):
        limits = Limiter(url, parts.database, lease_s=60)
        limited = replace(principal, requests_per_minute=1, budget_nano=1)
        admitted = [await limits.admit(limited, MODEL, 10, 100) for _ in range(3)]
        assert len({reservation.reservation_id for reservation in admitted}) == 3
        assert {reservation.tenant_id for reservation in admitted} == {principal.tenant_id}
        for reservation in admitted:
            await limits.release(reservation, 5)
        await limits.close()


async def test_hung_redis_is_asked_once_per_interval(
    parts: AccountingRig, principal: Principal, redis_url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = replace(principal, requests_per_minute=1)
    num_unanswered = 0
    silent = Circuit.silent

    def note(circuit: Circuit, now_s: float) -> None:
        nonlocal num_unanswered
        num_unanswered += 1
        silent(circuit, now_s)

    monkeypatch.setattr(Circuit, "silent", note)
    monkeypatch.setattr(script_runner, "RedisScriptRunner", partial(RedisScriptRunner, clock=clock))
    async with SilentProxy(redis_url).serving() as proxy:
        limits = Limiter(proxy.url, parts.database, lease_s=60)

        async def is_limited() -> bool:
            clock.now += SKIP_S
            with suppress(RateLimited):
                await limits.admit(limited, MODEL, 1, 1)
                return False
            return True

        await eventually(is_limited)
        proxy.fall_silent()
        num_unanswered = 0
        for num_intervals in (1, 2, 3):
            for _ in range(20):
                await limits.admit(limited, MODEL, 1, 1)
            assert num_unanswered == num_intervals
            clock.now += SKIP_S
        proxy.speak()
        await eventually(is_limited)
        await limits.close()


def test_open_circuit_admits_a_probe_at_a_time() -> None:
    circuit = Circuit(open_s=1.0)
    assert circuit.is_closed and all(circuit.may_ask(0.0) for _ in range(3))
    circuit.silent(10.0)
    assert not circuit.is_closed and not circuit.may_ask(10.99)
    assert [circuit.may_ask(11.0) for _ in range(3)] == [True, False, False]
    circuit.silent(11.5)
    assert not circuit.may_ask(12.4)
    assert circuit.may_ask(12.5)
    circuit.answered()
    assert circuit.is_closed and all(circuit.may_ask(12.6) for _ in range(3))


def test_lost_probe_is_followed_by_another() -> None:
    circuit = Circuit(open_s=1.0)
    circuit.silent(0.0)
    assert circuit.may_ask(1.0)
    assert not circuit.may_ask(1.9)
    assert circuit.may_ask(2.0)
