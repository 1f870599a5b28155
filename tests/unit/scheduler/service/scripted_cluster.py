"""A gateway's client, and a cluster of scripted hosts: gRPC servers that obey and report, without weights or tokens."""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Self

from nats.aio.client import Client

from tests.support.callers import every_token
from tests.support.wait import HANG_S
from torchrelay.common.errors import Conflict, StaleEpoch, TorchrelayError
from torchrelay.common.identity.callers import SCHEDULER_NODE
from torchrelay.common.identity.tls import Tls
from torchrelay.common.ids import new_id
from torchrelay.common.net.load_reports import MAC_HEADER, report_mac
from torchrelay.common.net.nats_client import Subjects
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.server import RpcServer
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
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.settings import SchedulerSettings
from torchrelay.transfer.protocol.tickets import derive_node_key

CLUSTER_KEY = "00112233445566778899aabbccddeeff"
MB = 1 << 20
PACK_BYTES = 32 * MB
NUM_LAYERS = 4


class ReportingPeer(abc.ABC):
    """A server whose report goes out on NATS ten times a second and on a Watch stream at every change."""

    def __init__(self, nats: Client, subject: str, host_id: str) -> None:
        self._nats, self._subject, self.host_id = nats, subject, host_id
        self.node_id = subject.rpartition(".")[2]
        self._node_key = derive_node_key(bytes.fromhex(CLUSTER_KEY), self.node_id)
        self.server = RpcServer("127.0.0.1")
        self.address = f"127.0.0.1:{self.server.port}"
        self.incarnation = new_id("run")
        self.epoch = 0
        self._version = 0
        self._is_leaving = False
        self.is_hung = False  # it keeps its connections and says nothing
        self.num_watches = 0
        self.num_open_calls = 0  # loads or relays without an answer, until their deadline
        self.answers = asyncio.Event()  # cleared: loads and relays get no answer
        self.answers.set()
        self.refusal: TorchrelayError | None = None  # of loads and relays
        self.is_passed_on_by_broker = True  # cleared: the broker passes nothing on
        self._changed = asyncio.Condition()
        self._publishing: asyncio.Task[None] | None = None

    @abc.abstractmethod
    def report(self) -> Any:
        """The present report of the peer."""

    @abc.abstractmethod
    def beat(self) -> Any:
        """A sign of life."""

    def check_epoch(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise StaleEpoch(f"epoch {epoch} is over")
        self.epoch = epoch

    async def answer(self) -> None:
        """Waits until loads and relays get answers, and raises their refusal if there is one."""
        self.num_open_calls += 1
        try:
            await self.answers.wait()
        finally:
            self.num_open_calls -= 1
        if self.refusal is not None:
            raise self.refusal

    async def touch(self) -> None:
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def watch(self, request: Any) -> AsyncIterator[Any]:
        self.num_watches += 1
        epoch: int = request.epoch
        self.epoch, seen, has_told = max(self.epoch, epoch), -1, False
        while True:
            async with self._changed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(request.beat_every_s):
                        while seen == self._version or self.is_hung:
                            await self._changed.wait()
                has_changed, seen = seen != self._version, self._version
                if self._is_leaving:
                    return
            if not self.is_hung:
                if has_told:
                    self.check_epoch(epoch)
                has_told = epoch < self.epoch
                yield self.report() if has_changed else self.beat()

    async def _publish(self) -> None:
        while True:
            if self.is_passed_on_by_broker and not self.is_hung:
                payload = self.report().SerializeToString()
                mac = report_mac(self._node_key, self._subject, payload)
                await self._nats.publish(self._subject, payload, headers={MAC_HEADER: mac})
            await asyncio.sleep(0.1)

    async def __aenter__(self) -> Self:
        await self.server.start()
        self._publishing = asyncio.create_task(self._publish())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.kill()

    @property
    def is_running(self) -> bool:
        return self._publishing is not None

    async def wake(self) -> None:
        """Goes on after it hung."""
        self.is_hung = False
        await self.touch()

    async def leave(self) -> None:
        """Begins to end as a process does that is told to: it ends its streams, and still reports for a moment."""
        self._is_leaving = True
        await self.touch()

    async def kill(self) -> None:
        """Ends as a killed process does: no goodbye, nobody listens any more."""
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.wait((self._publishing,))
            self._publishing = None
            await self.server.server.stop(None)


_ROLES = [types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE]


class ScriptedWorker(ReportingPeer, worker_pb2_grpc.WorkerServicer):
    def __init__(self, nats: Client, subjects: Subjects, worker_id: str, host_id: str) -> None:
        super().__init__(nats, subjects.worker_load(worker_id), host_id)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self.server.server)
        self.worker_id, self.prefers_decode = worker_id, worker_id.endswith("b")
        self.slot = reports_pb2.SlotState(state=reports_pb2.SlotState.STATE_FREE)
        self.loads: list[worker_pb2.LoadRequest] = []
        self.role_changes: list[worker_pb2.SetRolesRequest] = []
        self.unloads: list[worker_pb2.UnloadRequest] = []
        self.engine = types_pb2.EngineProgress()
        self.profile: reports_pb2.EngineProfile | None = None

    def report(self) -> reports_pb2.WorkerReport:
        return reports_pb2.WorkerReport(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            host_id=self.host_id,
            grpc_address=self.address,
            data_address=f"{self.worker_id}:9",
            roles=_ROLES[::-1] if self.prefers_decode else _ROLES,
            epoch=self.epoch,
            slot=self.slot,
            kv_pool_bytes=64 * MB,
            kv_free_bytes=64 * MB,
            engine=self.engine,
            profile=self.profile,
        )

    def beat(self) -> reports_pb2.WorkerReport:
        return reports_pb2.WorkerReport(
            worker_id=self.worker_id, incarnation=self.incarnation, epoch=self.epoch, is_beat=True, engine=self.engine
        )

    async def Load(self, request: worker_pb2.LoadRequest, context: Any) -> worker_pb2.LoadReply:
        self.check_epoch(request.epoch)
        self.loads.append(request)
        await self.answer()
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

    def WatchSlot(self, request: worker_pb2.WatchSlotRequest, context: Any) -> AsyncIterator[Any]:
        return self.watch(request)


