from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import astuple, replace
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.unit.gateway.conftest import Clock
from tests.unit.gateway.limits.test_limiter import MODEL
from torchrelay.common.errors import TorchrelayError
from torchrelay.common.ids import new_id
from torchrelay.gateway.core import Limits, Principal, Reservation
from torchrelay.gateway.limits.admission import period_bounds, share_of
from torchrelay.gateway.limits.limiter import Limiter
from torchrelay.gateway.limits.script_runner import RedisScriptRunner
from torchrelay.gateway.sql.database import Database

NUM_STEPS = 150
PAUSES_S = (0.0, 0.0, 0.0, 30.3, 61.0)  # what they refill is never just below a whole number


@pytest.fixture
async def limiters(sqlite_url: str, redis_url: str) -> AsyncIterator[tuple[Limiter, Limiter, Clock]]:
    """A limiter by Redis, and another by itself with its clock."""
    database, clock = Database(sqlite_url), Clock()
    by_redis, by_itself = Limiter(redis_url, database, lease_s=3600), Limiter("", database, 3600, clock)
    by_redis._scripts = RedisScriptRunner(redis_url, answer_limit_s=60)
    yield by_redis, by_itself, clock
    for each in (by_redis, by_itself):
        await each.close()
    await database.close()


@pytest.mark.parametrize("seed", range(6))
async def test_gateway_alone_decides_as_redis_does(
    limiters: tuple[Limiter, Limiter, Clock], redis_url: str, seed: int
) -> None:
    """The rule exists twice, in Python and in Lua: both give one outcome for any sequence of requests."""
    by_redis, by_itself, clock = limiters
    rng = random.Random(seed)
    tenant = Principal(new_id("ten"), "acme", "none", tenant_limits=_some_limits(rng))
    keys = [replace(tenant, key_id=f"key-{number}", limits=_some_limits(rng)) for number in range(2)]
    running: list[tuple[Reservation, Reservation]] = []
    outcomes = set()
    async with Redis.from_url(redis_url) as redis:
        for _ in range(NUM_STEPS):
            pause_s = rng.choice(PAUSES_S)
            clock.now += pause_s
            await _pass_time(redis, tenant.tenant_id, pause_s)
            if running and rng.random() < 0.4:
                used = rng.randrange(9)
                first, second = running.pop(rng.randrange(len(running)))
                assert await by_redis.release(first, 0, used) and await by_itself.release(second, 0, used)
                continue
            caller, size = rng.choice(keys), (rng.randrange(1, 3), rng.randrange(1, 3))
            answers = [await _outcome(limiter, caller, size) for limiter in (by_redis, by_itself)]
            shown = [_shown(each) for each in answers]
            assert shown[0] == shown[1]
            outcomes.add(type(answers[0]))
            if isinstance(answers[0], Reservation) and isinstance(answers[1], Reservation):
                running.append((answers[0], answers[1]))
    assert len(outcomes) > 1, "some were admitted and some refused"


async def _outcome(limiter: Limiter, caller: Principal, size: tuple[int, int]) -> Reservation | TorchrelayError:
    try:
        return await limiter.admit(caller, MODEL, *size)
    except TorchrelayError as error:
        return error


def _shown(outcome: Reservation | TorchrelayError) -> object:
    if isinstance(outcome, TorchrelayError):
        return type(outcome), outcome.message
    return outcome.max_output_tokens, outcome.reserved_nano, outcome.num_tokens


def _some_limits(rng: random.Random) -> Limits:
    def some(numbers: tuple[int | None, ...]) -> int | None:
        return rng.choice(numbers)

    return Limits(some((None, 2, 5)), some((None, 5, 20)), some((None, 1, 3)))


async def _pass_time(redis: Any, tenant_id: str, seconds: float) -> None:
    use = f"relay:{{{tenant_id}}}:use"
    for field, value in (await redis.hgetall(use)).items():
        if field.endswith(b":at"):
            await redis.hset(use, field, float(value) - seconds)


@pytest.mark.parametrize(
    ("at", "period", "begin", "end"),
    [
        (1_764_547_200, "day", 1_764_547_200, 1_764_633_600),  # 2025-12-01, a Monday
        (1_764_547_199, "day", 1_764_460_800, 1_764_547_200),
        (1_764_547_199, "week", 1_763_942_400, 1_764_547_200),
        (1_764_547_200, "week", 1_764_547_200, 1_765_152_000),
        (1_764_547_199, "month", 1_761_955_200, 1_764_547_200),
        (1_767_225_599, "month", 1_764_547_200, 1_767_225_600),  # to the new year
    ],
)
def test_periods_are_half_open_in_utc(at: int, period: str, begin: int, end: int) -> None:
    assert period_bounds(period, at * 1_000_000) == (begin * 1_000_000, end * 1_000_000)  # type: ignore[arg-type]
    assert period_bounds(None, at) == (0, None)


def test_shares_of_gateways_stay_below_the_whole() -> None:
    whole = Limits(10, 100, 1, 1000, "day")
    assert astuple(share_of(whole, 3, 400)) == (3, 33, 1, 600, "day")
    assert share_of(whole, 1, 400) == whole
    assert share_of(whole, 3, 1200).budget_nano == 1000
