from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import update

from tests.support.brokers import free_port
from tests.support.silent_proxy import SilentProxy
from tests.support.wait import eventually
from tests.unit.gateway.conftest import DATABASES, AccountingRig, Clock
from torchrelay.common.errors import QuotaExceeded, RateLimited
from torchrelay.gateway.core import ModelShape, Price, Principal, PublishedModel, RequestRate, Reservation, Version
from torchrelay.gateway.limits import script_runner
from torchrelay.gateway.limits.circuit import Circuit
from torchrelay.gateway.limits.limiter import Limiter, RequestRateExceeded
from torchrelay.gateway.limits.script_runner import SKIP_S, RedisScriptRunner
from torchrelay.gateway.sql.tables import balances

PRICE = Price("p", "", 1, 1, 10, 0)
VERSION = Version("v", "p", 1, "LlamaForCausalLM", "float32", ModelShape(1, 1, 1, 4, 128, 64), 64, 1)
MODEL = PublishedModel("acme/m", "t", VERSION, PRICE, 0, 0, 0)


@pytest.fixture
def database_url(request: pytest.FixtureRequest) -> str:
    """SQLite, unless a test asks for each kind: the limiter has one query."""
    url: str = request.getfixturevalue(f"{getattr(request, 'param', 'sqlite')}_url")
    return url


@dataclass(frozen=True)
class LimitRig:
    """A limiter, and a principal without limits."""

    parts: AccountingRig
    limits: Limiter
    clock: Clock
    principal: Principal

    async def admit(
        self, num_prompt: int = 10, num_output: int = 100, least_output: int | None = None, **its_limits: int
    ) -> Reservation:
        caller = replace(self.principal, **its_limits)  # type: ignore[arg-type]
        return await self.limits.admit(caller, MODEL, num_prompt, num_output, least_output)

    async def set_spent(self, spent_nano: int) -> None:
        async with self.parts.database.write() as connection:
            await connection.execute(update(balances).values(spent_nano=spent_nano))

    def with_redis(self, url: str) -> LimitRig:
        """The rig with another limiter, which the caller closes."""
        return replace(self, limits=Limiter(url, self.parts.database, lease_s=60))


@pytest.fixture
async def rig(parts: AccountingRig, redis_url: str) -> AsyncIterator[LimitRig]:
    """Its limiter waits long for Redis: on a busy machine half a second can pass."""
    clock = Clock()
    limits = Limiter(redis_url, parts.database, lease_s=60, clock=clock)
    limits._scripts = RedisScriptRunner(redis_url, answer_limit_s=60)
    yield LimitRig(parts, limits, clock, Principal(parts.acme.tenant_id, "acme", f"key-{secrets.token_hex(4)}"))
    await limits.close()


async def test_principal_without_limits_needs_no_redis(rig: LimitRig) -> None:
    connections: list[object] = []
    redis = await asyncio.start_server(lambda _reader, writer: connections.append(writer), "127.0.0.1", 0)
    async with redis:
        other = rig.with_redis(f"redis://127.0.0.1:{redis.sockets[0].getsockname()[1]}/0")
        reservation = await other.admit()
        assert reservation.reserved_nano == 0
        await other.limits.release(reservation, 5)
    assert not connections


async def test_requests_per_minute_of_a_key_are_limited(rig: LimitRig) -> None:
    admitting = (rig.admit(requests_per_minute=30) for _ in range(40))
    results = await asyncio.gather(*admitting, return_exceptions=True)
    refused = [result for result in results if isinstance(result, RateLimited)]
    assert len(refused) == 10
    assert all(error.retry_after_s is not None and 0 < error.retry_after_s <= 2 for error in refused)
    rig.clock.now += 2.0  # one token is refilled every two seconds
    await rig.admit(requests_per_minute=30)
    with pytest.raises(RateLimited):
        await rig.admit(requests_per_minute=30)
    other_key = replace(rig.principal, key_id=f"{rig.principal.key_id}-other")
    await replace(rig, principal=other_key).admit(requests_per_minute=30)


