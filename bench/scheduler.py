"""The scheduler process at large scale: CPU time per request, latency of answers and wakes, and cost when idle.

    python bench/scheduler.py [--quick]

Costs of single calls in overload and of the repair of copies are measured in this process (``scheduling/overload.py``).
For all else, the scheduler process and the NATS server are real. Two other processes play gateways, workers and stores
on real gRPC streams: they report, send heartbeats and obey, but compute nothing (``scheduling/peers.py``). Only the CPU
time of the scheduler's process counts, so slow peers on a machine with few cores do not matter to it; latencies include
the peers.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.processes import cpu_s
from bench.report import Check, finish, parser_of, progress
from bench.scheduling.fleet import CLUSTER_KEY, Fleet
from bench.scheduling.gateway import STUCK_S, Placed, bench_gateway, scheduler_token
from bench.scheduling.heartbeat import Stall, longest_stall
from bench.scheduling.overload import NUM_STARVING, overload_times, repair_times
from tests.support.brokers import nats_server
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.message_pace import EVERY_S
from torchrelay.control.v1 import scheduler_pb2, scheduler_pb2_grpc

ROOT = Path(__file__).resolve().parents[1]
DENSE = Fleet(num_workers=64, num_models=4, num_prefill=8, num_decode=8)
WIDE = Fleet(num_workers=1000, num_models=300, num_prefill=2, num_decode=1)
WAKES = Fleet(num_workers=256, num_models=300, num_prefill=0, num_decode=0, idle_timeout_s=0.5, workers_per_host=4)
WAKES_PER_S = 200
SETTLE_S = 3.0  # a new scheduler wakes nothing before
START_S = 120.0
NUM_AT_ONCE = 2000  # requests of a gateway that returns
GC_THRESHOLD = 20_000  # a gateway's


@dataclass
class Running:
    """A running scheduler that knows its whole fleet."""

    address: str
    nats_url: str
    pid: int
    fleet: Fleet
    peers: asyncio.subprocess.Process
    heartbeat: Path

    async def commands(self) -> list[tuple[str, str, float]]:
        """Name, pack and time of every Relay and Load command since the last call."""
        assert self.peers.stdin and self.peers.stdout
        self.peers.stdin.write(b"\n")
        return [(name, pack_id, at) for name, pack_id, at in json.loads(await self.peers.stdout.readline())]


@asynccontextmanager
async def running(fleet: Fleet) -> AsyncIterator[Running]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats_url = stack.enter_context(nats_server(folder))
        ready = folder / "ready.json"
        heartbeat = folder / "heartbeat"
        program = (sys.executable, "-m", "bench.scheduling.heartbeat", str(heartbeat))
        settings = ("--cluster-key", CLUSTER_KEY, "--nats-url", nats_url, "--ready-file", str(ready))
        limits = ("--max-open-per-instance", "256", "--log-level", "warning", "--no-replicate")
        scheduler = await asyncio.create_subprocess_exec(*program, *settings, *limits, cwd=ROOT)
        stack.push_async_callback(_end, scheduler)
        while not ready.exists():
            assert scheduler.returncode is None, "the scheduler ended"
            await asyncio.sleep(0.05)
        address = json.loads(ready.read_text())["grpc"]
        command = (sys.executable, "-m", "bench.scheduling.peers", nats_url, json.dumps(asdict(fleet)))
        pipe = asyncio.subprocess.PIPE
        peers = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT, limit=1 << 26)
        stack.push_async_callback(_end, peers)
        assert peers.stdout
        await peers.stdout.readline()
        await _await_fleet(address, fleet)
        await asyncio.sleep(SETTLE_S)
        yield Running(address, nats_url, scheduler.pid, fleet, peers, heartbeat)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


async def _await_fleet(address: str, fleet: Fleet) -> None:
    """Waits until the scheduler has seen every worker and store."""
    async with asyncio.timeout(START_S), open_channel(address, token=scheduler_token()) as channel:
        watch = scheduler_pb2_grpc.SchedulerStub(channel).WatchCluster(scheduler_pb2.WatchClusterRequest())
        async for view in watch:
            if len(view.workers) == fleet.num_workers and len(view.stores) == fleet.num_hosts:
                watch.cancel()
                return


@dataclass(frozen=True, slots=True)
class Throughput:
    admits_per_s: float  # per CPU second of the scheduler
    answer_p99_ms: float  # at half of that load
    num_refused: int
    idle_cpu_fraction: float  # before the load


async def throughput(fleet: Fleet, seconds: float) -> Throughput:
    num_serving = fleet.num_models * (fleet.num_prefill + fleet.num_decode)
    async with running(fleet) as it, bench_gateway(it.address, fleet, num_serving) as gateway:
        idle = await idle_cpu_fraction(it.pid, seconds)
        await gateway.fill(64, seconds / 2)
        before_s, num_before = cpu_s(it.pid), gateway.num_placed
        await gateway.fill(64, seconds)
        per_s = (gateway.num_placed - num_before) / (cpu_s(it.pid) - before_s)
        progress(f"{fleet.num_workers} workers: {per_s:.0f} admissions per CPU second")
        await gateway.drain()
        gateway.placed.clear()
        await gateway.pace(per_s / 2, seconds)
        await gateway.drain()
        return Throughput(per_s, _p99_ms([placed.answer_s for placed in gateway.placed]), gateway.num_refused, idle)


async def throughput_if_able(fleet: Fleet, seconds: float) -> Throughput:
    """The throughput; none if the machine is too slow to play the fleet."""
    try:
        return await throughput(fleet, seconds)
    except TimeoutError:
        progress(f"{fleet.num_workers} workers: no answer within {STUCK_S:g} s; two cores may be too few")
        return Throughput(0.0, math.inf, 0, math.nan)


def _p99_ms(values_s: list[float]) -> float:
    return statistics.quantiles(values_s, n=100)[-1] * 1e3 if len(values_s) > 1 else math.nan


async def idle_cpu_fraction(pid: int, seconds: float) -> float:
    begin_s, begin = cpu_s(pid), time.monotonic()
    await asyncio.sleep(seconds)
    return (cpu_s(pid) - begin_s) / (time.monotonic() - begin)


@dataclass(frozen=True, slots=True)
class WakeTimes:
    """P99 from a request's admission to the commands of its wake: Relay to the store, and Load to the worker."""

    relay_p99_ms: float
    load_p99_ms: float
    number: int
    stall: Stall


