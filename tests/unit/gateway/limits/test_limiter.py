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
from sqlalchemy import insert, update

from tests.support.brokers import free_port
from tests.support.silent_proxy import SilentProxy
from tests.support.wait import eventually
from tests.unit.gateway.conftest import DATABASES, AccountingRig, Clock
from torchrelay.common.errors import InvalidRequest, QuotaExceeded, RateLimited
from torchrelay.gateway.core import (
    ChoiceUsage,
    FinishCause,
    Limits,
    ModelShape,
    Price,
    Principal,
    PublishedModel,
    RatesLeft,
    Reservation,
    Version,
)
from torchrelay.gateway.limits import script_runner
from torchrelay.gateway.limits.admission import Outcome, Wish
from torchrelay.gateway.limits.circuit import Circuit
from torchrelay.gateway.limits.limiter import LONG_ANSWER_TOKENS, Limiter
from torchrelay.gateway.limits.refusals import RateExceeded
from torchrelay.gateway.limits.script_runner import SKIP_S, RedisScriptRunner
from torchrelay.gateway.sql.tables import balances, gateways

PRICE = Price("p", "", 1, 1, 10, 0)
VERSION = Version("v", "p", 1, "LlamaForCausalLM", "float32", ModelShape(1, 1, 1, 4, 128, 64), 64, 1)
MODEL = PublishedModel("acme/m", "t", VERSION, PRICE, 0, 0, 0)
SCOPES = ("limits", "tenant_limits")


@pytest.fixture
def database_url(request: pytest.FixtureRequest) -> str:
    """SQLite, unless a test asks for each kind: the limiter has two queries."""
    url: str = request.getfixturevalue(f"{getattr(request, 'param', 'sqlite')}_url")
    return url


@dataclass(frozen=True)
class LimitRig:
    """A limiter, and a principal without limits."""

    parts: AccountingRig
    limits: Limiter
    principal: Principal
    redis: Any  # its client, whose types depend on how it decodes

    async def admit(
        self,
        num_prompt: int = 10,
        num_output: int = 100,
        least_output: int | None = None,
        scope: str = "tenant_limits",
        **its_limits: Any,
    ) -> Reservation:
        caller = replace(self.principal, **{scope: Limits(**its_limits)})  # type: ignore[arg-type]
        return await self.limits.admit(caller, MODEL, num_prompt, num_output, least_output)

    async def set_spent(self, spent_nano: int) -> None:
        async with self.parts.database.write() as connection:
            await connection.execute(update(balances).values(spent_nano=spent_nano))

    def with_redis(self, url: str) -> LimitRig:
        """The rig with another limiter, which the caller closes."""
        return replace(self, limits=Limiter(url, self.parts.database, lease_s=60))

    def with_key(self, key_id: str) -> LimitRig:
        return replace(self, principal=replace(self.principal, key_id=key_id))

    async def pass_time(self, seconds: float) -> None:
        """Makes what Redis has stored older."""
        use, running = (f"relay:{{{self.principal.tenant_id}}}:{part}" for part in ("use", "running"))
        for field, value in (await self.redis.hgetall(use)).items():
            if field.decode().endswith((":at", ":until")):
                await self.redis.hset(use, field, float(value) - seconds)
        for member, end in await self.redis.zrange(running, 0, -1, withscores=True):
            await self.redis.zadd(running, {member: end - seconds})


@pytest.fixture
async def rig(parts: AccountingRig, redis_url: str) -> AsyncIterator[LimitRig]:
    """Its limiter waits long for Redis: on a busy machine half a second can pass."""
    limits = Limiter(redis_url, parts.database, lease_s=60)
    limits._scripts = RedisScriptRunner(redis_url, answer_limit_s=60)
    redis = Redis.from_url(redis_url)
    yield LimitRig(parts, limits, Principal(parts.acme.tenant_id, "acme", f"key-{secrets.token_hex(4)}"), redis)
    await redis.aclose()
    await limits.close()


async def test_principal_without_limits_needs_no_redis(rig: LimitRig) -> None:
    connections: list[object] = []
    redis = await asyncio.start_server(lambda _reader, writer: connections.append(writer), "127.0.0.1", 0)
    async with redis:
        other = rig.with_redis(f"redis://127.0.0.1:{redis.sockets[0].getsockname()[1]}/0")
        reservation = await other.admit()
        assert reservation.reserved_nano == 0
        assert await other.limits.release(reservation, 5, 5)
    assert not connections


