"""Workers and stores as real gRPC servers that do what they are told and report it, without weights or tokens."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self

from nats.aio.client import Client

from torchrelay.common.errors import Conflict, StaleEpoch, TorchrelayError
from torchrelay.common.events import Subjects, connect
from torchrelay.common.ids import new_id
from torchrelay.common.rpc import RpcServer, open_channel
from torchrelay.control.v1 import (
    param_store_pb2,
    param_store_pb2_grpc,
    reports_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from torchrelay.scheduler.main import serving
from torchrelay.scheduler.settings import SchedulerSettings

CLUSTER_KEY = "00112233445566778899aabbccddeeff"
MB = 1 << 20
NUM_LAYERS = 4


class Reporting(abc.ABC):
    """A server whose report goes out on NATS ten times a second and on a Watch stream at every change."""

    def __init__(self, nats: Client, subject: str) -> None:
        self._nats, self._subject = nats, subject
        self.server = RpcServer("127.0.0.1")
        self.address = f"127.0.0.1:{self.server.port}"
        self.epoch = 0
        self._version = 0
        self._changed = asyncio.Condition()
        self._publishing: asyncio.Task[None] | None = None

    @abc.abstractmethod
    def report(self) -> Any:
        """What it says of itself now."""

    def check_epoch(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise StaleEpoch(f"epoch {epoch} is over")
        self.epoch = epoch

    async def touch(self) -> None:
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def watch(self) -> AsyncIterator[Any]:
        seen = -1
        while True:
            async with self._changed:
                while seen == self._version:
                    await self._changed.wait()
                seen = self._version
            yield self.report()

    async def _publish(self) -> None:
        while True:
            await self._nats.publish(self._subject, self.report().SerializeToString())
            await asyncio.sleep(0.1)

    async def __aenter__(self) -> Self:
        await self.server.start()
        self._publishing = asyncio.create_task(self._publish())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Ends as a killed process does: no goodbye, nobody listens any more."""
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.wait((self._publishing,))
            self._publishing = None
            await self.server.server.stop(None)


class ScriptedWorker(Reporting, worker_pb2_grpc.WorkerServicer):
    def __init__(self, nats: Client, subjects: Subjects, worker_id: str, host_id: str) -> None:
        super().__init__(nats, subjects.worker_load(worker_id))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self.server.server)
        self.worker_id, self.host_id = worker_id, host_id
        self.incarnation = new_id("run")
        self.slot = reports_pb2.SlotState(state=reports_pb2.SlotState.STATE_FREE)
        self.loads: list[worker_pb2.LoadRequest] = []
        self.role_changes: list[worker_pb2.SetRolesRequest] = []
        self.unloads: list[worker_pb2.UnloadRequest] = []
        self.refusal: TorchrelayError | None = None

    def report(self) -> reports_pb2.WorkerReport:
        return reports_pb2.WorkerReport(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            host_id=self.host_id,
            grpc_address=self.address,
            data_address=f"{self.worker_id}:9",
            roles=[types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE],
            epoch=self.epoch,
            slot=self.slot,
            kv_pool_bytes=64 * MB,
            kv_free_bytes=64 * MB,
        )

    async def Load(self, request: worker_pb2.LoadRequest, context: Any) -> worker_pb2.LoadReply:
        self.check_epoch(request.epoch)
        self.loads.append(request)
        if self.refusal is not None:
            raise self.refusal
        version = request.version
        self.slot = reports_pb2.SlotState(
            state=reports_pb2.SlotState.STATE_LOADING,
            instance_id=request.instance_id,
            model=version.model,
            version_id=version.version_id,
            pack_id=version.pack_id,
            roles=request.roles,
            num_layers=NUM_LAYERS,
        )
        await self.touch()
        return worker_pb2.LoadReply()

    async def finish_load(self) -> None:
        self.slot.state = reports_pb2.SlotState.STATE_READY
        self.slot.num_layers_ready = NUM_LAYERS
        begin_us = 1_000_000 * 60
        for number, name in enumerate(("hold", "map")):
            self.slot.load_phases.add(name=name, begin_unix_us=begin_us + number, end_unix_us=begin_us + number + 1)
        await self.touch()

    async def fail_load(self, error: str) -> None:
        self.slot = reports_pb2.SlotState(state=reports_pb2.SlotState.STATE_FREE, error=error)
        await self.touch()

    async def SetRoles(self, request: worker_pb2.SetRolesRequest, context: Any) -> worker_pb2.SetRolesReply:
        self.check_epoch(request.epoch)
        self.role_changes.append(request)
        del self.slot.roles[:]
        self.slot.roles.extend(request.roles)
        await self.touch()
        return worker_pb2.SetRolesReply()

    async def Unload(self, request: worker_pb2.UnloadRequest, context: Any) -> worker_pb2.UnloadReply:
        self.check_epoch(request.epoch)
        self.unloads.append(request)
        if self.slot.instance_id != request.instance_id:
            raise Conflict("another instance is here")
        self.slot = reports_pb2.SlotState(state=reports_pb2.SlotState.STATE_FREE)
        await self.touch()
        return worker_pb2.UnloadReply()

    async def WatchSlot(
        self, request: worker_pb2.WatchSlotRequest, context: Any
    ) -> AsyncIterator[reports_pb2.WorkerReport]:
        async for report in self.watch():
            yield report


