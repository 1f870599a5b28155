"""The timer for requests that time alone lets be placed."""

from __future__ import annotations

import asyncio
import io
import json
import time

from nats.aio.client import Client

from tests.support.wait import eventually
from tests.unit.scheduler.service.scripted_cluster import CLUSTER_KEY, a_request, a_version
from torchrelay.common.net.nats_client import Subjects
from torchrelay.control.v1 import reports_pb2, scheduler_pb2, types_pb2
from torchrelay.scheduler.policy import types
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import Placed
from torchrelay.scheduler.policy.explain import ExplainLog
from torchrelay.scheduler.policy.inputs import GatewayConnected
from torchrelay.scheduler.service.admit_streams import AdmitStreams
from torchrelay.scheduler.service.cluster_view import cluster_view
from torchrelay.scheduler.service.controller import Clock, Controller
from torchrelay.scheduler.service.epoch import Epoch
from torchrelay.scheduler.service.events.publisher import EventPublisher
from torchrelay.scheduler.service.input_log import InputRecorder, PolicyStart
from torchrelay.scheduler.service.tickets import ClusterTickets
from torchrelay.transfer.protocol.tickets import derive_node_key, verify_ticket


def recorded_controller() -> tuple[Controller, io.BytesIO]:
    """A controller without a cluster, and the log of its inputs."""
    clock, log = Clock(), io.BytesIO()
    start = PolicyStart(PolicyConfig(), clock.now(), "inst")
    controller = Controller(
        start.policy(),
        clock,
        Epoch(clock.now()),
        AdmitStreams(16),
        ClusterTickets(bytes.fromhex(CLUSTER_KEY)),
        ExplainLog(),
        EventPublisher(Client(), Subjects("t")),
        InputRecorder(log, start),
    )
    return controller, log


def num_due(log: io.BytesIO) -> int:
    inputs = [json.loads(line)["input"] for line in log.getvalue().splitlines()[1:]]
    return sum(input["kind"] == "Due" for input in inputs)


async def test_earlier_due_times_replace_the_timer() -> None:
    controller, log = recorded_controller()
    began, due = controller.clock.now(), controller.policy.state.due
    for number in range(10):
        due[f"version {number}"] = began + 0.1 - 0.005 * number
        controller.apply(GatewayConnected("gateway-1"))
    await eventually(lambda: not due)
    assert 1 <= num_due(log) <= 10  # at most one for each time


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


async def test_stopped_controller_has_no_timer() -> None:
    controller, log = recorded_controller()
    controller.policy.state.due["version"] = controller.clock.now() + 0.005
    controller.apply(GatewayConnected("gateway-1"))
    controller.stop_timer()
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, later.set)  # after the timer: they fire in order
    await later.wait()
    assert num_due(log) == 0 and controller.policy.state.due


async def test_view_of_stores_omits_disks() -> None:
    controller, _ = recorded_controller()
    on_disk = reports_pb2.DiskPacks(pack_ids=["p"])
    report = reports_pb2.StoreReport(store_id="s", incarnation="s 1", host_id="h", grpc_address="s:1", disk=on_disk)
    controller.reported(report, streamed=True)
    assert controller.policy.state.membership.is_on_disk("p")
    (seen,) = cluster_view(controller).stores
    assert seen.store_id == "s" and not seen.HasField("disk")
