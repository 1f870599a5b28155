"""The timer for requests that time alone lets be placed."""

from __future__ import annotations

import asyncio
import io
import json

from nats.aio.client import Client

from tests.unit.scheduler.service.scripted_cluster import CLUSTER_KEY, eventually
from torchrelay.common.net.nats_client import Subjects
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.explain import ExplainLog
from torchrelay.scheduler.policy.inputs import GatewayConnected
from torchrelay.scheduler.service.admit_streams import AdmitStreams
from torchrelay.scheduler.service.controller import Clock, Controller
from torchrelay.scheduler.service.epoch import Epoch
from torchrelay.scheduler.service.events.publisher import EventPublisher
from torchrelay.scheduler.service.input_log import InputRecorder, PolicyStart
from torchrelay.scheduler.service.tickets import ClusterTickets


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
    return sum(one["kind"] == "Due" for one in inputs)


async def test_times_that_are_due_ever_earlier_leave_one_timer() -> None:
    controller, log = recorded_controller()
    began, due = controller.clock.now(), controller.policy.state.due
    for number in range(10):
        due[f"version {number}"] = began + 0.1 - 0.005 * number
        controller.apply(GatewayConnected("gateway-1"))
    await eventually(lambda: not due)
    assert 1 <= num_due(log) <= 10  # at most one for each time


async def test_nothing_is_due_after_the_end() -> None:
    controller, log = recorded_controller()
    controller.policy.state.due["version"] = controller.clock.now() + 0.005
    controller.apply(GatewayConnected("gateway-1"))
    controller.stop_timer()
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, later.set)  # after the timer: they fire in order
    await later.wait()
    assert num_due(log) == 0 and controller.policy.state.due
