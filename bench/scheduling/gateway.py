"""The gateway's side of the Admit stream, for loads at an even rate or as fast as the scheduler answers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from bench.scheduling.fleet import CLUSTER_KEY, Fleet
from torchrelay.common.identity.callers import SCHEDULER_NODE, Caller, call_token
from torchrelay.common.identity.keys import derive_node_key
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.message_pace import EVERY_S, MessagePace
from torchrelay.control.v1 import scheduler_pb2 as pb
from torchrelay.control.v1 import scheduler_pb2_grpc, types_pb2

NUM_PROMPTS = 512  # different prompts
NUM_HASHES = 20  # of each
MAX_BATCH = 64  # commands in one message, as the gateway sends them
STUCK_S = 30.0  # time limit for the next answer
PROMPT_TOKENS, MAX_TOKENS = 1300, 200


def scheduler_token() -> str:
    return call_token(derive_node_key(bytes.fromhex(CLUSTER_KEY), SCHEDULER_NODE), Caller.GATEWAY)


class Placed(NamedTuple):
    """A placed admission; times are seconds of the machine's monotonic clock."""

    pack_id: str
    sent_at: float
    placed_at: float

    @property
    def answer_s(self) -> float:
        return self.placed_at - self.sent_at


class BenchGateway:
    """A gateway whose requests get their first token when placed and end once ``num_running`` others follow."""

    def __init__(self, call: Any, fleet: Fleet, num_running: int) -> None:
        self._call = call
        self._versions = fleet.versions()
        self._num_running = num_running
        self._running: deque[types_pb2.AttemptKey] = deque()
        self._unsent: deque[pb.AdmitCommand] = deque()
        self._filled = asyncio.Event()
        self._answered = asyncio.Event()
        self._sent: dict[str, tuple[str, float]] = {}  # pack and time, by request
        self._num_sent = 0
        self.num_placed = self.num_refused = 0
        self.placed: list[Placed] = []

    def admit(self, model: int | None = None) -> None:
        """Admits a request of ``model``, by default of the next model."""
        number = self._num_sent
        self._num_sent += 1
        version = self._versions[number % len(self._versions) if model is None else model]
        prompt = number // len(self._versions) % NUM_PROMPTS
        request = pb.AdmitRequest(
            key=types_pb2.AttemptKey(request_id=f"req-{number}", attempt=1),
            version=version,
            num_prompt_tokens=PROMPT_TOKENS,
            max_tokens=MAX_TOKENS,
            num_choices=1,
            block_hashes=[prompt.to_bytes(8, "big") + block.to_bytes(8, "big") for block in range(NUM_HASHES)],
        )
        self._sent[request.key.request_id] = version.pack_id, time.monotonic()
        self._send(pb.AdmitCommand(admit=request))

    async def fill(self, num_waiting: int, seconds: float) -> None:
        """Keeps ``num_waiting`` requests without an answer."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            while len(self._sent) < num_waiting:
                self.admit()
            await self._next_answer()

    async def drain(self) -> None:
        """Waits for all answers and ends all requests; the answer to another request shows that this has arrived."""
        while self._sent:
            await self._next_answer()
        while self._running:
            self._release()
        self.admit()
        while self._sent:
            await self._next_answer()

    async def _next_answer(self) -> None:
        self._answered.clear()
        async with asyncio.timeout(STUCK_S):
            await self._answered.wait()

    async def pace(self, per_s: float, seconds: float) -> None:
        """Admits at an even rate, in groups every ``EVERY_S``."""
        begin, num = time.monotonic(), 0
        while (elapsed := time.monotonic() - begin) < seconds:
            while num < elapsed * per_s:
                self.admit()
                num += 1
            await asyncio.sleep(EVERY_S)

    def _release(self) -> None:
        self._send(
            pb.AdmitCommand(release=pb.Release(key=self._running.popleft(), ttft_s=0.1, num_output_tokens=100)), EVERY_S
        )

    def _send(self, command: pb.AdmitCommand, within_s: float = 0.0) -> None:
        self._unsent.append(command)
        if within_s:
            asyncio.get_running_loop().call_later(within_s, self._filled.set)
        else:
            self._filled.set()

    async def write(self) -> None:
        pace = MessagePace()
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._unsent:
                if len(self._unsent) < MAX_BATCH:
                    await pace.wait()
                num_commands = min(len(self._unsent), MAX_BATCH)
                commands = [self._unsent.popleft() for _ in range(num_commands)]
                await self._call.write(pb.AdmitCommands(commands=commands))

    async def read(self) -> None:
        async for event in (event async for batch in self._call for event in batch.events):
            kind = event.WhichOneof("event")
            if kind == "placement":
                self._placed(event.placement)
            elif kind == "refusal":
                self.num_refused += 1
                self._sent.pop(event.refusal.key.request_id, None)
                self._answered.set()

    def _placed(self, placement: pb.Placement) -> None:
        self.num_placed += 1
        self.placed.append(Placed(*self._sent.pop(placement.key.request_id), time.monotonic()))
        self._answered.set()
        self._send(pb.AdmitCommand(first_token=pb.FirstToken(key=placement.key)), EVERY_S)
        self._running.append(placement.key)
        if len(self._running) > self._num_running:
            self._release()


@asynccontextmanager
async def bench_gateway(address: str, fleet: Fleet, num_running: int) -> AsyncIterator[BenchGateway]:
    async with open_channel(address, token=scheduler_token()) as channel:
        call: Any = scheduler_pb2_grpc.SchedulerStub(channel).Admit()
        await call.wait_for_connection()
        hello = pb.AdmitCommand(hello=pb.AdmitHello(gateway_id="bench"))
        await call.write(pb.AdmitCommands(commands=[hello]))
        gateway = BenchGateway(call, fleet, num_running)
        tasks = [asyncio.create_task(gateway.read()), asyncio.create_task(gateway.write())]
        try:
            yield gateway
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()