@pytest.mark.parametrize("scope", SCOPES)
async def test_requests_per_minute_are_limited(rig: LimitRig, scope: str) -> None:
    admitting = (rig.admit(scope=scope, requests_per_minute=30) for _ in range(40))
    results = await asyncio.gather(*admitting, return_exceptions=True)
    refused = [result for result in results if isinstance(result, RateLimited)]
    assert len(refused) == 10
    assert all(error.retry_after_s is not None and 0 < error.retry_after_s <= 2 for error in refused)
    assert ("this key allows" if scope == "limits" else "the tenant acme, with all its keys,") in str(refused[0])
    await rig.pass_time(2.0)  # one token is refilled every two seconds
    await rig.admit(scope=scope, requests_per_minute=30)
    with pytest.raises(RateLimited):
        await rig.admit(scope=scope, requests_per_minute=30)
    other_key = rig.with_key("other").admit(scope=scope, requests_per_minute=30)
    if scope == "limits":
        await other_key
    else:
        with pytest.raises(RateLimited):
            await other_key


async def test_what_is_left_of_a_rate_is_reported(rig: LimitRig) -> None:
    for num_left in (2, 1, 0):
        rate = (await rig.admit(1, 1, requests_per_minute=3)).rates.requests
        assert rate is not None and rate.per_minute == 3 and num_left <= rate.num_left < num_left + 0.5
    await rig.pass_time(10)
    with pytest.raises(RateExceeded) as caught:
        await rig.admit(1, 1, requests_per_minute=3)
    left = caught.value.rates.requests
    assert left is not None and 0.5 <= left.num_left < 0.9 and 42 < left.full_in_s <= 50
    assert (await rig.admit(1, 1, budget_nano=10**6)).rates == RatesLeft()
    assert (await rig.admit(1, 1)).rates == RatesLeft()


@pytest.mark.parametrize("scope", SCOPES)
async def test_tokens_are_reserved_then_settled(rig: LimitRig, scope: str) -> None:
    first = await rig.admit(100, 500, scope=scope, tokens_per_minute=1000)
    assert first.num_tokens == 600 and first.rates.tokens is not None and 400 <= first.rates.tokens.num_left < 420
    with pytest.raises(RateExceeded, match=r"1,000 tokens per minute, of which 4\d\d are left; this request reserves"):
        await rig.admit(100, 500, scope=scope, tokens_per_minute=1000)
    for _ in range(2):  # as after a lost answer
        assert await rig.limits.release(first, 0, 150)  # 850 are left
    second = await rig.admit(100, 500, scope=scope, tokens_per_minute=1000)
    assert second.rates.tokens is not None and 250 <= second.rates.tokens.num_left < 270
    await rig.limits.release(second, 0, 1600)  # a debt of 750
    with pytest.raises(RateExceeded) as caught:
        await rig.admit(1, 1, scope=scope, tokens_per_minute=1000)
    assert caught.value.retry_after_s is not None and 40 < caught.value.retry_after_s <= 46
    with pytest.raises(InvalidRequest, match=r"may use 1,001 tokens.* 1,000 a minute: lower max_tokens"):
        await rig.admit(501, 500, scope=scope, tokens_per_minute=1000)


async def test_answer_without_limit_reserves_a_usual_one(rig: LimitRig) -> None:
    usual = await rig.admit(10, 32_000, 1, tokens_per_minute=10_000)
    assert (usual.num_tokens, usual.max_output_tokens) == (10 + LONG_ANSWER_TOKENS, 32_000)
    assert (await rig.with_key("other").admit(10, 32_000, 1, "limits", tokens_per_minute=500)).num_tokens == 500
    with pytest.raises(InvalidRequest, match="shorten the prompt"):
        await rig.with_key("third").admit(500, 32_000, 1, "limits", tokens_per_minute=500)


@pytest.mark.parametrize("scope", SCOPES)
async def test_requests_at_once_are_limited(rig: LimitRig, scope: str) -> None:
    admitted = [await rig.admit(scope=scope, concurrent_requests=2) for _ in range(2)]
    with pytest.raises(RateLimited, match="allows 2 requests at once") as caught:
        await rig.admit(scope=scope, concurrent_requests=2)
    assert caught.value.retry_after_s == 1.0
    await rig.limits.release(admitted[0], 0, 0)
    await rig.admit(scope=scope, concurrent_requests=2)
    await rig.pass_time(60)  # the leases are over
    await rig.admit(scope=scope, concurrent_requests=2)