async def wake_times(seconds: float) -> WakeTimes:
    """Measures wakes: each model is requested every 1.5 s and unloaded after 0.5 s, so some of 256 slots are free."""
    async with running(WAKES) as it:
        await it.commands()
        async with bench_gateway(it.address, WAKES, 0) as gateway:
            begin, num = time.monotonic(), 0
            while (elapsed := time.monotonic() - begin) < seconds:
                while num < elapsed * WAKES_PER_S:
                    gateway.admit(num % WAKES.num_models)
                    num += 1
                await asyncio.sleep(0.001)
            await gateway.drain()
        commands = await it.commands()
        relay_s, load_s = (_until_command(gateway.placed, commands, name) for name in ("relay", "load"))
        return WakeTimes(_p99_ms(relay_s), _p99_ms(load_s), len(load_s), await stall_of_returns(it, seconds))


async def stall_of_returns(it: Running, seconds: float) -> Stall:
    """The longest stall while a console watches, and a gateway returns every second and asks for ``NUM_AT_ONCE``
    requests again, some of which wait for a slot.
    """
    begin = time.monotonic()
    async with open_channel(it.address, token=scheduler_token()) as channel:
        watch = scheduler_pb2_grpc.SchedulerStub(channel).WatchCluster(scheduler_pb2.WatchClusterRequest())
        reading = asyncio.create_task(_read(watch))
        while time.monotonic() < begin + seconds:
            async with bench_gateway(it.address, it.fleet, NUM_AT_ONCE) as gateway:
                for _ in range(NUM_AT_ONCE):
                    gateway.admit()
                await gateway.pace(WAKES_PER_S, 1.0)
        watch.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    return longest_stall(it.heartbeat, begin)