class ScriptedStore(ReportingPeer, param_store_pb2_grpc.ParamStoreServicer):
    """Uploads are not its concern; gRPC answers UNIMPLEMENTED for them."""

    def __init__(self, nats: Client, subjects: Subjects, store_id: str, host_id: str) -> None:
        super().__init__(nats, subjects.store_load(store_id), host_id)
        param_store_pb2_grpc.add_ParamStoreServicer_to_server(self, self.server.server)
        self.store_id = store_id
        self.relays: list[param_store_pb2.RelayRequest] = []
        self.retains: list[param_store_pb2.RetainRequest] = []
        self.copies: dict[str, reports_pb2.PackCopy] = {}
        self.nic: reports_pb2.NicCounters | None = None

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
            nic=self.nic,
        )

    def beat(self) -> reports_pb2.StoreReport:
        return reports_pb2.StoreReport(
            store_id=self.store_id, incarnation=self.incarnation, epoch=self.epoch, is_beat=True
        )

    async def Relay(self, request: param_store_pb2.RelayRequest, context: Any) -> param_store_pb2.RelayReply:
        self.check_epoch(request.epoch)
        self.relays.append(request)
        await self.answer()
        if request.pack_id in self.copies:
            return param_store_pb2.RelayReply(already_complete=True)
        self.copies[request.pack_id] = reports_pb2.PackCopy(
            pack_id=request.pack_id, pack_bytes=PACK_BYTES, num_chunks=8, source=request.sources[0].holder_id
        )
        await self.touch()
        return param_store_pb2.RelayReply()

    async def Retain(self, request: param_store_pb2.RetainRequest, context: Any) -> param_store_pb2.RetainReply:
        self.check_epoch(request.epoch)
        self.retains.append(request)
        return param_store_pb2.RetainReply()

    async def finish_relay(self, pack_id: str, begin_unix_us: int) -> None:
        copy = self.copies[pack_id]
        copy.num_chunks_verified = copy.num_chunks
        copy.relay_begin_unix_us = begin_unix_us
        copy.relay_first_unix_us = begin_unix_us + 1_500
        copy.relay_end_unix_us = begin_unix_us + 9_000
        await self.touch()

    def WatchCopies(self, request: param_store_pb2.WatchCopiesRequest, context: Any) -> AsyncIterator[Any]:
        return self.watch(request)


SCHEDULER_TOKEN = every_token(bytes.fromhex(CLUSTER_KEY), SCHEDULER_NODE)


