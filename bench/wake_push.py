"""How soon KEDA learns that a request waits where no worker runs: the message that the scheduler pushes to it.

    python bench/wake_push.py [--quick]

Each round begins at zero: no worker, no request, and the stream of KEDA's protocol has said so. A gateway's open stream
then brings the scheduler one request. The time runs from just before the gateway's process writes this message, so it
includes the way to the scheduler, until the client of KEDA's protocol has read the pushed ``true``. The request is
withdrawn, and the round ends when ``false`` arrives, half a second later at most; four schedulers take turns, as most
of a round is this wait. Gateways and clients share a process, each scheduler has its own, the NATS server is real.

For comparison, a message goes to and fro on a stream between this process and a gRPC server that only echoes.
"""

from __future__ import annotations

import asyncio
import json
import statistics
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
NUM_SCHEDULERS = 4
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
async def wakes_of(number: int, nats_url: str, folder: Path) -> AsyncIterator[Wakes]:
    async with AsyncExitStack() as stack:
        ready, ports = folder / f"ready-{number}.json", stack.enter_context(closing(Ports()))
        port = ports.free()
        program = str(Path(sys.executable).parent / "torchrelay-scheduler")
        settings = ("--cluster-key", CLUSTER_KEY, "--nats-url", nats_url, "--nats-prefix", f"bench-{number}")
        keda = ("--pool-mode", "follow", "--keda-port", str(port))
        scheduler = await asyncio.create_subprocess_exec(
            program, *settings, *keda, "--ready-file", str(ready), "--log-level", "warning"
        )
        stack.push_async_callback(ended, scheduler)
        async with asyncio.timeout(STUCK_S):
            while not ready.exists():
                assert scheduler.returncode is None, "the scheduler ended"
                await asyncio.sleep(0.05)
        address = json.loads(ready.read_text())["grpc"]
        control = await stack.enter_async_context(open_channel(address, token=scheduler_token()))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        keda_stub: Any = external_scaler_pb2_grpc.ExternalScalerStub(channel)
        control_stub: Any = scheduler_pb2_grpc.SchedulerStub(control)
        admissions, pushes = control_stub.Admit(), keda_stub.StreamIsActive(WORKERS)
        stack.callback(admissions.cancel)
        stack.callback(pushes.cancel)
        await admissions.write(commands(hello=scheduler_pb2.AdmitHello(gateway_id="bench")))
        yield Wakes(admissions, pushes)


async def ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


async def pushes_s(num_rounds: int) -> list[float]:
    """Seconds from the request to the message, of all rounds of all schedulers."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats_url = stack.enter_context(nats_server(folder))
        schedulers = [
            await stack.enter_async_context(wakes_of(number, nats_url, folder)) for number in range(NUM_SCHEDULERS)
        ]
        took_s: list[float] = []
        for number in range(NUM_WARM_UP + num_rounds):
            for scheduler in schedulers:
                await scheduler.reads(is_active=False)
            round_s = [await scheduler.push_s() for scheduler in schedulers]
            for scheduler in schedulers:
                await scheduler.withdraw()
            if number >= NUM_WARM_UP:
                took_s += round_s
            if number % 50 == 0:
                progress(f"round {number}: {max(round_s) * 1e3:.2f} ms")
        return took_s


async def echoes_s(number: int) -> list[float]:
    """Seconds of round trips on a stream to a server that echoes."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.scheduling.echo", stdin=pipe, stdout=pipe, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            took_s = []
            for _ in range(number):
                begin_s = time.perf_counter()
                await call.write(b"request")
                async with asyncio.timeout(STUCK_S):
                    await call.read()
                took_s.append(time.perf_counter() - begin_s)
                await asyncio.sleep(0.01)  # the server is idle before each, as the scheduler is
            call.cancel()
            return took_s
    finally:
        await ended(process)


async def measure(num_rounds: int) -> tuple[list[float], list[float]]:
    return await pushes_s(num_rounds), await echoes_s(NUM_SCHEDULERS * num_rounds)


def main() -> None:
    arguments = parser_of(__doc__, "50 rounds").parse_args()
    num_rounds = 50 if arguments.quick else 250
    push_s, echo_s = uvloop.run(measure(num_rounds))
    echo_ms = [percentile(echo_s, percent) * 1e3 for percent in (99, 50)]
    checks = [
        Check("push_p99_ms", percentile(push_s, 99) * 1e3, "ms", 5.0, f"a stream's round trip: {echo_ms[0]:.2f} ms"),
        Check(
            "push_p50_ms", statistics.median(push_s) * 1e3, "ms", None, f"a stream's round trip: {echo_ms[1]:.2f} ms"
        ),
    ]
    finish("wake_push", {"rounds": num_rounds, "schedulers": NUM_SCHEDULERS}, checks)


if __name__ == "__main__":
    main()