async def test_key_and_tenant_are_both_asked(rig: LimitRig) -> None:
    """A refusal takes nothing from either."""
    caller = replace(rig.principal, limits=Limits(requests_per_minute=10), tenant_limits=Limits(requests_per_minute=2))
    lefts = []
    for _ in range(2):
        admitted = await rig.limits.admit(caller, MODEL, 1, 1)
        assert admitted.rates.requests is not None
        lefts.append((admitted.rates.requests.per_minute, int(admitted.rates.requests.num_left)))
    assert lefts == [(2, 1), (2, 0)]
    for _ in range(20):
        with pytest.raises(RateLimited, match="the tenant acme"):
            await rig.limits.admit(caller, MODEL, 1, 1)
    use = await rig.limits.use_of(caller)
    assert [int(each.requests_left) for each in use.uses] == [8, 0]


async def test_gateways_share_one_limit(rig: LimitRig, redis_url: str) -> None:
    other = replace(rig, limits=Limiter(redis_url, rig.parts.database, lease_s=60))
    other.limits._scripts = RedisScriptRunner(redis_url, answer_limit_s=60)
    at_once: dict[str, Any] = {"requests_per_minute": 100, "tokens_per_minute": 10**6, "concurrent_requests": 90}
    admitting = [each.admit(1, 1, **at_once) for _ in range(100) for each in (rig, other)]
    results = await asyncio.gather(*admitting, return_exceptions=True)
    admitted = [each for each in results if isinstance(each, Reservation)]
    assert len(admitted) == 90
    await asyncio.gather(*(rig.limits.release(each, 0, 2) for each in admitted))
    results = await asyncio.gather(*(each.admit(1, 1, **at_once) for each in [rig, other] * 50), return_exceptions=True)
    num_refilled = sum(isinstance(each, Reservation) for each in results) - 10
    assert 0 <= num_refilled <= 20, "what some seconds refill"
    await other.limits.close()


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
        assert await rig.limits.release(first, 50, 0)  # now 450 spent, 1010 reserved
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
    await rig.limits.release(reservation, 0, 0)  # all that is reserved comes back
    assert (await rig.admit(10, num_wanted, num_choices, budget_nano=2000)).max_output_tokens == num_output_tokens


async def test_spent_budget_refuses_answer_without_limit(rig: LimitRig) -> None:
    await rig.set_spent(1981)
    with pytest.raises(QuotaExceeded, match=r"costs at least \$0\.00000002; shorten the prompt, or ask the admin"):
        await rig.admit(10, 100, 1, budget_nano=2000)
    free = replace(MODEL, price=replace(PRICE, output_nano=0))
    caller = replace(rig.principal, tenant_limits=Limits(budget_nano=2000))
    assert (await rig.limits.admit(caller, free, 10, 100, 1)).max_output_tokens == 100


async def test_budget_of_a_key_counts_its_own_spending_in_the_period(rig: LimitRig) -> None:
    """The ledger has what the key spent; that of an earlier period is over."""
    opened = replace(rig.parts.request(), key_id=rig.principal.key_id)
    await rig.parts.ledger.open(opened)
    usage = ChoiceUsage("req-1", 0, 10, 0, 10, FinishCause.STOP)
    cost_nano = await rig.parts.ledger.settle("req-1", [usage])
    assert cost_nano > 0
    of_key: dict[str, Any] = {"scope": "limits", "budget_period": "day"}
    with pytest.raises(
        QuotaExceeded, match=r"per day of this key exceeded.*wait until 20\d\d-.*torchrelay key set key-"
    ):
        await rig.admit(1, 1, None, **of_key, budget_nano=cost_nano + 10)
    await rig.admit(1, 1, None, **of_key, budget_nano=cost_nano + 11)
    await rig.with_key("other").admit(1, 1, None, **of_key, budget_nano=11)
    use = await rig.limits.use_of(replace(rig.principal, limits=Limits(budget_nano=cost_nano, budget_period="day")))
    assert (use.uses[0].spent_nano, use.uses[0].reserved_nano) == (cost_nano, 11)


async def test_reservations_of_others_do_not_shorten_answers(rig: LimitRig) -> None:
    """They come back: the request may wait for that, and then gets all it asks for."""
    first = await rig.admit(budget_nano=2000)
    with pytest.raises(RateLimited) as waiting:
        await rig.admit(10, 100, 1, budget_nano=2000)
    assert waiting.value.retry_after_s == 1.0
    await rig.limits.release(first, 500, 0)
    assert (await rig.admit(10, 100, 1, budget_nano=2000)).max_output_tokens == 100


