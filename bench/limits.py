"""Limits that two gateways share: whether they admit what a limit allows, and how long a hung Redis delays a request.

    python bench/limits.py [--quick]

Two limiters, as two gateways have them, ask one Redis. Callers of one key offer several times its limits, with requests
of random size that end after random times; what is admitted is held against the bucket and what refills it. Then Redis
is stopped (SIGSTOP) in the midst: both go on with their shares.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from redis import Redis
from sqlalchemy import insert

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.report import Check, finish, parser_of, percentile, progress
from tests.support.brokers import redis_server
from torchrelay.common.errors import RateLimited
from torchrelay.gateway.core import Limits, ModelShape, Price, Principal, PublishedModel, Version
from torchrelay.gateway.limits.limiter import Limiter
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.schema import ensure_schema
from torchrelay.gateway.sql.tables import gateways

LIMITS = Limits(requests_per_minute=3000, tokens_per_minute=600_000, concurrent_requests=200)
NUM_CALLERS = 60  # of each gateway
PAUSE_S = 0.1  # of a caller after a refusal
MOST_TOKENS = 400
VERSION = Version("v", "p", 1, "LlamaForCausalLM", "float32", ModelShape(1, 1, 1, 4, 4096, 64), 64, 1)
MODEL = PublishedModel("acme/m", "t", VERSION, Price("p", "", 1, 1, 1, 0), 0, 0, 0)


@dataclass
class Admitted:
    """The admissions of both gateways since the begin."""

    num_requests: int = 0
    num_tokens: int = 0  # used by requests that have ended
    num_running: int = 0
    most_running: int = 0
    waits_s: list[float] = field(default_factory=list)  # of each answer of ``admit``


async def call(limiter: Limiter, caller: Principal, until_s: float, admitted: Admitted, seed: int) -> None:
    """Asks again and again; each admitted request runs a moment, and uses less than it reserves."""
    rng = random.Random(seed)
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        most = rng.randrange(1, MOST_TOKENS)
        try:
            reservation = await limiter.admit(caller, MODEL, 10, most)
        except RateLimited:
            admitted.waits_s.append(time.monotonic() - began_s)
            await asyncio.sleep(PAUSE_S * rng.random() * 2)
            continue
        admitted.waits_s.append(time.monotonic() - began_s)
        admitted.num_requests += 1
        admitted.num_running += 1
        admitted.most_running = max(admitted.most_running, admitted.num_running)
        await asyncio.sleep(rng.random() * 0.05)
        used = 10 + rng.randrange(most)
        admitted.num_tokens += used
        admitted.num_running -= 1
        await limiter.release(reservation, 0, used)


async def run(limiters: list[Limiter], caller: Principal, seconds: float) -> Admitted:
    admitted, until_s = Admitted(), time.monotonic() + seconds
    calls = [
        call(limiter, caller, until_s, admitted, seed + place * NUM_CALLERS)
        for place, limiter in enumerate(limiters)
        for seed in range(NUM_CALLERS)
    ]
    await asyncio.gather(*calls)
    return admitted


async def measure(folder: Path, redis_url: str, redis_pid: int, seconds: float) -> list[Check]:
    url = f"sqlite:///{folder / 'ledger.db'}"
    database = Database(url)
    await ensure_schema(database, url)
    async with database.write() as connection:
        await connection.execute(insert(gateways), [{"gateway_id": each, "beat": 1} for each in "ab"])
    limiters = [Limiter(redis_url, database, lease_s=60) for _ in range(2)]
    checks = []
    for name, limits, most in (
        ("requests", Limits(requests_per_minute=LIMITS.requests_per_minute), LIMITS.requests_per_minute),
        ("tokens", Limits(tokens_per_minute=LIMITS.tokens_per_minute), LIMITS.tokens_per_minute),
    ):
        progress(f"two gateways, {name} per minute, {seconds:g} s")
        assert most is not None
        began_s = time.monotonic()
        admitted = await run(limiters, Principal(f"ten-{name}", name, f"key-{name}", limits=limits), seconds)
        allowed = most + most / 60 * (time.monotonic() - began_s)
        number = admitted.num_requests if name == "requests" else admitted.num_tokens
        beyond = abs(number - allowed) / allowed * 100
        checks.append(Check(f"{name}_off_limit", beyond, "%", 1.0, f"{allowed:.0f} allowed, {number} admitted"))
        checks.append(Check(f"admit_{name}_p99", percentile(admitted.waits_s, 99) * 1e3, "ms"))
    at_once = Limits(concurrent_requests=20)
    admitted = await run(limiters, Principal("ten-running", "running", "key-running", limits=at_once), seconds / 4)
    beyond_limit = max(0, admitted.most_running - 20)
    checks.append(Check("running_beyond_limit", beyond_limit, "requests", 10, "20 at once; 10 are a share"))
    progress("Redis stops")
    os.kill(redis_pid, signal.SIGSTOP)
    try:
        hung = await run(limiters, Principal("ten-hung", "hung", "key-hung", limits=LIMITS), 3.0)
    finally:
        os.kill(redis_pid, signal.SIGCONT)
    assert LIMITS.requests_per_minute is not None
    allowed = LIMITS.requests_per_minute * (1 + 3 / 60)
    checks += [
        Check("fallback_slowest", max(hung.waits_s) * 1e3, "ms", 100, "50 ms for Redis, then the gateway's share"),
        Check("hung_beyond_limit", max(0.0, hung.num_requests - allowed) / allowed * 100, "%", 1.0, "the whole limit"),
    ]
    for limiter in limiters:
        await limiter.close()
    await database.close()
    return checks


def main() -> None:
    options = parser_of(__doc__, "8 s for each limit instead of 60").parse_args()
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as url:
        with Redis.from_url(url) as redis:
            pid = redis.info("server")["process_id"]
        checks = asyncio.run(measure(Path(folder), url, pid, 8.0 if options.quick else 60.0))
    finish("limits", {"callers": 2 * NUM_CALLERS, "gateways": 2}, checks)


if __name__ == "__main__":
    main()
