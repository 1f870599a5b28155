"""A standby scheduler takes over from one that is killed, paused or stopped under load; nothing admitted is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Tenant
from tests.support.completions import Streamed, complete, headers, stream
from tests.support.http import http
from tests.support.parts import Parts, parts_of
from tests.support.schedulers import address_of, becomes_active, serves
from tests.support.wait import HANG_S
from torchrelay.cli.api.scheduler_client import watch
from torchrelay.cli.up.plan import UpOptions

pytestmark = pytest.mark.e2e
LEASE_S = 1.5
OPTIONS = UpOptions(
    num_prefill_workers=0,
    num_decode_workers=0,
    num_both_workers=2,
    arena_bytes=256 << 20,
    kv_pool_bytes=32 << 20,
    threads=1,
    idle_timeout_s=600.0,
)
SCHEDULERS = ("scheduler", "scheduler-1")
NUM_STREAMS, NUM_TOKENS = 6, 400
PROMPT = list(range(30, 60))


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    """A platform with two schedulers, of which the first is active."""
    async with parts_of(tmp_path / "home", OPTIONS) as parts:
        parts.set("scheduler", LEASE_S=str(LEASE_S))
        parts.copy("scheduler-1", "scheduler", "PORT")
        parts.set("gateway", SCHEDULER_ADDRESS=",".join(address_of(parts, name) for name in SCHEDULERS))
        await parts.start("param-store", "scheduler", "worker-0", "worker-1", "gateway")
        await parts.start("scheduler-1", is_awaited=False)
        assert not await serves(parts, "scheduler-1")
        yield parts


async def pause(parts: Parts) -> None:
    """Pauses the active scheduler for longer than the lease lasts."""
    pid = parts.children["scheduler"].pid
    os.kill(pid, signal.SIGSTOP)
    await becomes_active(parts, "scheduler-1")
    os.kill(pid, signal.SIGCONT)
    async with asyncio.timeout(HANG_S):
        assert "status 1" in await parts.children.pop("scheduler").exited(), "it learns that it was replaced"


async def kill(parts: Parts) -> None:
    await parts.kill("scheduler")


async def leave(parts: Parts) -> None:
    await parts.leave("scheduler")


@pytest.mark.parametrize("fault", [kill, pause, leave])
async def test_standby_takes_over_without_loss(parts: Parts, tmp_path: Path, fault: Any) -> None:
    platform = parts.platform("gateway")
    tenant = Tenant(platform, "acme", await asyncio.to_thread(platform.tenant, "acme"), tmp_path)
    warm, cold = [await asyncio.to_thread(tenant.model, family) for family in ("llama", "mistral")]
    prompts = [[token + number for token in PROMPT] for number in range(NUM_STREAMS)]
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}

    def answer(prompt: list[int], model: str = warm) -> list[int]:
        tokens: list[int] = complete(platform, tenant.key, model, prompt, **options)["choices"][0]["token_ids"]
        return tokens

    expected = [await asyncio.to_thread(answer, prompt) for prompt in prompts]
    begun = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()

    def streamed(prompt: list[int]) -> Streamed:
        is_begun = False
        for state in stream(platform, tenant.key, warm, prompt, **options):
            if not is_begun and state.token_ids:
                is_begun = True
                loop.call_soon_threadsafe(begun.release)
        return state

    streams = [asyncio.create_task(asyncio.to_thread(streamed, prompt)) for prompt in prompts]
    for _ in prompts:
        await begun.acquire()
    begin_s = time.monotonic()
    ending = asyncio.create_task(fault(parts))
    waiting = [asyncio.create_task(asyncio.to_thread(answer, prompt, cold)) for prompt in prompts]
    answers = await asyncio.gather(*streams)
    assert [(state.error, state.done) for state in answers] == [(None, True)] * NUM_STREAMS
    assert [state.token_ids for state in answers] == expected
    assert [len(tokens) for tokens in await asyncio.gather(*waiting)] == [NUM_TOKENS] * NUM_STREAMS
    print(f"all answered {time.monotonic() - begin_s:.1f} s after the fault")
    await ending
    await becomes_active(parts, "scheduler-1")
    addresses = ",".join(address_of(parts, name) for name in SCHEDULERS)
    token = parts.setting("gateway", "SCHEDULER_TOKEN")
    view = await asyncio.to_thread(lambda: next(watch(addresses, token=token)))
    assert {instance.model for instance in view.instances} == {warm, cold}
    usage = http.get(f"{platform.http}/v1/usage", headers=headers(tenant.key)).json()["total"]
    assert usage["completion_tokens"] == 3 * NUM_STREAMS * NUM_TOKENS
    assert usage["prompt_tokens"] == 3 * NUM_STREAMS * len(PROMPT)
