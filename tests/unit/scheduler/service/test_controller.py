"""The controller between messages, policy and peers: timers, streams of gateways, views, channels, conversions."""

from __future__ import annotations

import asyncio
import io
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import IntEnum
from typing import Any

import grpc
import pytest
from nats.aio.client import Client
from pytest import MonkeyPatch

from tests.support.wait import eventually
from tests.unit.scheduler.service.scripted_cluster import CLUSTER_KEY, a_request, a_version
from torchrelay.common.errors import Overloaded
from torchrelay.common.identity.callers import Caller, call_token
from torchrelay.common.identity.tls import Tls
from torchrelay.common.net.nats_client import Subjects
from torchrelay.common.net.rpc.message_pace import AT_ONCE, EVERY_S
from torchrelay.control.v1 import param_store_pb2, reports_pb2, scheduler_pb2, types_pb2
from torchrelay.control.v1.scheduler_pb2 import AdmitEvent, AdmitEvents
from torchrelay.scheduler.policy import types
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import Placed, RefusalReason
from torchrelay.scheduler.policy.inputs import GatewayChanged
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.policy.types import Admission, LatencyTargets, ServiceClass, SlotClass
from torchrelay.scheduler.service import peer_channels
from torchrelay.scheduler.service.admit_streams import MAX_BATCH, AdmitStream, AdmitStreams
from torchrelay.scheduler.service.controller import Clock, Controller
from torchrelay.scheduler.service.converters import (
    admission_from_proto,
    model_from_proto,
    store_from_proto,
    worker_from_proto,
)
from torchrelay.scheduler.service.history import EventPublisher
from torchrelay.scheduler.service.input_log import InputRecorder, PolicyStart
from torchrelay.scheduler.service.peer_channels import PeerChannels, is_refused
from torchrelay.scheduler.service.servicer import SchedulerServicer
from torchrelay.scheduler.service.tickets import ClusterTickets
from torchrelay.scheduler.service.views import cluster_view
from torchrelay.transfer.protocol.tickets import derive_node_key, verify_ticket


def recorded_controller() -> tuple[Controller, io.BytesIO]:
    """A controller without a cluster, and the log of its inputs."""
    clock, log = Clock(), io.BytesIO()
    start = PolicyStart(PolicyConfig(), clock.now(), "inst")
    controller = Controller(
        start.policy(),
        clock,
        AdmitStreams(16),
        ClusterTickets(bytes.fromhex(CLUSTER_KEY)),
        EventPublisher(Client(), Subjects("t")),
        InputRecorder(log, start),
    )
    return controller, log


def inputs(log: io.BytesIO, kind: str) -> list[Any]:
    logged = [json.loads(line)["input"] for line in log.getvalue().splitlines()[1:]]
    return [each for each in logged if each["kind"] == kind]


@asynccontextmanager
async def running(controller: Controller) -> AsyncIterator[None]:
    """The controller ticks, but for turns and rounds."""
    controller.policy.state.turn_due = controller.policy.state.round_due = math.inf
    async with asyncio.TaskGroup() as tasks:
        ticks = tasks.create_task(controller.run())
        yield
        ticks.cancel()


async def test_earlier_due_times_replace_the_timer() -> None:
    controller, log = recorded_controller()
    began, due = controller.clock.now(), controller.policy.state.due
    async with running(controller):
        for number in range(10):
            due[f"version {number}"] = began + 0.1 - 0.005 * number
            controller.apply(GatewayChanged("gateway-1", True))
        await eventually(lambda: not due)
    assert 1 <= len(inputs(log, "Tick")) <= 10  # at most one for each time