async def test_what_is_left_of_a_rate_is_reported(rig: LimitRig) -> None:
    for num_left in (2, 1, 0):
        assert (await rig.admit(1, 1, requests_per_minute=3)).rate == RequestRate(3, num_left)
    rig.clock.now += 10
    with pytest.raises(RequestRateExceeded) as caught:
        await rig.admit(1, 1, requests_per_minute=3)
    assert (caught.value.rate, caught.value.rate.full_in_s) == (RequestRate(3, 0.5), 50)
    rig.clock.now += 20  # 1.5 are left, before this request
    both = await rig.admit(1, 1, requests_per_minute=3, budget_nano=10**6)
    assert (both.rate, both.reserved_nano) == (RequestRate(3, 0.5), 11)
    assert (await rig.admit(1, 1, budget_nano=10**6)).rate is None
    assert (await rig.admit(1, 1)).rate is None


async def test_largest_cost_is_reserved_until_the_release(rig: LimitRig) -> None:
    await rig.set_spent(400)
    first = await rig.admit(budget_nano=2500)  # 1010 at most
    assert first.reserved_nano == 1010
    await rig.admit(budget_nano=2500)
    with pytest.raises(RateLimited) as waiting:  # what is reserved comes back soon, for the most part
        await rig.admit(budget_nano=2500)
    assert "running requests reserve $0.00000202 of the budget of $0.0000025" in waiting.value.message
    assert waiting.value.retry_after_s == 1.0
    with pytest.raises(QuotaExceeded) as refused:  # it would not fit if nothing ran
        await rig.admit(10, 210, budget_nano=2500)
    numbers = "of tenant acme exceeded: $0.0000004 spent, $0.00000202 reserved"
    for part in ("budget of $0.0000025", numbers, "may cost $0.00000211", "torchrelay tenant set acme --budget"):
        assert part in refused.value.message
    for _ in range(3):  # as after lost answers
        assert await rig.limits.release(first, 50)  # now 450 spent, 1010 reserved
    await rig.admit(budget_nano=2500)
    with pytest.raises(RateLimited):
        await rig.admit(10, 3, budget_nano=2500)
    await rig.admit(20, 1, budget_nano=2500)


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
    rig: LimitRig, spent_nano: int, num_wanted: int, num_choices: int, num_output_tokens: int
) -> None:
    await rig.set_spent(spent_nano)
    reservation = await rig.admit(10, num_wanted, num_choices, budget_nano=2000)
    assert reservation.max_output_tokens == num_output_tokens
    assert reservation.reserved_nano == 10 + 10 * num_output_tokens
    await rig.limits.release(reservation, 0)  # all that is reserved comes back
    assert (await rig.admit(10, num_wanted, num_choices, budget_nano=2000)).max_output_tokens == num_output_tokens


async def test_spent_budget_refuses_answer_without_limit(rig: LimitRig) -> None:
    await rig.set_spent(1981)
    with pytest.raises(QuotaExceeded, match=r"costs at least \$0\.00000002; shorten the prompt, or ask the admin"):
        await rig.admit(10, 100, 1, budget_nano=2000)
    free = replace(MODEL, price=replace(PRICE, output_nano=0))
    admitted = await rig.limits.admit(replace(rig.principal, budget_nano=2000), free, 10, 100, 1)
    assert admitted.max_output_tokens == 100


async def test_reservations_of_others_do_not_shorten_answers(rig: LimitRig) -> None:
    """They come back: the request may wait for that, and then gets all it asks for."""
    first = await rig.admit(budget_nano=2000)
    with pytest.raises(RateLimited) as waiting:
        await rig.admit(10, 100, 1, budget_nano=2000)
    assert waiting.value.retry_after_s == 1.0
    await rig.limits.release(first, 500)
    assert (await rig.admit(10, 100, 1, budget_nano=2000)).max_output_tokens == 100


async def test_release_without_an_answer_is_repeatable(rig: LimitRig, redis_url: str) -> None:
    async with SilentProxy(redis_url).serving() as proxy:
        other = rig.with_redis(proxy.url)
        first = await other.admit(budget_nano=1010)
        proxy.fall_silent()
        assert not await other.limits.release(first, 0)
        assert not await other.limits.release(first, 0), "the circuit is open"
        proxy.speak()
        await eventually(lambda: other.limits.release(first, 0))
        await other.admit(budget_nano=1010)
        await other.limits.close()


async def test_unreleased_reservation_ends_with_its_lease(rig: LimitRig) -> None:
    await rig.admit(budget_nano=1010)
    rig.clock.now += 59
    with pytest.raises(RateLimited):
        await rig.admit(budget_nano=1010)
    rig.clock.now += 1
    await rig.admit(budget_nano=1010)


