"""The console in Chromium, and the gateway that feeds it: first paint, CPU of the browser, CPU of the live stream.

    python bench/console.py [--quick]

Scheduler, gateway, Redis and NATS are real. Another process plays 64 hosts with 256 workers: it reports over NATS and
obeys over gRPC, as in `scheduler.py`, and every report has other figures, so each sample changes each worker's row. The
gateway samples the cluster once a second, whatever its size. For 60 samples per second the browser gets samples of this
gateway from a server in the bench's process; all else still comes from the gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import uvloop
from playwright.async_api import Browser, Page, async_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.processes import children, cpu_s
from bench.report import Check, finish, parser_of, progress
from bench.scheduler import START_S, Running
from bench.scheduler import running as running_scheduler
from bench.scheduling.fleet import Fleet
from bench.scheduling.gateway import scheduler_token
from tests.support.brokers import free_port, redis_server, running
from tests.support.wait import eventually
from torchrelay.gateway.auth.tenants import Tenants
from torchrelay.gateway.billing.prices import Prices
from torchrelay.gateway.catalog.catalog import Catalog
from torchrelay.gateway.catalog.model_settings import ModelSettings
from torchrelay.gateway.core import ModelShape, Version
from torchrelay.gateway.http.server import http_server
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.table_versions import TableVersions

FLEET = Fleet(
    num_workers=256, num_models=200, num_prefill=0, num_decode=1, workers_per_host=4, figures_change=True
)  # fmt: skip
ADMIN_KEY = f"tra-{'0' * 32}"
CHROMIUM = shutil.which("chromium") or "chromium"  # where it is missing, Playwright says so
PAGES = {"overview": "Models at zero", "models": "200 of 200 models", "cluster": "Slots ready"}  # and a text on each
SAMPLES_PER_S = 60
NUM_RECORDED = 4  # samples of the gateway, sent in turn
NUM_VIEWERS = 40
WARM_UP_S = 1.0
PAINT = "performance.getEntriesByName('first-contentful-paint').at(0)?.startTime"
Message = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that knows the fleet and its models. ``keys`` has a key of each tenant."""

    pid: int
    port: int
    keys: list[str]

    @property
    def console(self) -> str:
        return f"http://127.0.0.1:{self.port}/console"

    async def viewer(self, key: str) -> AsyncIterator[bytes]:
        """The samples of a live stream."""
        async with (
            httpx.AsyncClient(trust_env=False, timeout=30) as client,
            client.stream("GET", f"{self.console}/live", headers={"Authorization": f"Bearer {key}"}) as answer,
        ):
            answer.raise_for_status()
            buffered = b""
            async for part in answer.aiter_raw():
                *whole, buffered = (buffered + part).split(b"\n\n")
                for event in whole:
                    yield event.removeprefix(b"data: ")


@asynccontextmanager
async def running_gateway(scheduler: Running) -> AsyncIterator[Gateway]:
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrelay-bench-")))
        port, database_url = free_port(), f"sqlite:///{home}/ledger.db"
        settings = {
            "http-port": str(port),
            "admin-key": ADMIN_KEY,
            "database-url": database_url,
            "redis-url": stack.enter_context(redis_server(home)),
            "nats-url": scheduler.nats_url,
            "scheduler-address": scheduler.address,
            "scheduler-token": scheduler_token(),
            "log-level": "warning",
        }
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        program = str(Path(sys.executable).with_name("torchrelay-gateway"))
        process = stack.enter_context(running([program, *flags], home / "gateway.log", port, limit_s=START_S))
        yield Gateway(process.pid, port, await publish(f"http://127.0.0.1:{port}", database_url))


async def publish(http: str, database_url: str) -> list[str]:
    """Publishes the fleet's models directly in the catalog, because no store packs them; returns keys of tenants."""
    names = sorted({each.model.partition("/")[0] for each in FLEET.versions()})
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=http, headers=headers, trust_env=False, timeout=30) as client:

        async def key_of(name: str) -> str:
            (await client.post("/v1/tenants", json={"name": name})).raise_for_status()
            key: str = (await client.post("/v1/keys", json={"tenant": name})).raise_for_status().json()["key"]
            return key

        keys = list(await asyncio.gather(*map(key_of, names)))
    database = Database(database_url)
    table_versions = TableVersions(database, 0.5)
    catalog = Catalog(database, table_versions, Prices(database, table_versions))
    shape = ModelShape(32, 8, 128, 2, 4096, 128_000)
    ids = {name: (await Tenants(database).by_name(name)).tenant_id for name in names}
    async with database.write() as connection:
        for each in FLEET.versions():
            tenant, _, model = each.model.partition("/")
            version = Version(
                version_id=each.version_id,
                pack_id=each.pack_id,
                pack_bytes=each.pack_bytes,
                architecture="LlamaForCausalLM",
                dtype="BF16",
                shape=shape,
                routing_block_tokens=each.routing_block_tokens,
                stored_bytes=each.pack_bytes,
                file_digests={},
            )
            await catalog.publish_in(connection, ids[tenant], model, version, ModelSettings())
    await database.close()
    return keys


