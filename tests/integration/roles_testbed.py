"""Two workers, a real param-store and a gateway's streams in one process, for tests of the roles."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.callers import every_token
from tests.support.wait import HANG_S, eventually
from tests.unit.param_store.running_store import CLUSTER_KEY, OFFICE, REMOTE, RunningStore, running_store
from torchrelay.common.ids import new_id
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import param_store_pb2, types_pb2, worker_pb2
from torchrelay.control.v1.decode_pb2_grpc import DecodeStub
from torchrelay.control.v1.prefill_pb2_grpc import PrefillStub
from torchrelay.control.v1.worker_pb2_grpc import WorkerStub
from torchrelay.transfer.protocol.tickets import derive_node_key
from torchrelay.worker.main import running_worker
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.slot.slot import FREE, READY
from torchrelay.worker.worker import Worker

PREFILL, DECODE = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE
Key = tuple[str, int]


class GatewayStream:
    """A gateway's ``Run`` stream to a role of a worker, and all that came back on it."""

    def __init__(self, stub: Any, gateway_id: str) -> None:
        self.outputs: dict[Key, list[pb.ChoiceOutput]] = defaultdict(list)
        self._call = stub.Run()
        self._gateway_id = gateway_id
        self._reading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        await self._call.write(pb.RunCommand(hello=pb.RunHello(gateway_id=self._gateway_id)))
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for step in self._call:
            for output in step.outputs:
                self.outputs[output.key.request_id, output.choice].append(output)

    async def send(self, start: pb.AttemptStart) -> None:
        await self._call.write(pb.RunCommand(start=start))

    async def cancel(self, key: types_pb2.AttemptKey) -> None:
        await self._call.write(pb.RunCommand(cancel=pb.CancelAttempt(key=key)))

    async def recall(self, key: types_pb2.AttemptKey) -> None:
        await self._call.write(pb.RunCommand(recall=pb.RecallAttempt(key=key)))

    async def close(self) -> None:
        self._call.cancel()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)


@dataclass(eq=False)
class RunningWorker:
    worker: Worker
    address: str
    instance_id: str = field(default_factory=lambda: new_id("ins"))
    _streams: list[GatewayStream] = field(default_factory=list)

    @property
    def token(self) -> str:
        return every_token(CLUSTER_KEY, self.worker.settings.worker_id)

    async def stream(self, role: types_pb2.Role.ValueType, gateway_id: str = "gw-1") -> GatewayStream:
        channel = open_channel(self.address, token=self.token)
        stream = GatewayStream((PrefillStub if role == PREFILL else DecodeStub)(channel), gateway_id)
        await stream.open()
        self._streams.append(stream)
        return stream

    async def load(self, version: types_pb2.ModelVersion, roles: Sequence[types_pb2.Role.ValueType]) -> None:
        async with open_channel(self.address, token=self.token) as channel:
            request = worker_pb2.LoadRequest(epoch=1, instance_id=self.instance_id, version=version, roles=roles)
            await WorkerStub(channel).Load(request)

    async def set_roles(self, *roles: types_pb2.Role.ValueType) -> None:
        async with open_channel(self.address, token=self.token) as channel:
            request = worker_pb2.SetRolesRequest(epoch=1, instance_id=self.instance_id, roles=roles)
            await WorkerStub(channel).SetRoles(request)

    async def unload(self, drain_s: float = 0.0) -> None:
        async with open_channel(self.address, token=self.token) as channel:
            request = worker_pb2.UnloadRequest(epoch=1, instance_id=self.instance_id, drain_s=drain_s)
            await WorkerStub(channel).Unload(request)

    async def until_ready(self) -> None:
        await eventually(lambda: self.worker.slot.state == READY)

    async def until_free(self) -> None:
        await eventually(lambda: self.worker.slot.state == FREE)

    async def assert_idle(self) -> None:
        """Every page is free, and nothing of any attempt is left in the process."""
        worker = self.worker
        await eventually(lambda: not any(len(role.attempts) for role in worker.roles), "the end of all attempts")

        def check() -> tuple[int, int, bool]:
            instance = worker.engine.instance
            assert instance is not None
            instance.check_integrity()
            return instance.num_free_pages, instance.num_pages, instance.has_work()

        async with asyncio.timeout(HANG_S):
            while True:
                free, total, has_work = await worker.engine.call(check)
                if free == total and not has_work:
                    break
                await asyncio.sleep(0.02)
        await eventually(lambda: not worker.buffers, "the release of all KV buffers")
        await eventually(lambda: not worker.usage.num_open, "the end of all usage registers")
        for role in worker.roles:
            await eventually(lambda role=role: not role.num_kv_transfers, "the end of all KV transfers")  # type: ignore[misc]
            # An offer for an attempt that its gateway never starts here waits its full time.
            await eventually(lambda role=role: not role.num_awaited_starts, "the end of all offers")  # type: ignore[misc]

    async def close(self) -> None:
        for stream in self._streams:
            await stream.close()