def a_report(worker_id: str, *, is_leaving: bool = False) -> reports_pb2.WorkerReport:
    slot = reports_pb2.SlotState(
        state=reports_pb2.SlotState.STATE_READY,
        instance_id=f"i-{worker_id}",
        model=a_version().model,
        version_id=a_version().version_id,
        pack_id=a_version().pack_id,
        roles=[types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE],
    )
    return reports_pb2.WorkerReport(
        worker_id=worker_id,
        incarnation=worker_id,
        host_id="h",
        grpc_address=f"{worker_id}:1",
        roles=slot.roles,
        slot=slot,
        kv_pool_bytes=1 << 40,
        is_leaving=is_leaving,
    )


async def test_recall_goes_through_gateway_stream() -> None:
    controller, _ = recorded_controller()
    stream = controller.streams.open()
    controller.streams.connected(stream, "gateway-1")
    for worker_id in ("w1", "w2"):
        if worker_id == "w2":  # comes when two prompts have been dispatched to the other, which computes nothing
            for request_id in ("r1", "r2"):
                controller.admit("gateway-1", a_request(request_id))
        controller.reported(a_report(worker_id), streamed=True)
    state, key = controller.policy.state, types.AttemptKey("r2", 1)
    assert len(state.attempts) == 2
    controller.reported(a_report("w1", is_leaving=True), streamed=True)
    attempt = state.attempts.get(key)
    assert attempt is not None and attempt.is_recalled
    sent = (await anext(stream.events())).events
    assert [event.recall.key.request_id for event in sent if event.HasField("recall")] == ["r2"]
    message = scheduler_pb2.Release(key=types_pb2.AttemptKey(request_id="r2", attempt=1), is_recalled=True)
    controller.release(message)
    assert list(state.recalled) == ["r2"] and "r2" not in state.instances_without_token


async def test_prompt_source_has_a_ticket_for_the_prefill_worker() -> None:
    controller, _ = recorded_controller()
    stream = controller.streams.open()
    controller.streams.connected(stream, "gateway-1")
    source, prefill, decode = (types.WorkerRef(name, f"{name}:1", f"i-{name}") for name in ("w1", "w2", "w3"))
    placement = types.Placement(
        types.AttemptKey("r1", 2),
        prefill,
        decode,
        cold=False,
        prompt_source=types.PromptSource(types.AttemptKey("r1", 1), source),
    )
    controller._send(Placed("gateway-1", placement))
    (event,) = (await anext(stream.events())).events
    ticket = event.placement.prompt_source.ticket
    assert (ticket.buffer_id, ticket.holder_id, ticket.receiver_id) == ("r1/1/prompt", "w1", "w2")
    verify_ticket(ticket, "w1", derive_node_key(bytes.fromhex(CLUSTER_KEY), "w1"), int(time.time() * 1000))


async def test_failed_tick_ends_the_controller(monkeypatch: MonkeyPatch) -> None:
    """A failure was only logged, and requests waited until another input came."""
    controller, _ = recorded_controller()
    monkeypatch.setattr(Policy, "_tick", None)
    with pytest.raises(TypeError):
        await controller.run()


async def test_ticks_that_are_due_at_once_let_other_tasks_run(monkeypatch: MonkeyPatch) -> None:
    controller, log = recorded_controller()
    monkeypatch.setattr(Policy, "next_due", lambda policy: 0.0)
    async with running(controller):
        for _ in range(100):
            await asyncio.sleep(0)
    assert len(inputs(log, "Tick")) > 10


async def test_stopped_controller_has_no_timer() -> None:
    controller, log = recorded_controller()
    async with running(controller):
        controller.policy.state.due["version"] = controller.clock.now() + 0.005
        controller.apply(GatewayChanged("gateway-1", True))
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, later.set)  # after the timer: they fire in order
    await later.wait()
    assert len(inputs(log, "Tick")) == 0 and controller.policy.state.due


async def test_view_of_stores_omits_disks() -> None:
    controller, _ = recorded_controller()
    on_disk = reports_pb2.DiskPacks(pack_ids=["p"])
    report = reports_pb2.StoreReport(store_id="s", incarnation="s 1", host_id="h", grpc_address="s:1", disk=on_disk)
    controller.reported(report, streamed=True)
    assert controller.policy.state.membership.is_on_disk("p")
    (seen,) = cluster_view(controller).stores
    assert seen.store_id == "s" and not seen.HasField("disk")