async def whole_samples(gateway: Gateway) -> list[bytes]:
    """The next samples with nearly the whole fleet. Raises ``TimeoutError`` if the machine is too busy for any.

    Where it is busy, the scheduler takes some silent worker for lost.
    """
    whole: list[bytes] = []
    async with asyncio.timeout(START_S):
        async for encoded in gateway.viewer(ADMIN_KEY):
            sample = json.loads(encoded)
            sizes = len(sample["hosts"]), sum(len(host["slots"]) for host in sample["hosts"]), len(sample["instances"])
            expected = FLEET.num_hosts, FLEET.num_workers, FLEET.num_models
            if all(size >= 0.95 * whole_size for size, whole_size in zip(sizes, expected, strict=True)):
                whole.append(encoded)
            if len(whole) == NUM_RECORDED:
                break
    return whole


class LiveSamples:
    """An application that answers with samples, ``SAMPLES_PER_S`` of them each second, each with its own time."""

    def __init__(self, samples: Sequence[bytes]) -> None:
        self._samples = [json.loads(each) for each in samples]
        self._is_open = True
        self.num_sent = 0

    def close(self) -> None:
        """Ends all streams."""
        self._is_open = False

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        encoded = [json.dumps(each | {"at_unix_s": "AT"}).encode() for each in self._samples]
        begin = time.monotonic()
        for number, each in enumerate(cycle(encoded)):
            await asyncio.sleep(begin + number / SAMPLES_PER_S - time.monotonic())
            if not self._is_open:
                break
            event = b"data: " + each.replace(b'"AT"', str(time.time()).encode(), 1) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
            self.num_sent += 1
        await send({"type": "http.response.body", "body": b""})


def chromium_pid() -> int:
    """The process that all others of Chromium descend from."""
    left = children(os.getpid())
    while left:
        pid = left.pop()
        if "chromium" in Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]:
            return pid
        left += children(pid)
    raise RuntimeError("Chromium does not run")


async def cpu_share(pid: int, seconds: float) -> float:
    """The share of a core that a process and its children take from now on."""
    begin_s, begin = cpu_s(pid), time.monotonic()
    await asyncio.sleep(seconds)
    return (cpu_s(pid) - begin_s) / (time.monotonic() - begin)


async def first_paint_ms(browser: Browser, url: str, number: int) -> float:
    """The median of the first contentful paint in fresh contexts, whose caches are empty."""
    times: list[float] = []
    for _ in range(number):
        page = await browser.new_page()
        await page.goto(url)
        await eventually(partial(page.evaluate, PAINT), "the first paint")
        times.append(await page.evaluate(PAINT))
        await page.context.close()
    return statistics.median(times)


async def signed_in(browser: Browser, gateway: Gateway, live: str = "") -> Page:
    """The overview of an admin; the live stream comes from the address ``live`` if that is given."""
    page = await browser.new_page(viewport={"width": 1200, "height": 800})
    if live:
        await page.route("**/console/live", lambda route: route.continue_(url=live))
    await page.goto(gateway.console)
    await page.get_by_label("API key").fill(ADMIN_KEY)
    await page.get_by_role("button", name="Sign in").click()
    return page


async def browser_cpu(page: Page, seconds: float, samples: LiveSamples | None = None) -> dict[str, float]:
    """The share of a core that Chromium takes, by page of the console.

    If the page took fewer of ``samples`` than it should, the share is scaled up to all of them.
    """
    shares = {}
    for name, text in PAGES.items():
        await page.evaluate(f"location.hash = '#/{name}'")
        await page.get_by_text(text).wait_for()
        await asyncio.sleep(WARM_UP_S)
        begin, num_before = time.monotonic(), samples.num_sent if samples else 0
        shares[name] = await cpu_share(chromium_pid(), seconds)
        if samples:
            per_s = (samples.num_sent - num_before) / (time.monotonic() - begin)
            progress(f"{name}: {shares[name]:.1%} of a core at {per_s:.0f} samples per second")
            shares[name] *= max(1.0, SAMPLES_PER_S / per_s)
    await page.context.close()
    return shares