@contextmanager
def paused(worker: RunningWorker) -> Iterator[Callable[[], None]]:
    """Makes the engine take no step until the block ends, or the yielded function is called."""
    may_go_on = threading.Event()
    worker.worker.engine.post(lambda: may_go_on.wait(HANG_S))
    try:
        yield may_go_on.set
    finally:
        may_go_on.set()


@asynccontextmanager
async def running_test_worker(nats_url: str, store: RunningStore, **changes: Any) -> AsyncIterator[RunningWorker]:
    worker_id = new_id("wrk")
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "node_key": derive_node_key(CLUSTER_KEY, worker_id).hex(),
        "store_address": (await store.report()).grpc_address,
        "store_token": every_token(CLUSTER_KEY, store.store_id),
        "nats_url": nats_url,
        "nats_prefix": new_id("roles"),
        "kv_pool_bytes": 4 << 20,
        "threads": 1,
        "token_budget": 48,
        "kv_block_tokens": 32,
        **changes,
    }
    async with running_worker(WorkerSettings(**values)) as (worker, addresses):
        running = RunningWorker(worker, addresses["grpc"])
        try:
            yield running
        finally:
            await running.close()


def model_version(description: param_store_pb2.VersionDescription) -> types_pb2.ModelVersion:
    return types_pb2.ModelVersion(
        version_id=description.version_id,
        model="acme/tiny",
        pack_id=description.pack_id,
        pack_bytes=description.pack_bytes,
        shape=description.shape,
        tokenizer_digest=description.file_digests["tokenizer.json"],
    )


@dataclass
class Request:
    """An attempt, and what came back of it from both streams."""

    start: pb.AttemptStart
    streams: tuple[GatewayStream, GatewayStream]  # prefill, decode

    def outputs(self, choice: int = 0) -> list[pb.ChoiceOutput]:
        key = (self.start.key.request_id, choice)
        return [output for stream in self.streams for output in stream.outputs[key]]

    def tokens(self, choice: int = 0) -> list[int]:
        """In order of position; no position may come twice or be left out."""
        placed = [(o.first_position, o.token_ids[0]) for o in self.outputs(choice) if o.token_ids]
        placed.sort()
        first = next(len(spec.forced_output) for spec in self.start.choices if spec.choice == choice)
        assert [position for position, _ in placed] == list(range(first, first + len(placed)))
        return [token for _, token in placed]

    def finish(self, choice: int = 0) -> int:
        """The reason, once there is one; 0 before."""
        return next((o.finish_reason for o in self.outputs(choice) if o.finish_reason), 0)

    def error(self, choice: int = 0) -> pb.RunError:
        return next(o.error for o in self.outputs(choice) if o.finish_reason == pb.FINISH_REASON_ERROR)

    async def finished(self) -> None:
        choices = [spec.choice for spec in self.start.choices]
        await eventually(lambda: all(self.finish(choice) for choice in choices), "the end of all choices")

    async def cancel(self) -> None:
        for stream in self.streams[::-1]:
            await stream.cancel(self.start.key)

    async def recall(self) -> None:
        for stream in self.streams[::-1]:
            await stream.recall(self.start.key)