async def test_concurrent_reservations_stay_within_the_budget(rig: LimitRig) -> None:
    results = await asyncio.gather(*(rig.admit(budget_nano=5 * 1010) for _ in range(20)), return_exceptions=True)
    assert sum(not isinstance(result, BaseException) for result in results) == 5


async def test_cancelled_admission_reserves_nothing(rig: LimitRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis has answered, or answers later."""
    run, asked, may_answer = rig.limits._run, asyncio.Event(), asyncio.Event()

    async def run_late(*args: Any) -> Any:
        answer = await run(*args)
        asked.set()
        await may_answer.wait()
        return answer

    monkeypatch.setattr(rig.limits, "_run", run_late)
    admitting = asyncio.ensure_future(rig.admit(budget_nano=1010))
    await asked.wait()
    admitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await admitting
    may_answer.set()
    await eventually(lambda: not rig.limits._undoing, "the release")
    assert (await rig.admit(budget_nano=1010)).reserved_nano == 1010


async def test_reservation_of_a_request_that_goes_on_outlives_its_lease(rig: LimitRig) -> None:
    kept = await rig.admit(budget_nano=2020)
    await rig.admit(budget_nano=2020)
    rig.clock.now += 50
    rig.limits.renew(kept)
    await eventually(lambda: not rig.limits._undoing, "the renewal")
    rig.clock.now += 50  # the lease of the other is over
    await rig.admit(budget_nano=2020)
    with pytest.raises(RateLimited):
        await rig.admit(budget_nano=2020)
    await rig.limits.release(kept, cost_nano=0)
    rig.limits.renew(kept)
    await eventually(lambda: not rig.limits._undoing, "the renewal")
    await rig.admit(budget_nano=2020)


async def test_close_does_not_wait_for_a_lost_redis(rig: LimitRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The releases that it does not answer are left to the lease of their reservations."""
    asked = asyncio.Event()

    async def lost(*_: Any) -> None:
        asked.set()
        await asyncio.sleep(0)

    monkeypatch.setattr(rig.limits, "_run", lost)
    admitting = asyncio.ensure_future(rig.admit(budget_nano=1010))
    await asked.wait()
    admitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await admitting
    async with asyncio.timeout(20):  # of the 36 s in which it is released again and again
        await rig.limits.close()
    assert not rig.limits._undoing


@pytest.mark.parametrize("database_url", DATABASES, indirect=True)
async def test_emptied_redis_is_filled_from_sql(rig: LimitRig, redis_url: str) -> None:
    await rig.admit(budget_nano=3000)
    await rig.set_spent(2500)
    redis = Redis.from_url(redis_url)
    async for key in redis.scan_iter(f"relay:{{{rig.principal.tenant_id}}}:*"):
        await redis.delete(key)
    await redis.aclose()
    with pytest.raises(QuotaExceeded):
        await rig.admit(budget_nano=3000)


async def test_without_redis_requests_are_allowed(rig: LimitRig) -> None:
    for url in ("", f"redis://127.0.0.1:{free_port()}/0"):
        other = rig.with_redis(url)
        admitted = [await other.admit(requests_per_minute=1, budget_nano=1) for _ in range(3)]
        assert len({reservation.reservation_id for reservation in admitted}) == 3
        assert {reservation.tenant_id for reservation in admitted} == {rig.principal.tenant_id}
        for reservation in admitted:
            await other.limits.release(reservation, 5)
        await other.limits.close()


async def test_hung_redis_is_asked_once_per_interval(
    rig: LimitRig, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_unanswered = 0
    silent = Circuit.silent

    def note(circuit: Circuit, now_s: float) -> None:
        nonlocal num_unanswered
        num_unanswered += 1
        silent(circuit, now_s)

    monkeypatch.setattr(Circuit, "silent", note)
    monkeypatch.setattr(script_runner, "RedisScriptRunner", partial(RedisScriptRunner, clock=rig.clock))
    async with SilentProxy(redis_url).serving() as proxy:
        other = rig.with_redis(proxy.url)

        async def is_limited() -> bool:
            rig.clock.now += SKIP_S
            with suppress(RateLimited):
                await other.admit(requests_per_minute=1)
                return False
            return True

        await eventually(is_limited)
        proxy.fall_silent()
        num_unanswered = 0
        for num_intervals in (1, 2, 3):
            for _ in range(20):
                await other.admit(requests_per_minute=1)
            assert num_unanswered == num_intervals
            rig.clock.now += SKIP_S
        proxy.speak()
        await eventually(is_limited)
        await other.limits.close()


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