async def stream_cpu(gateway: Gateway, keys: Sequence[str], seconds: float) -> float:
    """The share of a core that the gateway takes while each of ``keys`` has a live stream."""

    async def follow(key: str) -> None:
        async for _ in gateway.viewer(key):
            started.release()

    started = asyncio.Semaphore(0)
    followers = [asyncio.create_task(follow(key)) for key in keys]
    try:
        for _ in keys:
            await started.acquire()
        return await cpu_share(gateway.pid, seconds)
    finally:
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)


def worst(shares: dict[str, float]) -> tuple[float, str]:
    """The largest share, and the shares of all pages as text."""
    return max(shares.values()), ", ".join(f"{name} {share:.1%}" for name, share in shares.items())


async def main() -> None:
    quick = parser_of(__doc__, "shorter loads, under 50 s").parse_args().quick
    seconds, num_paints = (3.0, 5) if quick else (12.0, 15)
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(running_scheduler(FLEET))
        progress("the scheduler knows the fleet")
        gateway = await stack.enter_async_context(running_gateway(scheduler))
        driver = await stack.enter_async_context(async_playwright())
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        stack.push_async_callback(browser.close)
        progress("the gateway knows the fleet's models")
        await first_paint_ms(browser, gateway.console, 1)
        paint_ms = await first_paint_ms(browser, gateway.console, num_paints)
        blank_ms = await first_paint_ms(browser, f"{gateway.console}/format.js", num_paints)
        progress(f"first paint {paint_ms:.0f} ms, a page of text {blank_ms:.0f} ms")
        idle_page = await browser.new_page()
        await asyncio.sleep(3 * WARM_UP_S)  # the pages before have ended
        idle = await cpu_share(chromium_pid(), seconds)
        await idle_page.context.close()
        await whole_samples(gateway)
        fed = await browser_cpu(await signed_in(browser, gateway), seconds)
        progress(f"browser at a sample per second: {worst(fed)[1]}; idle {idle:.1%}")
        recorded = await whole_samples(gateway)
        samples = LiveSamples(recorded)
        async with http_server(samples, "127.0.0.1", 0, 0.1) as live:
            page = await signed_in(browser, gateway, f"http://127.0.0.1:{live.port}/console/live")
            fast = await browser_cpu(page, seconds, samples)
            samples.close()
        await browser.close()
        unwatched = await stream_cpu(gateway, [], seconds)
        single = await stream_cpu(gateway, [ADMIN_KEY], seconds) - unwatched
        many = (await stream_cpu(gateway, [ADMIN_KEY] * NUM_VIEWERS, seconds) - unwatched) / NUM_VIEWERS
        tenants = (await stream_cpu(gateway, gateway.keys[:NUM_VIEWERS], seconds) - unwatched) / NUM_VIEWERS
    checks = [
        Check("first_paint_ms", paint_ms, "ms", 300, f"{blank_ms:.0f} ms for a page of text from the same gateway"),
        Check("browser_cpu", worst(fast)[0], "core", 0.3, f"{worst(fast)[1]}; {idle:.1%} with an idle page"),
        Check("browser_cpu_feed", worst(fed)[0], "core", 0.3, f"{worst(fed)[1]}; a sample per second, as users have"),
        Check("sse_cpu_per_viewer", many, "core", 0.01, f"{NUM_VIEWERS} admins; {unwatched:.1%} of a core without"),
        Check("sse_cpu_one_viewer", single, "core", 0.01, "with all of the sampling"),
        Check("sse_cpu_per_tenant", tenants, "core", 0.01, f"{NUM_VIEWERS} viewers, each of another tenant"),
    ]
    conditions = {
        "hosts": FLEET.num_hosts,
        "workers": FLEET.num_workers,
        "models": FLEET.num_models,
        "samples_per_s": SAMPLES_PER_S,
        "samples_per_s_feed": 1,  # what the gateway sends
        "sample_bytes": len(recorded[0]),
        "samples": "each has at least 95% of hosts, workers and models, before and after the loads of the browser",
        "chromium": f"{browser.version}, headless, without a sandbox and without a GPU; all its processes",
        "seconds": seconds,
        "quick": quick,
    }
    finish("console", conditions, checks)


if __name__ == "__main__":
    uvloop.run(main())