class RolesTestbed:
    """A prefill and a decode worker (or one that is both) hosting one model."""

    def __init__(self, prefill: RunningWorker, decode: RunningWorker, version: types_pb2.ModelVersion) -> None:
        self.prefill, self.decode, self.version = prefill, decode, version
        self.streams: tuple[GatewayStream, GatewayStream]

    async def connect(self, gateway_id: str = "gw-1") -> tuple[GatewayStream, GatewayStream]:
        return await self.prefill.stream(PREFILL, gateway_id), await self.decode.stream(DECODE, gateway_id)

    def request(
        self,
        prompt: Sequence[int],
        *,
        num_choices: int = 1,
        forced: Sequence[int] = (),
        streams: tuple[GatewayStream, GatewayStream] | None = None,
        deadline_unix_ms: int = 0,
        **sampling: Any,
    ) -> Request:
        start = pb.AttemptStart(
            key=types_pb2.AttemptKey(request_id=new_id("req"), attempt=1),
            num_prompt_tokens=len(prompt),
            prompt=prompt,
            sampling=pb.Sampling(**{"temperature": 0.0, "max_tokens": 24, "top_p": 1.0, **sampling}),
            choices=[pb.ChoiceStart(choice=choice, forced_output=forced) for choice in range(num_choices)],
            deadline_unix_ms=deadline_unix_ms,
        )
        return Request(start, streams or self.streams)

    def for_prefill(self, request: Request) -> pb.AttemptStart:
        start = pb.AttemptStart()
        start.CopyFrom(request.start)
        start.instance_id = self.prefill.instance_id
        target = self.decode.worker.settings.worker_id
        start.decode.worker_id, start.decode.grpc_address = target, self.decode.address
        start.decode.instance_id = self.decode.instance_id
        start.decode.worker_token = every_token(CLUSTER_KEY, target)
        group_id = f"{start.key.request_id}/{start.key.attempt}"
        holder_id = self.prefill.worker.settings.worker_id
        start.kv_ticket.CopyFrom(OFFICE.issue(group_id, holder_id, target, int(time.time() * 1000) + 60_000))
        return start

    def for_decode(self, request: Request) -> pb.AttemptStart:
        start = pb.AttemptStart()
        start.CopyFrom(request.start)
        start.instance_id = self.decode.instance_id
        del start.prompt[:]
        return start

    async def send(self, request: Request) -> Request:
        prefill, decode = request.streams
        await decode.send(self.for_decode(request))
        await prefill.send(self.for_prefill(request))
        return request

    async def assert_idle(self) -> None:
        await self.prefill.assert_idle()
        await self.decode.assert_idle()


Make = Callable[..., AbstractAsyncContextManager[RolesTestbed]]


@asynccontextmanager
async def running_testbed(
    folder: Path,
    remote: Path,
    description: param_store_pb2.VersionDescription,
    nats_url: str,
    *,
    apart: bool = True,
    decode_pool_bytes: int = 4 << 20,
    **changes: Any,
) -> AsyncIterator[RolesTestbed]:
    """Both workers loaded and ready; the pack comes from the store's arena, the tokenizer from its remote folder."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(running_store(folder, remote_url=f"file://{remote}"))
        await store.relay(description.pack_id, REMOTE)
        prefill = await stack.enter_async_context(running_test_worker(nats_url, store, **changes))
        decode = prefill
        if apart:
            more = {**changes, "kv_pool_bytes": decode_pool_bytes}
            decode = await stack.enter_async_context(running_test_worker(nats_url, store, **more))
        scene = RolesTestbed(prefill, decode, model_version(description))
        for worker, roles in ((prefill, [PREFILL, DECODE]), (decode, [DECODE])):
            if worker.worker.slot.state == FREE:
                await worker.load(scene.version, roles)
                await worker.until_ready()
        scene.streams = await scene.connect()
        yield scene
