"""A scheduler that is killed under load: how long until new requests are answered, with a standby and without.

    python bench/failover.py [--quick]

The platform runs as separate processes: two schedulers that share a lease of 1.5 s, a gateway, two workers, a
param-store. While streams run, the active scheduler is killed (kill -9), and new requests are sent at once, for a
loaded model and for a model at zero. For comparison, a single scheduler without a lease is killed in the same way and
started again at once.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.random_checkpoint import LLAMA_33MB
from bench.report import Check, finish, parser_of, progress
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import headers
from tests.support.parts import Parts, parts_of
from tests.support.schedulers import address_of, serves
from torchrelay.cli.up.plan import UpOptions

LEASE_S = 1.5
NUM_STREAMS, STREAM_TOKENS = 4, 200
NUM_NEW, NEW_TOKENS = 4, 4
TIMEOUT_S = 90.0
OPTIONS = UpOptions(
    num_prefill_workers=0,
    num_decode_workers=0,
    num_both_workers=2,
    arena_bytes=512 << 20,
    kv_pool_bytes=64 << 20,
    threads=1,
    idle_timeout_s=600.0,
)


class Load:
    """Requests of a tenant; ``num_lost`` counts those without a whole answer."""

    def __init__(self, url: str, key: str) -> None:
        self._key, self.num_lost = key, 0
        self._client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S)

    async def answer(self, model: str, prompt: list[int], num_tokens: int) -> float:
        """The time at which the answer was there."""
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        options = {"ignore_eos": True, "return_token_ids": True}
        try:
            reply = await self._client.post("/v1/completions", json={**body, **options}, headers=headers(self._key))
            is_whole = reply.status_code == 200 and len(reply.json()["choices"][0]["token_ids"]) == num_tokens
        except httpx.TransportError as error:
            progress(repr(error))
            is_whole = False
        else:
            if not is_whole:
                progress(reply.text[:200])
        self.num_lost += not is_whole
        return time.monotonic()

    async def close(self) -> None:
        await self._client.aclose()


async def failed_over(load: Load, warm: str, cold: str, fault: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Seconds from the fault until the first new answers of the loaded model and of the model at zero."""
    prompts = [list(range(20 + i, 52 + i)) for i in range(NUM_STREAMS)]
    streams = [asyncio.create_task(load.answer(warm, prompt, STREAM_TOKENS)) for prompt in prompts]
    await asyncio.sleep(0.3)  # they run
    begin_s = time.monotonic()
    await fault()
    new = [load.answer(model, prompts[0], NEW_TOKENS) for model in (warm, cold) for _ in range(NUM_NEW)]
    ends = await asyncio.gather(*new)
    await asyncio.gather(*streams)
    return min(ends[:NUM_NEW]) - begin_s, min(ends[NUM_NEW:]) - begin_s


async def measure(folder: Path, num_rounds: int, *, has_standby: bool) -> tuple[list[float], list[float], int]:
    """Seconds of each round for the loaded model and for a model at zero; the requests lost in all."""
    warm_s, cold_s = [], []
    async with parts_of(folder / "home", OPTIONS) as parts:
        schedulers = ["scheduler"]
        if has_standby:
            parts.set("scheduler", LEASE_S=str(LEASE_S))
            parts.copy("scheduler-1", "scheduler", "PORT")
            schedulers.append("scheduler-1")
            parts.set("gateway", SCHEDULER_ADDRESS=",".join(address_of(parts, name) for name in schedulers))
        await parts.start("param-store", "scheduler", "worker-0", "worker-1", "gateway")
        platform = parts.platform("gateway")
        key = await asyncio.to_thread(platform.tenant, "acme")
        models = []
        for number in range(num_rounds + 1):
            checkpoint = await asyncio.to_thread(
                make_checkpoint, folder / f"model-{number}", "llama", seed=number, **LLAMA_33MB
            )
            models.append(await asyncio.to_thread(platform.upload, key, checkpoint, f"model-{number}"))
        load = Load(platform.http, key)
        await load.answer(models[0], list(range(30)), NEW_TOKENS)
        active = "scheduler"
        for cold in models[1:]:
            if has_standby:
                active = await stood_by(parts, schedulers, active)

            async def fault(killed: str = active) -> None:
                await parts.kill(killed)
                if not has_standby:
                    await parts.start(killed, is_awaited=False)

            took = await failed_over(load, models[0], cold, fault)
            warm_s.append(took[0])
            cold_s.append(took[1])
            progress(f"{'standby' if has_standby else 'restart'}: {took[0]:.2f} s, from zero {took[1]:.2f} s")
        await load.close()
        return warm_s, cold_s, load.num_lost


async def stood_by(parts: Parts, schedulers: list[str], active: str) -> str:
    """Starts the schedulers that do not run; returns the active one once the other stands by."""
    for name in schedulers:
        if name not in parts.children:
            await parts.start(name, is_awaited=False)
    running = [name for name in schedulers if await serves(parts, name)]
    return running[0]


def main() -> None:
    arguments = parser_of(__doc__, "two faults of each kind").parse_args()
    num_rounds = 2 if arguments.quick else 6
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        standby_s, cold_s, num_lost = asyncio.run(measure(Path(first), num_rounds, has_standby=True))
        restart_s, restart_cold_s, num_lost_alone = asyncio.run(measure(Path(second), num_rounds, has_standby=False))
    single = f"a single scheduler started again: {statistics.median(restart_s):.2f} s"
    from_zero = f"a single scheduler started again: {statistics.median(restart_cold_s):.2f} s"
    checks = [
        Check("failover_s", max(standby_s), "s", 3.0, single),
        Check("failover_median_s", statistics.median(standby_s), "s", None, single),
        Check("failover_from_zero_s", max(cold_s), "s", None, from_zero),
        Check("requests_lost", num_lost, "", 0, f"without a standby: {num_lost_alone}"),
    ]
    conditions = {"lease_s": LEASE_S, "rounds": num_rounds, "streams": NUM_STREAMS, "fault": "kill -9"}
    finish("failover", conditions, checks)


if __name__ == "__main__":
    main()