class Call:
    """The context of an RPC that goes on."""

    def add_done_callback(self, callback: Any) -> None:
        pass

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass


def a_servicer(controller: Controller) -> Any:
    """Its RPCs are generators, which the stubs do not say."""
    nobody: Any = None
    return SchedulerServicer(controller, nobody, nobody)


async def test_watchers_of_many_peers_share_a_view_and_see_later_changes() -> None:
    controller, _ = recorded_controller()
    for number in range(500):
        controller.reported(a_report(f"w{number}"), streamed=True)
    servicer = a_servicer(controller)
    first, second = (servicer.WatchCluster(scheduler_pb2.WatchClusterRequest(), Call()) for _ in range(2))
    seen = await anext(first)
    controller.reported(a_report("last"), streamed=True)
    assert await anext(second) is seen and len(seen.workers) == 500
    later = await asyncio.gather(*(anext(watcher) for watcher in (first, second)))
    assert later[0] is later[1] and len(later[0].workers) == 501
    for watcher in (first, second):
        await watcher.aclose()


async def test_watchers_of_few_peers_see_every_change_at_once() -> None:
    controller, _ = recorded_controller()
    servicer = a_servicer(controller)
    for number in range(3):
        controller.reported(a_report(f"w{number}"), streamed=True)
        watcher = servicer.WatchCluster(scheduler_pb2.WatchClusterRequest(), Call())
        assert len((await anext(watcher)).workers) == number + 1
        await watcher.aclose()


async def commands(gateway_id: str, request_ids: Sequence[str]) -> AsyncIterator[scheduler_pb2.AdmitCommands]:
    """A message with all admissions, after which the stream stays open."""
    hello = scheduler_pb2.AdmitCommand(hello=scheduler_pb2.AdmitHello(gateway_id=gateway_id))
    admits = [scheduler_pb2.AdmitCommand(admit=a_request(request_id)) for request_id in request_ids]
    yield scheduler_pb2.AdmitCommands(commands=[hello, *admits])
    await asyncio.Event().wait()


def admitted(controller: Controller) -> list[str]:
    return [admission.key.request_id for admission in controller.policy.state.queues]


async def test_message_with_many_commands_leaves_other_streams_their_turn() -> None:
    controller, log = recorded_controller()
    servicer = a_servicer(controller)
    many = [f"r{number}" for number in range(200)]
    async with asyncio.TaskGroup() as tasks:
        calls = [servicer.Admit(commands("g1", many), Call()), servicer.Admit(commands("g2", ["other"]), Call())]
        reading = [tasks.create_task(anext(call)) for call in calls]
        await eventually(lambda: len(admitted(controller)) == 201)
        for task in reading:
            task.cancel()
    for call in calls:
        await call.aclose()
    order = [each["admission"]["key"][0] for each in inputs(log, "Admit")]
    assert order.index("other") <= 64 and [name for name in order if name != "other"] == many


async def test_replaced_stream_ends_at_its_turn() -> None:
    """A gateway that has returned repeats what it waits for: a command that it sent before would come too late."""
    controller, _ = recorded_controller()
    servicer = a_servicer(controller)
    async with asyncio.TaskGroup() as tasks:
        older = servicer.Admit(commands("g1", [f"r{number}" for number in range(200)]), Call())
        newer = servicer.Admit(commands("g1", ["again"]), Call())
        reading = [tasks.create_task(anext(call, None)) for call in (older, newer)]
        await reading[0]
        assert "again" in admitted(controller) and len(admitted(controller)) < 200
        reading[1].cancel()
    for call in (older, newer):
        await call.aclose()


async def test_slow_gateway_loses_stream() -> None:
    stream = AdmitStream(max_queued=3, message_every_s=EVERY_S)
    for _ in range(4):
        stream.send({})
    with pytest.raises(Overloaded):
        await anext(stream.events())