class GatewayClient:
    """A gateway's side of the Admit stream."""

    def __init__(self, address: str, gateway_id: str = "gateway-1", tls: Tls | None = None) -> None:
        self._channel = open_channel(address, tls, SCHEDULER_TOKEN)
        self.stub = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self._gateway_id = gateway_id
        self._call: Any = None
        self._events: deque[scheduler_pb2.AdmitEvent] = deque()
        self.loading: list[scheduler_pb2.Loading] = []  # as told so far

    async def __aenter__(self) -> Self:
        self._call = self.stub.Admit()
        await asyncio.wait_for(self._call.wait_for_connection(), HANG_S)
        await self.send(hello=scheduler_pb2.AdmitHello(gateway_id=self._gateway_id))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._call.cancel()
        await self._channel.close()

    async def send(self, **command: Any) -> None:
        commands = [scheduler_pb2.AdmitCommand(**command)]
        await self._call.write(scheduler_pb2.AdmitCommands(commands=commands))

    def history(self, *kinds: str) -> Any:
        """A call whose replies are the events of these kinds, past and new; of all kinds if none is named."""
        return self.stub.WatchEvents(scheduler_pb2.WatchEventsRequest(kinds=kinds, since_unix_us=1, follow=True))

    async def event(self) -> scheduler_pb2.AdmitEvent:
        """The next event other than what is told about loads."""
        async with asyncio.timeout(HANG_S):
            while not self._events:
                batch = await self._call.read()
                assert isinstance(batch, scheduler_pb2.AdmitEvents), "the stream ended"
                self.loading += [event.loading for event in batch.events if event.HasField("loading")]
                self._events.extend(event for event in batch.events if not event.HasField("loading"))
        return self._events.popleft()

    async def admit(self, request_id: str, attempt: int = 1, **changes: Any) -> None:
        await self.send(admit=a_request(request_id, attempt, **changes))

    async def placement(self) -> scheduler_pb2.Placement:
        """The next answer, which must be a placement."""
        event = await self.event()
        assert event.HasField("placement"), event
        return event.placement

    async def place(self, request_id: str, attempt: int = 1, **changes: Any) -> scheduler_pb2.Placement:
        """Admits a request, and returns its placement."""
        await self.admit(request_id, attempt, **changes)
        return await self.placement()


def a_version(name: str = "acme/tiny", idle_timeout_s: float = 0.0) -> types_pb2.ModelVersion:
    return types_pb2.ModelVersion(
        version_id=f"version of {name}",
        model=name,
        tenant_id="acme",
        pack_id=f"pack of {name}",
        pack_bytes=PACK_BYTES,
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


class ScriptedSettings(SchedulerSettings):
    """With parameters of the policy that no operator sets. Tests know all peers before they ask for a load, so that it
    needs no time in which reports arrive.
    """

    settle_s: float = 0.0
    unserved_s: float = PolicyConfig.unserved_s


class ScriptedCluster:
    """A NATS prefix with scripted peers, and schedulers started on it."""

    def __init__(self, nats_url: str, nats: Client, stack: AsyncExitStack) -> None:
        self.prefix = new_id("t")
        self.subjects = Subjects(self.prefix)
        self.nats = nats
        self._nats_url, self._stack = nats_url, stack
        self._peers: list[ReportingPeer] = []

    async def host(self, number: int) -> tuple[ScriptedStore, ScriptedWorker, ScriptedWorker]:
        """A host with a store and two workers that can play both roles; the second prefers decode."""
        host_id = f"host-{number}"
        store = ScriptedStore(self.nats, self.subjects, f"store-{number}", host_id)  # type: ignore[abstract]
        workers = [ScriptedWorker(self.nats, self.subjects, f"w-{number}{letter}", host_id) for letter in "ab"]
        for peer in (store, *workers):
            self._peers.append(await self._stack.enter_async_context(peer))
        return store, workers[0], workers[1]

    def settings(self, **changes: Any) -> SchedulerSettings:
        fields = {"nats_url": self._nats_url, "nats_prefix": self.prefix, "cluster_key": CLUSTER_KEY}
        return ScriptedSettings(**(fields | changes))

    @asynccontextmanager
    async def scheduler(self, tls: Tls | None = None, **changes: Any) -> AsyncIterator[str]:
        """A running scheduler's address, once it knows all peers. ``tls``: the identity of a caller."""
        num_peers = sum(peer.is_running for peer in self._peers)
        async with serving(self.settings(**changes)) as addresses:
            await cluster(addresses["grpc"], lambda view: len(view.workers) + len(view.stores) >= num_peers, tls=tls)
            yield addresses["grpc"]


async def cluster(
    address: str, until: Callable[[scheduler_pb2.ClusterView], bool], timeout_s: float = HANG_S, tls: Tls | None = None
) -> scheduler_pb2.ClusterView:
    """The first view of the cluster that fulfils ``until``."""
    async with asyncio.timeout(timeout_s), open_channel(address, tls, SCHEDULER_TOKEN) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        call: Any = stub.WatchCluster(scheduler_pb2.WatchClusterRequest())
        async for view in call:
            if until(view):
                call.cancel()
                assert isinstance(view, scheduler_pb2.ClusterView)
                return view
    raise AssertionError("the stream of views ended")