class ScriptedStore(Reporting, param_store_pb2_grpc.ParamStoreServicer):
    """Uploads are not its concern; gRPC answers UNIMPLEMENTED for them."""

    def __init__(self, nats: Client, subjects: Subjects, store_id: str, host_id: str) -> None:
        super().__init__(nats, subjects.store_load(store_id))
        param_store_pb2_grpc.add_ParamStoreServicer_to_server(self, self.server.server)
        self.store_id, self.host_id = store_id, host_id
        self.incarnation = new_id("run")
        self.relays: list[param_store_pb2.RelayRequest] = []
        self.copies: dict[str, reports_pb2.PackCopy] = {}
        self.answers = asyncio.Event()  # cleared: commands get no answer
        self.answers.set()

    def report(self) -> reports_pb2.StoreReport:
        return reports_pb2.StoreReport(
            store_id=self.store_id,
            incarnation=self.incarnation,
            host_id=self.host_id,
            grpc_address=self.address,
            data_address=f"{self.store_id}:9",
            epoch=self.epoch,
            arena_target_bytes=1024 * MB,
            copies=self.copies.values(),
        )

    async def Relay(self, request: param_store_pb2.RelayRequest, context: Any) -> param_store_pb2.RelayReply:
        self.check_epoch(request.epoch)
        self.relays.append(request)
        await self.answers.wait()
        if request.pack_id in self.copies:
            return param_store_pb2.RelayReply(already_complete=True)
        self.copies[request.pack_id] = reports_pb2.PackCopy(
            pack_id=request.pack_id, pack_bytes=request.pack_bytes, num_chunks=8, source=request.sources[0].holder_id
        )
        await self.touch()
        return param_store_pb2.RelayReply()

    async def finish_relay(self, pack_id: str, begin_unix_us: int) -> None:
        copy = self.copies[pack_id]
        copy.num_chunks_verified = copy.num_chunks
        copy.relay_begin_unix_us = begin_unix_us
        copy.relay_first_unix_us = begin_unix_us + 1_500
        copy.relay_end_unix_us = begin_unix_us + 9_000
        await self.touch()

    async def WatchCopies(
        self, request: param_store_pb2.WatchCopiesRequest, context: Any
    ) -> AsyncIterator[reports_pb2.StoreReport]:
        async for report in self.watch():
            yield report


