"""Discovery tells a worker that shuts down from one that dies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from tests.support.wait import HANG_S, eventually
from tests.unit.scheduler.service.scripted_cluster import (
    CLUSTER_KEY,
    MB,
    GatewayClient,
    ScriptedCluster,
    ScriptedStore,
    a_version,
    cluster,
)
from tests.unit.scheduler.service.test_controller import recorded_controller
from torchrelay.common.errors import StaleEpoch
from torchrelay.common.identity.keys import derive_node_key
from torchrelay.common.liveness import SILENT_S
from torchrelay.common.net.load_reports import MAC_HEADER, report_mac
from torchrelay.common.net.nats_client import Subjects
from torchrelay.control.v1 import scheduler_pb2, types_pb2
from torchrelay.control.v1.reports_pb2 import PackCopy, StoreReport, WorkerReport
from torchrelay.scheduler.service.controller import Clock
from torchrelay.scheduler.service.discovery import Discovery, StreamRetries
from torchrelay.scheduler.service.epoch import Epoch
from torchrelay.scheduler.service.peer_channels import PeerChannels
from torchrelay.scheduler.service.signed_reports import SignedReports


async def test_ended_stream_is_stopped_and_killed_worker_is_lost(it: ScriptedCluster) -> None:
    _, first, second = await it.host(1)
    async with it.scheduler() as address, GatewayClient(address) as gateway:
        await gateway.place("r1")
        await cluster(address, lambda view: len(view.instances) == 2)
        await first.leave()
        await cluster(address, lambda view: len(view.instances) == 1)
        await second.kill()
        await cluster(address, lambda view: not view.instances)
        ends = {"instance.stopped": "", "instance.lost": ""}
        causes = {"worker_stopped": "", "worker_gone": ""}
        async for event in gateway.history("instance"):
            fields = json.loads(event.fields_json)
            if event.kind in ends:
                ends[event.kind], causes[fields["cause"]] = fields["worker_id"], fields["worker_id"]
            if all(ends.values()):
                break
        assert list(ends.values()) == list(causes.values()) == [first.worker_id, second.worker_id]


async def test_second_living_store_of_an_id_is_named_and_its_twin_is_watched(it: ScriptedCluster) -> None:
    first, *_ = await it.host(1)
    second = ScriptedStore(it.nats, it.subjects, first.store_id, first.host_id)  # type: ignore[abstract]
    async with it.scheduler() as address, GatewayClient(address) as gateway:
        await cluster(address, lambda view: any(store.grpc_address == first.address for store in view.stores))
        async with second, asyncio.timeout(HANG_S):
            event = await gateway.history("store").read()
            assert event.kind == "store.refused" and json.loads(event.fields_json)["address"] == first.address
            await cluster(address, lambda view: [store.grpc_address for store in view.stores] == [second.address])
            await eventually(lambda: second.num_watches > 0)
            num_watches = second.num_watches, first.num_watches
            reports = await it.nats.subscribe(it.subjects.store_load(first.store_id))
            for _ in range(3):
                while StoreReport.FromString((await reports.next_msg(HANG_S)).data).incarnation != first.incarnation:
                    pass
            second.copies["p"] = PackCopy(pack_id="p", num_chunks=1)
            await second.touch()
            await cluster(address, lambda view: bool(view.stores[0].copies))
            assert (second.num_watches, first.num_watches) == num_watches


async def test_hung_worker_is_lost_and_returns_without_broker(it: ScriptedCluster) -> None:
    store, steady, hung = await it.host(1)
    async with it.scheduler() as address:
        for peer in (store, steady, hung):
            peer.is_passed_on_by_broker = False
        hung.is_hung = True
        present: list[set[str]] = []

        def is_lost(view: scheduler_pb2.ClusterView) -> bool:
            present.append({each.worker_id for each in view.workers} | {each.store_id for each in view.stores})
            return hung.worker_id not in present[-1]

        view = await cluster(address, is_lost)
        assert all({steady.worker_id, store.store_id} <= each for each in present)
        assert view.workers[0].worker_id == steady.worker_id and len(view.stores) == 1
        await hung.wake()  # the broker is still silent: the stream alone brings it back
        view = await cluster(address, lambda view: len(view.workers) == 2)
        assert len(view.stores) == 1


async def test_worker_without_progress_is_lost(it: ScriptedCluster) -> None:
    _, first, second = await it.host(1)
    async with it.scheduler() as address:
        second.engine = types_pb2.EngineProgress(num_advances=3, has_work=True)
        view = await cluster(address, lambda view: len(view.workers) == 1)
        assert view.workers[0].worker_id == first.worker_id
        second.engine = types_pb2.EngineProgress(num_advances=4, has_work=False)
        await cluster(address, lambda view: len(view.workers) == 2)


async def test_command_to_hung_store_ends_with_its_loss(it: ScriptedCluster) -> None:
    """The relay of a large pack has minutes; whoever waits for it is not kept that long."""
    store, *_ = await it.host(1)
    async with it.scheduler(unserved_s=0.5) as address, GatewayClient(address) as gateway:
        store.answers.clear()
        version = a_version()
        version.pack_bytes = 900 * MB
        await gateway.admit("r1", version=version)
        await eventually(lambda: bool(store.relays))
        store.is_hung = True
        await cluster(address, lambda view: not view.stores)
        await cluster(address, lambda view: not view.instances)
        while not (event := await gateway.event()).HasField("refusal"):
            pass
        assert "the param-store of host host-1 does not answer" in event.refusal.message


async def test_fenced_stream_is_retried_with_growing_delay(it: ScriptedCluster) -> None:
    _, fenced, _ = await it.host(1)
    with capture_logs() as logged:
        async with it.scheduler(), asyncio.timeout(HANG_S):
            while not any(line["event"] == "epoch_ahead" for line in logged):  # at its start it outbids
                fenced.epoch += 1000
                await asyncio.sleep(0.05)
            num_before = fenced.num_watches
            await eventually(lambda: fenced.num_watches >= num_before + 3)
    assert [line["peer"] for line in logged if line["event"] == "watch_broken"] == [fenced.worker_id]


class ScriptedClock(Clock):
    def __init__(self) -> None:
        self.time_s = 1000.0

    def now(self) -> float:
        return self.time_s


def test_retry_delay_grows_while_streams_end_soon() -> None:
    clock = ScriptedClock()
    retries, delays_s = StreamRetries(clock), []
    for _ in range(6):
        assert retries.go_on(is_present=True)
        delays_s.append(retries.next_delay_s())
    assert delays_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert retries.go_on(is_present=True) and retries.is_repeated
    clock.time_s += SILENT_S  # this stream has lasted
    assert not retries.is_repeated and retries.next_delay_s() == pytest.approx(0.1)


def test_stream_to_lost_peer_is_retried_for_a_minute() -> None:
    clock = ScriptedClock()
    retries = StreamRetries(clock)
    assert retries.go_on(is_present=False) and retries.next_delay_s() == 1.0
    clock.time_s += 59.0
    assert retries.go_on(is_present=False)
    clock.time_s += 1.0
    assert not retries.go_on(is_present=False)
    assert retries.go_on(is_present=True), "a peer that is present again is retried without end"


async def test_report_beside_another_failure_is_ignored() -> None:
    """It was a second failure, for which the group of tasks took no task any more: a coroutine was never awaited."""
    controller, _ = recorded_controller()
    controller.epoch = Epoch(controller.clock.now() - 10.0)
    ahead = WorkerReport(worker_id="w", incarnation="w 1", epoch=controller.epoch.value + 10_000)
    subject, payload = Subjects("t").worker_load("w"), ahead.SerializeToString()
    mac = report_mac(derive_node_key(bytes.fromhex(CLUSTER_KEY), "w"), subject, payload)
    message = Msg(Client(), subject=subject, data=payload, headers={MAC_HEADER: mac})
    handled: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()

    def report() -> None:
        handled.append(loop.create_task(discovery._on_report(WorkerReport, message)))

    async def fail() -> None:
        loop.call_soon(report)  # it is handled after the end of this task, and before the group is cancelled
        raise StaleEpoch("by another peer")

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as tasks:
            signed = SignedReports(bytes.fromhex(CLUSTER_KEY))
            discovery = Discovery(controller, PeerChannels(bytes(32)), SilentBroker(), Subjects("t"), signed)
            await discovery.start(tasks)
            tasks.create_task(fail())
            await asyncio.Event().wait()
    await handled[0]
    assert len(caught.value.exceptions) == 1


class SilentBroker(Client):
    async def subscribe(self, *args: Any, **options: Any) -> Any:
        """Passes nothing on."""