async def _read(messages: Any) -> None:
    async for _ in messages:
        pass


def _until_command(placed: Sequence[Placed], commands: Sequence[tuple[str, str, float]], name: str) -> list[float]:
    """Times from admission to the command of each wake. A request that was placed without a load is no wake."""
    by_pack = defaultdict[str, list[float]](list)
    for command, pack_id, at in commands:
        if command == name:
            by_pack[pack_id].append(at)
    waits_s = []
    for request in placed:
        times = [at for at in by_pack[request.pack_id] if request.sent_at <= at <= request.placed_at]
        waits_s += [min(times) - request.sent_at] if times else []
    return waits_s


async def main() -> None:
    quick = parser_of(__doc__, "shorter loads, under 50 s").parse_args().quick
    gc.freeze()  # collections delay the measurement; allow no more of them than in a gateway
    gc.set_threshold(GC_THRESHOLD)
    seconds = 3.0 if quick else 20.0
    repair = repair_times(1250, 1000, 12.0)
    smaller, larger = (overload_times(number, seconds / 3) for number in (1000, 2000))
    progress(f"overload: {larger}; repair: {repair}")
    dense = await throughput(DENSE, seconds)
    wide = await throughput_if_able(WIDE, seconds)
    wakes = await wake_times(seconds)
    stall_text = f"{NUM_AT_ONCE:,} requests at once, 256 workers; {wakes.stall}"
    checks = [
        Check("admits_per_s", dense.admits_per_s, "/s", 5000, "64 instances, 8 x 8 of each model", at_least=True),
        Check("admits_per_s_1000", wide.admits_per_s, "/s", 3000, "1,000 workers, 300 models", at_least=True),
        Check("admit_p99_ms", max(dense.answer_p99_ms, wide.answer_p99_ms), "ms", 10, "at half of that load"),
        Check("wake_p99_ms", wakes.load_p99_ms, "ms", 5, f"{WAKES_PER_S} requests/s, {wakes.number} wakes"),
        Check("relay_p99_ms", wakes.relay_p99_ms, "ms", against="the first command of a wake"),
        Check("idle_cpu_fraction", wide.idle_cpu_fraction, "", 0.2, "1,000 workers report"),
        Check("longest_stall_ms", wakes.stall.own_s * 1e3, "ms", 10, stall_text),
        Check("refused", dense.num_refused + wide.num_refused, "", 0),
    ]
    starving = f"{NUM_STARVING} models wait, and all slots are in use"
    ticks = "ticks take {:.0%} of a core"
    checks += [
        Check("decide_ms_1000_starving5", smaller.decide_ms, "ms", against=f"1,000 instances; {starving}"),
        Check("decide_ms_2000_starving5", larger.decide_ms, "ms", 15, ticks.format(larger.ticks_fraction)),
        Check("longest_call_ms", larger.longest_ms, "ms", 10, f"2,000 instances; the longest is {larger.longest}"),
        Check("repair_ms_1250x1000_disks", repair.longest_tick_ms, "ms", 10, ticks.format(repair.ticks_fraction)),
    ]
    conditions = {
        "seconds": seconds,
        "quick": quick,
        "wake": "from the gateway's write of the admission to the arrival of the Load at the worker, after the host's "
        "store has answered the Relay; requests placed without a load do not count",
        "admit": f"half the load at an even rate, in groups every {EVERY_S * 1e3:g} ms, from no open requests on",
    }
    finish("scheduler", conditions, checks)


if __name__ == "__main__":
    uvloop.run(main())