async def test_newer_stream_replaces_older() -> None:
    streams = AdmitStreams(max_queued=3)
    older, newer = streams.open(), streams.open()
    streams.connected(older, "g")
    streams.connected(newer, "g")
    assert [event async for event in older.events()] == []
    assert not streams.disconnected(older)  # the gateway is still here
    streams.send("g", {})
    streams.close()
    assert [events async for events in newer.events()] == [AdmitEvents(events=[AdmitEvent()])]
    assert streams.disconnected(newer)


async def _kinds(events: AsyncIterator[AdmitEvents]) -> list[str | None]:
    return [event.WhichOneof("event") for event in (await anext(events)).events]


async def test_stream_beats_at_requested_interval() -> None:
    stream = AdmitStream(max_queued=3, message_every_s=EVERY_S)
    stream.beat(0.1)
    events = stream.events()
    assert [await _kinds(events) for _ in range(3)] == [["beat"]] * 3
    stream.send({"refusal": {}})
    assert await _kinds(events) == ["refusal"]
    stream.close()
    assert [event async for event in events] == []


async def test_waiting_events_form_bounded_batches() -> None:
    stream = AdmitStream(max_queued=1000, message_every_s=EVERY_S)
    for position in range(MAX_BATCH + 1):
        stream.send({"refusal": {"retry_after_s": position}})
    stream.close()
    batches = [[event.refusal.retry_after_s for event in events.events] async for events in stream.events()]
    assert batches == [[*range(MAX_BATCH)], [MAX_BATCH]]


async def test_close_events_share_one_message() -> None:
    stream = AdmitStream(max_queued=1000, message_every_s=0.3)
    events = stream.events()
    for _ in range(AT_ONCE):
        stream.send({"refusal": {}})
        assert len(await _kinds(events)) == 1
    stream.send({"refusal": {}})
    following = asyncio.create_task(_kinds(events))
    await asyncio.sleep(0)  # the stream has seen the first of two
    stream.send({"refusal": {}})
    assert len(await following) == 2


CHANNEL_KEY = bytes(32)
ADDRESS = "127.0.0.1:1"


async def test_closed_port_is_refused() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert not await is_refused(f"127.0.0.1:{port}")
    server.close()
    await server.wait_closed()
    assert await is_refused(f"127.0.0.1:{port}")


async def test_peer_is_connected_while_channel_is_ready() -> None:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    channels = PeerChannels(CHANNEL_KEY)
    store = types.Peer("store-1", is_store=True)
    assert not channels.is_connected(address, store), "nobody has called it"
    stub = channels.stub(address, store)
    assert not channels.is_connected(address, store)
    with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
        await stub.Retain(param_store_pb2.RetainRequest(), wait_for_ready=True)
    assert channels.is_connected(address, store)
    await server.stop(None)
    await eventually(lambda: not channels.is_connected(address, store))
    await channels.close()


async def test_nodes_at_one_address_get_own_tokens(monkeypatch: MonkeyPatch) -> None:
    """A port may pass from one process to another before anybody noticed that the first is gone."""
    tokens: list[str] = []

    def note_token(address: str, tls: Tls | None, token: str, callee: Caller, *, is_thin: bool) -> grpc.aio.Channel:
        tokens.append(token)
        return grpc.aio.insecure_channel(address)

    monkeypatch.setattr(peer_channels, "open_channel", note_token)
    channels = PeerChannels(CHANNEL_KEY)
    worker_1, worker_2 = types.Peer("worker-1"), types.Peer("worker-2")
    first, second = (channels.stub(ADDRESS, worker_1), channels.stub(ADDRESS, worker_2))
    assert first is not second and channels.stub(ADDRESS, worker_1) is first
    assert tokens == [
        call_token(derive_node_key(CHANNEL_KEY, each), Caller.SCHEDULER) for each in ("worker-1", "worker-2")
    ]
    other = channels.stub("127.0.0.1:2", worker_1)
    await channels.forget(ADDRESS)
    assert channels.stub("127.0.0.1:2", worker_1) is other
    assert channels.stub(ADDRESS, worker_1) is not first and channels.stub(ADDRESS, worker_2) is not second
    await channels.close()


