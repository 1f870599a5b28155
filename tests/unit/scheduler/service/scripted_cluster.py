"""A gateway's client, and a cluster of scripted hosts in which schedulers are started."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self

from nats.aio.client import Client

from tests.support.callers import every_token
from tests.support.wait import HANG_S
from tests.unit.scheduler.service.scripted_peers import CLUSTER_KEY as CLUSTER_KEY
from tests.unit.scheduler.service.scripted_peers import (
    NUM_LAYERS,
    PACK_BYTES,
    ScriptedStore,
    ScriptedWorker,
)
from torchrelay.common.identity.callers import SCHEDULER_NODE
from torchrelay.common.identity.tls import Tls
from torchrelay.common.ids import new_id
from torchrelay.common.net.nats_client import Subjects, connect
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from torchrelay.scheduler.main import serving
from torchrelay.scheduler.policy.config import TICK_S
from torchrelay.scheduler.settings import SchedulerSettings

WAIT_S = HANG_S  # against hanging only

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
        await asyncio.wait_for(self._call.wait_for_connection(), WAIT_S)
        await self.send(hello=scheduler_pb2.AdmitHello(gateway_id=self._gateway_id))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()
        await self._channel.close()

    async def send(self, **command: Any) -> None:
        commands = [scheduler_pb2.AdmitCommand(**command)]
        await self._call.write(scheduler_pb2.AdmitCommands(commands=commands))

    async def event(self, timeout_s: float = WAIT_S) -> scheduler_pb2.AdmitEvent:
        """The next event other than what is told about loads."""
        async with asyncio.timeout(timeout_s):
            while not self._events:
                batch = await self._call.read()
                assert isinstance(batch, scheduler_pb2.AdmitEvents), "the stream ended"
                self.loading += [event.loading for event in batch.events if event.HasField("loading")]
                self._events.extend(event for event in batch.events if not event.HasField("loading"))
        return self._events.popleft()

    async def admit(self, request_id: str, attempt: int = 1, **changes: Any) -> None:
        await self.send(admit=a_request(request_id, attempt, **changes))

    async def placement(self, timeout_s: float = WAIT_S) -> scheduler_pb2.Placement:
        """The next answer, which must be a placement."""
        event = await self.event(timeout_s)
        assert event.HasField("placement"), event
        return event.placement


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


class ScriptedCluster:
    """A NATS prefix with scripted peers, and schedulers started on it."""

    def __init__(self, nats_url: str, nats: Client, stack: AsyncExitStack) -> None:
        self.prefix = new_id("t")
        self.subjects = Subjects(self.prefix)
        self.nats = nats
        self._nats_url, self._stack = nats_url, stack

    async def host(self, number: int) -> tuple[ScriptedStore, ScriptedWorker, ScriptedWorker]:
        """A host with a store and two workers that can play both roles; the second prefers decode."""
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
    async def scheduler(
        self, num_workers: int = 0, tick_s: float = TICK_S, tls: Tls | None = None, **changes: Any
    ) -> AsyncIterator[str]:
        """A running scheduler's address, once it knows ``num_workers`` workers. ``tls``: the identity of a caller."""
        async with serving(self.settings(**changes), tick_s) as addresses:
            await cluster(addresses["grpc"], lambda view: len(view.workers) >= num_workers, tls=tls)
            yield addresses["grpc"]


@asynccontextmanager
async def scripted_cluster(nats_url: str) -> AsyncIterator[ScriptedCluster]:
    nats = await connect(nats_url, "scripted")
    try:
        async with AsyncExitStack() as stack:
            yield ScriptedCluster(nats_url, nats, stack)
    finally:
        await nats.close()


async def cluster(
    address: str,
    until: Callable[[scheduler_pb2.ClusterView], bool],
    timeout_s: float = WAIT_S,
    tls: Tls | None = None,
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