async def test_release_without_an_answer_is_repeatable(rig: LimitRig, redis_url: str) -> None:
    async with SilentProxy(redis_url).serving() as proxy:
        other = rig.with_redis(proxy.url)
        first = await other.admit(budget_nano=1010)
        proxy.fall_silent()
        assert not await other.limits.release(first, 0, 0)
        assert not await other.limits.release(first, 0, 0), "the circuit is open"
        proxy.speak()
        await eventually(lambda: other.limits.release(first, 0, 0))
        await other.admit(budget_nano=1010)
        await other.limits.close()


async def test_unreleased_reservation_ends_with_its_lease(rig: LimitRig) -> None:
    await rig.admit(budget_nano=1010)
    await rig.pass_time(50)
    with pytest.raises(RateLimited):
        await rig.admit(budget_nano=1010)
    await rig.pass_time(10)
    await rig.admit(budget_nano=1010)


async def test_running_requests_outlive_their_leases(rig: LimitRig, redis_url: str) -> None:
    short = replace(rig, limits=Limiter(redis_url, rig.parts.database, lease_s=1.0))
    short.limits._scripts = RedisScriptRunner(redis_url, answer_limit_s=60)
    kept = await short.admit(budget_nano=1010)
    running = f"relay:{{{rig.principal.tenant_id}}}:running"
    [[_, begun]] = await rig.redis.zrange(running, 0, 0, withscores=True)

    async def is_renewed() -> bool:
        [[_, end]] = await rig.redis.zrange(running, 0, 0, withscores=True)
        return bool(end > begun + 1.5)

    await eventually(is_renewed)
    with pytest.raises(RateLimited):
        await short.admit(budget_nano=1010)
    await short.limits.release(kept, 0, 0)
    await short.admit(budget_nano=1010)
    await short.limits.close()


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


