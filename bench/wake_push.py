"""How soon KEDA learns that a request waits where no worker runs: the message that the scheduler pushes to it.

    python bench/wake_push.py [--quick]

Each round begins at zero: no worker, no request, and the stream of KEDA's protocol has said so. A gateway's open stream
then brings the scheduler one request. The time runs from just before the gateway's process writes this message, so it
includes the way to the scheduler, until the client of KEDA's protocol has read the pushed ``true``. The request is
withdrawn, and the round ends when ``false`` arrives, half a second later at most; two schedulers take turns, as most
of a round is this wait. Gateways and clients share a process, each scheduler has its own, the NATS server is real.

For comparison, after each push a message goes to and fro on a stream between this process and a gRPC server that only
echoes, in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.report import Check, finish, parser_of, percentile, progress
from bench.scheduling.echo import METHOD, SERVICE
from bench.scheduling.fleet import CLUSTER_KEY, Fleet
from bench.scheduling.gateway import scheduler_token
from tests.support.brokers import nats_server
from torchrelay.cli.up.ports import Ports
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import (
    external_scaler_pb2,
    external_scaler_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    types_pb2,
)

ROOT = Path(__file__).resolve().parents[1]
NUM_SCHEDULERS = 2
NUM_WARM_UP = 3  # rounds
STUCK_S = 30.0
WORKERS = external_scaler_pb2.ScaledObjectRef(name="worker", namespace="bench", scaler_metadata={"numDevices": "1"})
VERSION = Fleet(num_workers=0, num_models=1, num_prefill=0, num_decode=0).version(0)


@dataclass
class Wakes:
    """A scheduler without workers, at which a gateway and KEDA have a stream each."""

    admissions: Any
    pushes: Any
    num_rounds: int = 0

    async def push_s(self) -> float:
        """Seconds from a request at zero to the pushed message."""
        self.num_rounds += 1
        request = scheduler_pb2.AdmitRequest(
            key=self.key, version=VERSION, num_prompt_tokens=1300, max_tokens=200, num_choices=1
        )
        message = commands(admit=request)
        begin_s = time.perf_counter()
        await self.admissions.write(message)
        await self.reads(is_active=True)
        return time.perf_counter() - begin_s

    async def withdraw(self) -> None:
        await self.admissions.write(commands(withdraw=scheduler_pb2.Withdraw(key=self.key)))

    @property
    def key(self) -> types_pb2.AttemptKey:
        return types_pb2.AttemptKey(request_id=f"req-{self.num_rounds}", attempt=1)

    async def reads(self, *, is_active: bool) -> None:
        async with asyncio.timeout(STUCK_S):
            message = await self.pushes.read()
        assert message.result is is_active


def commands(**command: Any) -> scheduler_pb2.AdmitCommands:
    return scheduler_pb2.AdmitCommands(commands=[scheduler_pb2.AdmitCommand(**command)])


@asynccontextmanager
async def scheduler_of(number: int, nats_url: str, folder: Path) -> AsyncIterator[tuple[str, str]]:
    """A scheduler process: its address for gateways, and that for KEDA."""
    ready = folder / f"ready-{number}.json"
    with closing(Ports()) as ports:
        port = ports.free()
        program = str(Path(sys.executable).parent / "torchrelay-scheduler")
        settings = ("--cluster-key", CLUSTER_KEY, "--nats-url", nats_url, "--nats-prefix", f"bench-{number}")
        keda = ("--pool-mode", "follow", "--keda-port", str(port))
        scheduler = await asyncio.create_subprocess_exec(
            program, *settings, *keda, "--ready-file", str(ready), "--log-level", "warning"
        )
        try:
            async with asyncio.timeout(STUCK_S):
                while not ready.exists():
                    assert scheduler.returncode is None, f"the scheduler ended with status {scheduler.returncode}"
                    await asyncio.sleep(0.05)
            yield json.loads(ready.read_text())["grpc"], f"127.0.0.1:{port}"
        finally:
            await ended(scheduler)


@asynccontextmanager
async def wakes_of(address: str, keda_address: str) -> AsyncIterator[Wakes]:
    async with (
        open_channel(address, token=scheduler_token()) as control,
        grpc.aio.insecure_channel(keda_address) as keda,
    ):
        admissions: Any = scheduler_pb2_grpc.SchedulerStub(control).Admit()
        pushes: Any = external_scaler_pb2_grpc.ExternalScalerStub(keda).StreamIsActive(WORKERS)
        await admissions.write(commands(hello=scheduler_pb2.AdmitHello(gateway_id="bench")))
        yield Wakes(admissions, pushes)
        admissions.cancel()
        pushes.cancel()


@asynccontextmanager
async def echo_server() -> AsyncIterator[str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.scheduling.echo", stdin=pipe, stdout=pipe, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        await ended(process)


async def ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


async def echo_s(call: Any) -> float:
    """Seconds of a round trip on a stream to a server that echoes."""
    begin_s = time.perf_counter()
    await call.write(b"request")
    async with asyncio.timeout(STUCK_S):
        await call.read()
    return time.perf_counter() - begin_s


async def measure(num_rounds: int) -> tuple[list[float], list[float]]:
    """Seconds from the request to the message, of all rounds of all schedulers; those of as many echoes beside them."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats_url = stack.enter_context(nats_server(folder))
        # All processes start before this one uses gRPC, whose threads do not survive a fork.
        echo_address = await stack.enter_async_context(echo_server())
        addresses = [
            await stack.enter_async_context(scheduler_of(number, nats_url, folder)) for number in range(NUM_SCHEDULERS)
        ]
        schedulers = [await stack.enter_async_context(wakes_of(*pair)) for pair in addresses]
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(echo_address))
        echo: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        stack.callback(echo.cancel)
        pushes_s: list[float] = []
        echoes_s: list[float] = []
        for number in range(NUM_WARM_UP + num_rounds):
            for scheduler in schedulers:
                await scheduler.reads(is_active=False)
            round_s = [(await scheduler.push_s(), await echo_s(echo)) for scheduler in schedulers]
            for scheduler in schedulers:
                await scheduler.withdraw()
            if number >= NUM_WARM_UP:
                pushes_s += [push_s for push_s, _ in round_s]
                echoes_s += [took_s for _, took_s in round_s]
            if number % 50 == 0:
                progress(f"round {number}: {max(push_s for push_s, _ in round_s) * 1e3:.2f} ms")
        return pushes_s, echoes_s


def main() -> None:
    arguments = parser_of(__doc__, "70 rounds").parse_args()
    num_rounds = 70 if arguments.quick else 300
    pushes_s, echoes_s = uvloop.run(measure(num_rounds))
    push_ms, echo_ms = [[percentile(took_s, percent) * 1e3 for percent in (99, 50)] for took_s in (pushes_s, echoes_s)]
    checks = [
        Check("push_p99_ms", push_ms[0], "ms", 5.0, f"a stream's round trip: {echo_ms[0]:.2f} ms"),
        Check("push_p50_ms", push_ms[1], "ms", None, f"a stream's round trip: {echo_ms[1]:.2f} ms"),
    ]
    finish("wake_push", {"rounds": num_rounds, "schedulers": NUM_SCHEDULERS}, checks)


if __name__ == "__main__":
    main()
