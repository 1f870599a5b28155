"""Workers and stores of a fleet in a single process: they report, send heartbeats and obey, but compute nothing.

    python -m bench.scheduling.peers NATS_URL FLEET_AS_JSON

Prints ``ready``. Each worker and store has its own port, so the scheduler has as many connections as in a real fleet. A
load completes immediately. Every line of stdin asks for a line of JSON: the Relay and Load commands since the previous
line, with the pack and the time of arrival in seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvloop
from google.protobuf.message import Message
from nats.aio.client import Client

from bench.scheduling.fleet import BOTH, CLUSTER_KEY, KV_POOL_BYTES, NUM_LAYERS, PACK_BYTES, Fleet
from torchrelay.common.identity.callers import Caller, call_token
from torchrelay.common.identity.keys import derive_node_key
from torchrelay.common.net.load_reports import publish_reports
from torchrelay.common.net.nats_client import Subjects, connect
from torchrelay.common.net.rpc.channels import TOKEN
from torchrelay.common.net.rpc.options import OPTIONS
from torchrelay.control.v1 import param_store_pb2 as store_pb
from torchrelay.control.v1 import param_store_pb2_grpc, reports_pb2, types_pb2, worker_pb2, worker_pb2_grpc

KEY = bytes.fromhex(CLUSTER_KEY)
FREE, READY = reports_pb2.SlotState.STATE_FREE, reports_pb2.SlotState.STATE_READY
COST = reports_pb2.StepCost(base_s=0.004, per_position_s=2e-5, per_attended_s=2e-9, num_steps=100)
LATENCY = reports_pb2.LatencyModel(
    prefill=COST, decode=reports_pb2.StepCost(base_s=0.008, per_position_s=1e-5, num_steps=100), token_budget=2048
)


@dataclass(eq=False)
class Peer:
    """A worker or a store: its report, and an event that is set at each change."""

    report: Any
    address: str = ""
    epoch: int = 0
    version: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def touch(self) -> None:
        self.version += 1
        self.changed.set()


class Peers(worker_pb2_grpc.WorkerServicer, param_store_pb2_grpc.ParamStoreServicer):
    """All peers behind one server; the token of a call identifies the peer."""

    def __init__(self, fleet: Fleet) -> None:
        self.workers = [_worker(number, fleet.workers_per_host) for number in range(fleet.num_workers)]
        self.stores = [_store(number) for number in range(fleet.num_hosts)]
        versions = fleet.versions()
        for worker, (model, roles) in zip(self.workers, fleet.served(), strict=False):
            _serve(worker.report, versions[model], f"inst-{worker.report.worker_id}", roles)
            host = self.stores[int(worker.report.host_id.rpartition("-")[2])]
            _hold(host.report, versions[model].pack_id)
        for number, version in enumerate(versions):  # every pack has a copy in some host's RAM
            _hold(self.stores[number % len(self.stores)].report, version.pack_id)
        ids = [(worker.report.worker_id, worker) for worker in self.workers]
        ids += [(store.report.store_id, store) for store in self.stores]
        self._by_token = {call_token(derive_node_key(KEY, name), Caller.SCHEDULER): peer for name, peer in ids}
        self.commands: list[tuple[str, str, float]] = []  # name, pack, time

    def _called(self, context: Any) -> Peer:
        return self._by_token[dict(context.invocation_metadata())[TOKEN]]

    async def _watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        peer, seen = self._called(context), -1
        peer.epoch = max(peer.epoch, request.epoch)
        while True:
            if seen != peer.version:
                seen = peer.version
                peer.report.is_beat, peer.report.epoch = False, peer.epoch
                yield peer.report
            else:
                yield _beat(peer)
            peer.changed.clear()
            try:
                async with asyncio.timeout(request.beat_every_s):
                    await peer.changed.wait()
            except TimeoutError:
                pass

    async def WatchSlot(self, request: worker_pb2.WatchSlotRequest, context: Any) -> AsyncIterator[Any]:
        async for report in self._watch(request, context):
            yield report

    async def WatchCopies(self, request: store_pb.WatchCopiesRequest, context: Any) -> AsyncIterator[Any]:
        async for report in self._watch(request, context):
            yield report

    async def Load(self, request: worker_pb2.LoadRequest, context: Any) -> worker_pb2.LoadReply:
        self.commands.append(("load", request.version.pack_id, time.monotonic()))
        peer = self._called(context)
        _serve(peer.report, request.version, request.instance_id, tuple(request.roles))
        peer.touch()
        return worker_pb2.LoadReply()

    async def SetRoles(self, request: worker_pb2.SetRolesRequest, context: Any) -> worker_pb2.SetRolesReply:
        peer = self._called(context)
        peer.report.slot.roles[:] = request.roles
        peer.touch()
        return worker_pb2.SetRolesReply()

    async def Unload(self, request: worker_pb2.UnloadRequest, context: Any) -> worker_pb2.UnloadReply:
        peer = self._called(context)
        peer.report.slot.CopyFrom(reports_pb2.SlotState(state=FREE))
        peer.touch()
        return worker_pb2.UnloadReply()

    async def Relay(self, request: store_pb.RelayRequest, context: Any) -> store_pb.RelayReply:
        self.commands.append(("relay", request.pack_id, time.monotonic()))
        peer = self._called(context)
        _hold(peer.report, request.pack_id)
        peer.touch()
        return store_pb.RelayReply(already_complete=True)

    async def Retain(self, request: store_pb.RetainRequest, context: Any) -> store_pb.RetainReply:
        return store_pb.RetainReply()


def _worker(number: int, workers_per_host: int) -> Peer:
    report = reports_pb2.WorkerReport(
        worker_id=f"worker-{number}",
        incarnation="run-1",
        host_id=f"host-{number // workers_per_host}",
        data_address="127.0.0.1:9",
        roles=BOTH,
        slot=reports_pb2.SlotState(state=FREE),
        kv_pool_bytes=KV_POOL_BYTES,
        kv_free_bytes=KV_POOL_BYTES,
        latency=LATENCY,
        has_prefix_cache=True,
    )
    return Peer(report)


def _store(number: int) -> Peer:
    report = reports_pb2.StoreReport(
        store_id=f"store-{number}",
        incarnation="run-1",
        host_id=f"host-{number}",
        data_address="127.0.0.1:9",
        arena_target_bytes=1 << 50,
    )
    return Peer(report)


def _serve(
    report: reports_pb2.WorkerReport,
    version: types_pb2.ModelVersion,
    instance_id: str,
    roles: tuple[types_pb2.Role.ValueType, ...],
) -> None:
    slot = reports_pb2.SlotState(
        state=READY,
        instance_id=instance_id,
        model=version.model,
        version_id=version.version_id,
        pack_id=version.pack_id,
        roles=roles,
        num_layers_ready=NUM_LAYERS,
        num_layers=NUM_LAYERS,
    )
    report.slot.CopyFrom(slot)


def _hold(report: reports_pb2.StoreReport, pack_id: str) -> None:
    if pack_id not in (copy.pack_id for copy in report.copies):
        report.copies.add(pack_id=pack_id, pack_bytes=PACK_BYTES, num_chunks=64, num_chunks_verified=64)


def _beat(peer: Peer) -> Message:
    report = peer.report
    if isinstance(report, reports_pb2.WorkerReport):
        ids: dict[str, Any] = {"worker_id": report.worker_id}
        return reports_pb2.WorkerReport(incarnation="run-1", epoch=peer.epoch, is_beat=True, **ids)
    return reports_pb2.StoreReport(store_id=report.store_id, incarnation="run-1", epoch=peer.epoch, is_beat=True)


async def _report(nats: Client, subject: str, peer: Peer, delay_s: float, figures_change: bool) -> None:
    await asyncio.sleep(delay_s)  # real peers do not start together

    def report() -> Message:
        peer.report.epoch = peer.epoch
        if figures_change and isinstance(peer.report, reports_pb2.WorkerReport):
            peer.report.num_running = random.randrange(32)
            peer.report.kv_free_bytes = random.randrange(KV_POOL_BYTES)
        whole: Message = peer.report
        return whole

    key = derive_node_key(KEY, subject.rpartition(".")[2])
    await publish_reports(nats, subject, key, lambda: peer.version, report)


async def main(nats_url: str, fleet: Fleet) -> None:
    nats, subjects = await connect(nats_url, "peers"), Subjects("")
    peers = Peers(fleet)  # type: ignore[abstract]  # without uploads
    server = grpc.aio.server(options=OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(peers, server)
    param_store_pb2_grpc.add_ParamStoreServicer_to_server(peers, server)
    all_peers = [*peers.workers, *peers.stores]
    for peer in all_peers:
        peer.address = peer.report.grpc_address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with asyncio.TaskGroup() as tasks:
        for number, peer in enumerate(all_peers):
            is_worker = isinstance(peer.report, reports_pb2.WorkerReport)
            name = peer.report.worker_id if is_worker else peer.report.store_id
            subject = subjects.worker_load(name) if is_worker else subjects.store_load(name)
            tasks.create_task(_report(nats, subject, peer, number / len(all_peers) / 2, fleet.figures_change))
        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(peers.commands), flush=True)
            peers.commands.clear()
        sys.exit(0)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], Fleet(**json.loads(sys.argv[2]))))