class Door:
    """A gateway's side of the Admit stream."""

    def __init__(self, address: str, gateway_id: str = "gateway-1") -> None:
        self._channel = open_channel(address)
        self.stub = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self._gateway_id = gateway_id
        self._call: Any = None

    async def __aenter__(self) -> Self:
        self._call = self.stub.Admit()
        await asyncio.wait_for(self._call.wait_for_connection(), 5)
        await self.send(hello=scheduler_pb2.Hello(gateway_id=self._gateway_id))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()
        await self._channel.close()

    async def send(self, **command: Any) -> None:
        await self._call.write(scheduler_pb2.AdmitCommand(**command))

    async def event(self, timeout_s: float = 5.0) -> scheduler_pb2.AdmitEvent:
        async with asyncio.timeout(timeout_s):
            event = await self._call.read()
        assert isinstance(event, scheduler_pb2.AdmitEvent), "the stream ended"
        return event

    async def admit(self, request_id: str, attempt: int = 1, **changes: Any) -> None:
        await self.send(admit=a_request(request_id, attempt, **changes))

    async def placement(self, timeout_s: float = 5.0) -> scheduler_pb2.Placement:
        """The next placement; word of waiting is passed over."""
        while True:
            event = await self.event(timeout_s)
            if not event.HasField("waiting"):
                assert event.HasField("placement"), event
                return event.placement


def a_version(name: str = "acme/tiny", idle_timeout_s: float = 0.0) -> types_pb2.ModelVersion:
    return types_pb2.ModelVersion(
        version_id=f"version of {name}",
        model=name,
        tenant_id="acme",
        pack_id=f"pack of {name}",
        pack_bytes=32 * MB,
        shape=types_pb2.ModelShape(num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=16, kv_dtype_bytes=4),
        scaling=types_pb2.ScalingSettings(idle_timeout_s=idle_timeout_s),
    )


def a_request(request_id: str, attempt: int = 1, **changes: Any) -> scheduler_pb2.AdmitRequest:
    fields: dict[str, Any] = {
        "key": types_pb2.AttemptKey(request_id=request_id, attempt=attempt),
        "version": a_version(),
        "num_prompt_tokens": 20,
        "max_tokens": 30,
        "num_choices": 1,
    }
    return scheduler_pb2.AdmitRequest(**(fields | changes))


class House:
    """One NATS prefix with scripted peers, and schedulers started on it."""

    def __init__(self, nats_url: str, nats: Client, stack: AsyncExitStack) -> None:
        self.prefix = new_id("t")
        self.subjects = Subjects(self.prefix)
        self.nats = nats
        self._nats_url, self._stack = nats_url, stack

    async def host(self, number: int) -> tuple[ScriptedStore, ScriptedWorker, ScriptedWorker]:
        """A host with a store and two workers that can play both roles."""
        host_id = f"host-{number}"
        store = ScriptedStore(self.nats, self.subjects, f"store-{number}", host_id)  # type: ignore[abstract]
        workers = [ScriptedWorker(self.nats, self.subjects, f"w-{number}{letter}", host_id) for letter in "ab"]
        for peer in (store, *workers):
            await self._stack.enter_async_context(peer)
        return store, workers[0], workers[1]

    def settings(self, **changes: Any) -> SchedulerSettings:
        fields = {"nats_url": self._nats_url, "nats_prefix": self.prefix, "cluster_key": CLUSTER_KEY}
        return SchedulerSettings(**(fields | changes))

    @asynccontextmanager
    async def scheduler(self, num_workers: int = 0, **changes: Any) -> AsyncIterator[str]:
        """A running scheduler's address, once it has heard of ``num_workers`` workers."""
        async with serving(self.settings(**changes)) as addresses:
            await cluster(addresses["grpc"], lambda view: len(view.workers) >= num_workers)
            yield addresses["grpc"]


@asynccontextmanager
async def house(nats_url: str) -> AsyncIterator[House]:
    nats = await connect(nats_url, "scripted")
    try:
        async with AsyncExitStack() as stack:
            yield House(nats_url, nats, stack)
    finally:
        await nats.close()


async def cluster(
    address: str, until: Callable[[scheduler_pb2.ClusterView], bool], timeout_s: float = 5.0
) -> scheduler_pb2.ClusterView:
    """The first view of the cluster that fulfils ``until``."""
    async with asyncio.timeout(timeout_s), open_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        call: Any = stub.WatchCluster(scheduler_pb2.WatchClusterRequest())
        async for view in call:
            if until(view):
                call.cancel()
                assert isinstance(view, scheduler_pb2.ClusterView)
                return view
    raise AssertionError("the stream of views ended")


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Waits for something that no stream tells of."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
