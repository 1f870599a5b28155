"""A standby scheduler takes over from one that is killed, paused or stopped under load; nothing admitted is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import nats.errors
import pytest
from nats.js import JetStreamContext

from tests.e2e.tenants import Tenant
from tests.support.brokers import nats_cluster
from tests.support.completions import Streamed, complete, headers, stream
from tests.support.http import http
from tests.support.parts import Parts, parts_of
from tests.support.scheduler import watch
from tests.support.schedulers import address_of, becomes_active, serves
from tests.support.wait import HANG_S, eventually, wait_until
from torchrelay.cli.up.plan import STORE_ID, UpOptions
from torchrelay.common.net.nats_client import Subjects, connect
from torchrelay.common.net.nats_permissions import (
    NatsUser,
    authorization,
    gateway_user,
    scheduler_user,
    store_user,
    worker_user,
)

pytestmark = pytest.mark.e2e
LEASE_S = 1.5
SUBJECTS = Subjects()
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


@asynccontextmanager
async def two_schedulers(folder: Path, settings: Mapping[str, Mapping[str, str]]) -> AsyncIterator[Parts]:
    """A platform with two schedulers, of which the first is active; ``settings``: of parts by name."""
    async with parts_of(folder / "home", OPTIONS) as parts:
        for name, changed in settings.items():
            parts.set(name, **changed)
        parts.set("scheduler", LEASE_S=str(LEASE_S))
        parts.copy("scheduler-1", "scheduler", "PORT")
        parts.set("gateway", SCHEDULER_ADDRESS=",".join(address_of(parts, name) for name in SCHEDULERS))
        await parts.start("param-store", "scheduler", "worker-0", "worker-1", "gateway")
        await parts.start("scheduler-1", is_awaited=False)
        assert not await serves(parts, "scheduler-1")
        yield parts


async def pause(parts: Parts) -> None:
    """Pauses the second scheduler, which is active, for longer than the lease lasts."""
    pid = parts.children["scheduler-1"].pid
    os.kill(pid, signal.SIGSTOP)
    await becomes_active(parts, "scheduler")
    os.kill(pid, signal.SIGCONT)
    async with asyncio.timeout(HANG_S):
        assert "status 1" in await parts.children.pop("scheduler-1").exited(), "it learns that it was replaced"


async def kill(parts: Parts) -> None:
    await parts.kill("scheduler")


async def leave(parts: Parts) -> None:
    await parts.leave("scheduler")


Fault: TypeAlias = Callable[[Parts], Coroutine[Any, Any, None]]


async def nothing_is_lost(parts: Parts, folder: Path, fault: Fault, name: str = "acme") -> set[str]:
    """Under load of a new tenant comes the fault: running streams and new requests get all tokens, billed once.

    Returns the tenant's models.
    """
    platform = parts.platform("gateway")
    tenant = Tenant(platform, name, await asyncio.to_thread(platform.tenant, name), folder)
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
    usage = http.get(f"{platform.http}/v1/usage", headers=headers(tenant.key)).json()["total"]
    assert usage["completion_tokens"] == 3 * NUM_STREAMS * NUM_TOKENS
    assert usage["prompt_tokens"] == 3 * NUM_STREAMS * len(PROMPT)
    return {warm, cold}


async def has_taken_over(parts: Parts, name: str, models: set[str]) -> None:
    """The scheduler of this name is active, and learns of the instances."""
    await becomes_active(parts, name)
    addresses = ",".join(address_of(parts, name) for name in SCHEDULERS)
    token = parts.setting("gateway", "SCHEDULER_TOKEN")

    def known() -> set[str]:
        return {instance.model for instance in next(watch(addresses, token=token)).instances}

    await asyncio.to_thread(wait_until, lambda: known() == models, "both workers' instances")


async def test_standby_takes_over_without_loss(tmp_path: Path) -> None:
    """From a scheduler that leaves, and back from a scheduler that was paused."""
    async with two_schedulers(tmp_path, {}) as parts:
        models = await nothing_is_lost(parts, tmp_path, leave)
        await has_taken_over(parts, "scheduler-1", models)
        await parts.start("scheduler", is_awaited=False)
        assert not await serves(parts, "scheduler")
        await nothing_is_lost(parts, tmp_path, pause, "beta")  # whose models are the same, on the same instances
        await has_taken_over(parts, "scheduler", models)


async def lease_of(js: JetStreamContext) -> tuple[str, int]:
    """The lease's holder and the number of its renewals; empty while it is unknown."""
    try:
        message = await js.get_last_msg(SUBJECTS.lease_stream, SUBJECTS.lease)
    except nats.errors.Error:  # also while the stream has no leader
        return "", 0
    return (message.data or b"").decode(), message.seq or 0


async def test_standby_takes_over_in_cluster_of_nats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load the NATS server dies that leads the lease's stream, and later the active scheduler."""
    users = {
        "scheduler": scheduler_user(SUBJECTS),
        "gateway": gateway_user(SUBJECTS),
        "param-store": store_user(STORE_ID, SUBJECTS),
        **{name: worker_user(name, SUBJECTS) for name in ("worker-0", "worker-1")},
        "test": NatsUser("test", [">"], [">"]),
    }
    with nats_cluster(tmp_path, authorization((user, "secret") for user in users.values())) as cluster:
        seeds = ",".join(cluster.urls.values())
        monkeypatch.setenv("TORCHRELAY_NATS_URL", seeds)
        urls = {name: seeds.replace("nats://", f"nats://{user.name}:secret@") for name, user in users.items()}
        client = await connect(urls.pop("test"), "test")
        js = client.jetstream(timeout=1.0)

        async def kill_nats(parts: Parts) -> None:
            holder, renewals = await lease_of(js)
            assert holder.split()[0] == address_of(parts, "scheduler")
            info = await js.stream_info(SUBJECTS.lease_stream)
            assert info.cluster is not None and info.cluster.leader is not None
            cluster.kill(info.cluster.leader)

            async def renewed() -> bool:
                return (await lease_of(js))[1] > renewals

            await eventually(renewed, "the lease's renewal")
            assert (await lease_of(js))[0] == holder, "it has stayed active"

        settings = {name: {"NATS_URL": url, "NATS_REPLICAS": "3"} for name, url in urls.items()}
        async with two_schedulers(tmp_path, settings) as parts:
            models = await nothing_is_lost(parts, tmp_path, kill_nats)
            await nothing_is_lost(parts, tmp_path, kill, "beta")  # whose models are the same, on the same instances
            await has_taken_over(parts, "scheduler-1", models)
            for stream in (SUBJECTS.lease_stream, SUBJECTS.history_stream, SUBJECTS.usage_stream):
                assert (await js.stream_info(stream)).config.num_replicas == 3
        await client.close()