def admission(**fields: Any) -> Admission:
    return admission_from_proto(a_request("r1", **fields), "gateway-1", now=100.0)


@pytest.mark.parametrize(
    ("fields", "service_class"),
    [
        ({}, ServiceClass.STANDARD),
        ({"service_class": scheduler_pb2.SERVICE_CLASS_BATCH}, ServiceClass.BATCH),
        ({"service_class": 99}, ServiceClass.STANDARD),  # of a later release
    ],
)
def test_admission_has_service_class_of_request(fields: dict[str, Any], service_class: ServiceClass) -> None:
    assert admission(**fields).service_class is service_class


def test_retried_request_keeps_its_arrival() -> None:
    """After its worker's death it had a new deadline and the last place."""
    first, again = admission(), admission(attempt=2, age_ms=7500)
    assert again.admitted_at == first.admitted_at == 100.0
    assert again.deadline == first.deadline - 7.5


def test_model_has_targets_and_slots_of_version() -> None:
    version = a_version()
    assert model_from_proto(version).targets == LatencyTargets()
    assert model_from_proto(version).slot_class == SlotClass(1, "")
    version.targets.CopyFrom(types_pb2.LatencyTargets(interactive_ttft_s=0.2, standard_ttft_s=0.5, tbt_target_s=0.05))
    version.scaling.engine, version.scaling.num_devices = "vllm", 2
    assert model_from_proto(version).targets == LatencyTargets(0.2, 0.5, 0.0, 0.05)
    assert model_from_proto(version).slot_class == SlotClass(2, "vllm")


@pytest.mark.parametrize(
    ("kind", "protocol", "prefix"),
    [
        (ServiceClass, scheduler_pb2.ServiceClass, "SERVICE_CLASS"),
        (RefusalReason, scheduler_pb2.Refusal.Reason, "REASON"),
        (types.Role, types_pb2.Role, "ROLE"),
    ],
)
def test_numbers_match_protocol(kind: type[IntEnum], protocol: Any, prefix: str) -> None:
    ours = {f"{prefix}_{each.name}": each.value for each in kind}
    assert ours == {name: number for name, number in protocol.items() if name != f"{prefix}_UNSPECIFIED"}


@pytest.mark.parametrize(
    ("fields", "can", "slots"),
    [
        ({}, True, SlotClass(1, "torchrelay")),  # of an earlier release
        ({"capabilities": {"engine": "vllm"}, "num_devices": 2}, False, SlotClass(2, "vllm")),
        ({"weights_bytes": 5}, True, SlotClass(1, "torchrelay", 5)),
        ({"capabilities": {"engine": "vllm", "kv_handover": True, "layer_spans": True}}, True, SlotClass(1, "vllm")),
    ],
)
def test_worker_report_tells_what_the_engine_can(fields: dict[str, Any], can: bool, slots: SlotClass) -> None:
    worker = worker_from_proto(reports_pb2.WorkerReport(worker_id="w1", **fields), 1.0)
    assert (worker.hands_over, worker.computes_by_layer) == (can, can)
    assert worker.slot_class == slots


@pytest.mark.parametrize(
    ("fields", "packs"),
    [({}, None), ({"disk": {}}, frozenset()), ({"disk": {"pack_ids": ["p", "q"]}}, frozenset({"p", "q"}))],
)
def test_store_report_without_disk_keeps_disk_packs(fields: dict[str, Any], packs: frozenset[str] | None) -> None:
    assert store_from_proto(reports_pb2.StoreReport(store_id="s1", **fields), 1.0).disk_pack_ids == packs