async def test_close_does_not_wait_for_a_lost_redis(rig: LimitRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The releases that it does not answer are left to the lease of their reservations."""
    kept = await rig.admit(budget_nano=1010)

    async def lost(*_: Any) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(rig.limits, "_run", lost)
    rig.limits.abandon(kept)
    async with asyncio.timeout(20):  # of the 36 s in which it is released again and again
        await rig.limits.close()
    assert not rig.limits._undoing


@pytest.mark.parametrize("database_url", DATABASES, indirect=True)
async def test_emptied_redis_is_filled_from_sql(rig: LimitRig) -> None:
    await rig.admit(budget_nano=3000)
    await rig.set_spent(2500)
    async for key in rig.redis.scan_iter(f"relay:{{{rig.principal.tenant_id}}}:*"):
        await rig.redis.delete(key)
    with pytest.raises(QuotaExceeded):
        await rig.admit(budget_nano=3000)


@pytest.mark.parametrize("part", ["use", "running"])
@pytest.mark.parametrize("first", ["release", "admit", "other"])
async def test_evicted_part_keeps_no_limit_wrong_for_ever(rig: LimitRig, part: str, first: str) -> None:
    """Without the hash all is summed anew; without the set none of the requests runs. Whatever comes first after it."""
    admitted = [await rig.admit(scope="limits", concurrent_requests=3) for _ in range(3)]
    await rig.redis.delete(f"relay:{{{rig.principal.tenant_id}}}:{part}")
    if first == "release":
        await rig.limits.release(admitted.pop(), 0, 0)
    elif first == "other":
        await rig.with_key("other").admit(scope="limits", concurrent_requests=1)
    for _ in range(3 if part == "running" else 1 if first == "release" else 0):
        admitted.append(await rig.admit(scope="limits", concurrent_requests=3))
    with pytest.raises(RateLimited):
        await rig.admit(scope="limits", concurrent_requests=3)
    for each in admitted:
        await rig.limits.release(each, 0, 0)
    for _ in range(3):
        await rig.admit(scope="limits", concurrent_requests=3)
    with pytest.raises(RateLimited):
        await rig.admit(scope="limits", concurrent_requests=3)


async def test_repeated_admission_takes_once(rig: LimitRig) -> None:
    """A client of Redis repeats a script whose connection broke."""
    caller = replace(rig.principal, limits=Limits(requests_per_minute=10, concurrent_requests=5))
    for _ in range(3):
        verdict, _ = await rig.limits._verdict(caller, Wish(1, 1, 10), "rsv-1")
        assert verdict.outcome is Outcome.OK
    use = (await rig.limits.use_of(caller)).uses[0]
    assert (use.num_running, int(use.requests_left)) == (1, 9)


async def test_key_that_has_long_been_unused_is_forgotten(rig: LimitRig) -> None:
    await rig.limits.release(await rig.admit(scope="limits", requests_per_minute=3), 0, 0)
    await rig.pass_time(3700)
    use = f"relay:{{{rig.principal.tenant_id}}}:use"
    await rig.redis.hdel(use, "mark")
    await rig.with_key("other").admit(scope="limits", requests_per_minute=3)
    fields = {field.decode() for field in await rig.redis.hkeys(use)}
    assert not [field for field in fields if rig.principal.key_id in field] and "k:other:at" in fields


async def test_late_answer_of_redis_leaves_no_reservation(rig: LimitRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis has admitted the request, and the gateway refused it before the answer came."""
    run, num_asked = rig.limits._run, 0

    async def run_late(*args: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        answer = await run(*args)
        return None if num_asked == 2 else answer

    monkeypatch.setattr(rig.limits, "_run", run_late)
    first = await rig.admit(scope="limits", concurrent_requests=2)
    monkeypatch.setattr(rig.limits, "_num_gateways", 2)
    monkeypatch.setattr(rig.limits, "_counted_at_s", float("inf"))
    with pytest.raises(RateLimited):
        await rig.admit(scope="limits", concurrent_requests=2)
    await eventually(lambda: not rig.limits._undoing, "the release")
    caller = replace(rig.principal, limits=Limits(concurrent_requests=2))
    assert (await rig.limits.use_of(caller)).uses[0].num_running == 1
    assert await rig.limits.release(first, 0, 0)


async def test_what_was_admitted_without_redis_is_told_to_it(rig: LimitRig, monkeypatch: pytest.MonkeyPatch) -> None:
    run, is_away = rig.limits._run, True

    async def maybe(*args: Any) -> Any:
        return None if is_away else await run(*args)

    monkeypatch.setattr(rig.limits, "_run", maybe)
    for _ in range(4):
        admitted = await rig.admit(10, 90, requests_per_minute=10, tokens_per_minute=1000)
        await rig.limits.release(admitted, 0, 40)
    running = await rig.admit(10, 90, requests_per_minute=10, tokens_per_minute=1000)
    is_away = False
    rates = (await rig.admit(10, 90, requests_per_minute=10, tokens_per_minute=1000)).rates
    assert rates.requests is not None and 4 <= rates.requests.num_left < 5
    assert rates.tokens is not None and 640 <= rates.tokens.num_left < 680
    await rig.limits.release(running, 0, 20)
    rates = (await rig.admit(10, 90, requests_per_minute=10, tokens_per_minute=1000)).rates
    assert rates.requests is not None and 3 <= rates.requests.num_left < 4, "it is told once"
    assert rates.tokens is not None and 620 <= rates.tokens.num_left < 660, "80 of the running one came back"


async def test_long_absence_of_redis_locks_no_key_out(rig: LimitRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The debt is at most ten seconds of the rate."""
    run, clock, is_away = rig.limits._run, Clock(), True

    async def maybe(*args: Any) -> Any:
        return None if is_away else await run(*args)

    monkeypatch.setattr(rig.limits, "_run", maybe)
    monkeypatch.setattr(rig.limits, "_clock", clock)
    for _ in range(100):
        clock.now += 60.0
        await rig.limits.release(await rig.admit(1, 1, requests_per_minute=6), 0, 2)
    is_away = False
    with pytest.raises(RateExceeded) as refused:
        await rig.admit(1, 1, requests_per_minute=6)
    assert refused.value.retry_after_s is not None and 10 < refused.value.retry_after_s <= 20


async def test_running_requests_are_told_to_a_redis_that_lost_them(rig: LimitRig, redis_url: str) -> None:
    short = replace(rig, limits=Limiter(redis_url, rig.parts.database, lease_s=0.3))
    short.limits._scripts = RedisScriptRunner(redis_url, answer_limit_s=60)
    kept = await short.admit(scope="limits", concurrent_requests=1)
    for part in ("use", "running"):
        await rig.redis.delete(f"relay:{{{rig.principal.tenant_id}}}:{part}")
    await eventually(lambda: bool(short.limits._unreported.get(rig.principal.tenant_id)))
    with pytest.raises(RateLimited):
        await short.admit(scope="limits", concurrent_requests=1)
    await short.limits.release(kept, 0, 0)
    await short.admit(scope="limits", concurrent_requests=1)
    await short.limits.close()


@pytest.mark.parametrize("redis", ["none", "gone"])
async def test_without_redis_each_gateway_limits_its_share(rig: LimitRig, redis: str) -> None:
    async with rig.parts.database.write() as connection:
        await connection.execute(insert(gateways), [{"gateway_id": each, "beat": 1} for each in "ab"])
    other = rig.with_redis("" if redis == "none" else f"redis://127.0.0.1:{free_port()}/0")
    for number in range(6):
        if number < 5:
            await other.admit(requests_per_minute=10)
        else:
            with pytest.raises(RateExceeded, match="allows 10 requests per minute"):
                await other.admit(requests_per_minute=10)
    other = other.with_key("b")
    running = [await other.admit(scope="limits", concurrent_requests=4) for _ in range(2)]
    with pytest.raises(RateLimited):
        await other.admit(scope="limits", concurrent_requests=4)
    await other.limits.release(running[0], 0, 0)
    await other.admit(scope="limits", concurrent_requests=4)
    large = other.with_key("large")
    await large.admit(900, 100, scope="limits", tokens_per_minute=1000)  # more than its share: a debt
    with pytest.raises(RateExceeded):
        await large.admit(1, 1, scope="limits", tokens_per_minute=1000)
    await rig.set_spent(1000)
    third = other.with_key("c")
    await third.admit(budget_nano=3020)  # 1010 of the half of what is left
    with pytest.raises(RateLimited, match="running requests reserve"):
        await third.admit(budget_nano=3020)
    await other.limits.close()


async def test_first_requests_without_redis_have_the_share_too(rig: LimitRig) -> None:
    """They come at once, before the gateways are counted."""
    async with rig.parts.database.write() as connection:
        await connection.execute(insert(gateways), [{"gateway_id": each, "beat": 1} for each in "ab"])
    other = rig.with_redis("")
    results = await asyncio.gather(*(other.admit(requests_per_minute=6) for _ in range(6)), return_exceptions=True)
    assert sum(isinstance(each, Reservation) for each in results) == 3
    await other.limits.close()


async def test_silent_redis_costs_a_request_fifty_milliseconds(rig: LimitRig, redis_url: str) -> None:
    """A gateway goes on with what its own admissions have left, and does not begin with a full bucket."""
    async with SilentProxy(redis_url).serving() as proxy:
        other = rig.with_redis(proxy.url)
        assert other.limits._scripts is None
        other.limits._scripts = RedisScriptRunner(proxy.url, answer_limit_s=60)
        for _ in range(3):
            await other.admit(requests_per_minute=4)
        proxy.fall_silent()
        other.limits._scripts._answer_limit_s = script_runner.ANSWER_LIMIT_S
        began_s = asyncio.get_running_loop().time()
        await other.admit(requests_per_minute=4)
        assert asyncio.get_running_loop().time() - began_s >= 0.04
        with pytest.raises(RateExceeded):
            await other.admit(requests_per_minute=4)
        await other.limits.close()
    assert script_runner.ANSWER_LIMIT_S == 0.05


async def test_hung_redis_is_asked_once_per_interval(
    rig: LimitRig, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_unanswered = 0
    silent = Circuit.silent

    def note(circuit: Circuit, now_s: float) -> None:
        nonlocal num_unanswered
        num_unanswered += 1
        silent(circuit, now_s)

    clock = Clock()
    monkeypatch.setattr(Circuit, "silent", note)
    monkeypatch.setattr(script_runner, "RedisScriptRunner", partial(RedisScriptRunner, clock=clock))
    async with SilentProxy(redis_url).serving() as proxy:
        other = rig.with_redis(proxy.url)

        async def is_asked() -> bool:
            clock.now += SKIP_S
            before = num_unanswered
            with suppress(RateLimited):
                await other.admit(requests_per_minute=1000)
            return num_unanswered == before

        await eventually(is_asked)
        proxy.fall_silent()
        num_unanswered = 0
        for num_intervals in (1, 2, 3):
            for _ in range(20):
                await other.admit(requests_per_minute=1000)
            assert num_unanswered == num_intervals
            clock.now += SKIP_S
        proxy.speak()
        await eventually(is_asked)
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
