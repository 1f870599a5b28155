"""The scheduler process: assembly, background tasks, shutdown; or the replay of a recorded one."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import count
from typing import BinaryIO

import msgspec
import uvloop
from nats.aio.client import Client

from torchrelay.common.errors import Conflict
from torchrelay.common.host.addresses import join_address
from torchrelay.common.identity.callers import SCHEDULER_NODE
from torchrelay.common.identity.keys import derive_node_key
from torchrelay.common.ids import new_id
from torchrelay.common.net.nats_client import Subjects, connect_at_start, keep_streams, try_streams
from torchrelay.common.net.rpc.channels import SCHEDULER_SERVICE
from torchrelay.common.net.rpc.server import RpcServer
from torchrelay.common.process.service import Addresses, run_service
from torchrelay.common.process.settings import load_settings
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import external_scaler_pb2_grpc, scheduler_pb2_grpc
from torchrelay.scheduler.service.actuator import Actuator
from torchrelay.scheduler.service.admit_streams import AdmitStreams
from torchrelay.scheduler.service.controller import Clock, Controller, drop_command
from torchrelay.scheduler.service.discovery import Discovery
from torchrelay.scheduler.service.external_scaler import CALLERS as KEDA_CALLERS
from torchrelay.scheduler.service.external_scaler import ExternalScalerServicer
from torchrelay.scheduler.service.history import EventPublisher, EventReader
from torchrelay.scheduler.service.input_log import InputRecorder, PolicyStart, replay
from torchrelay.scheduler.service.lease import Lease
from torchrelay.scheduler.service.peer_channels import PeerChannels
from torchrelay.scheduler.service.servicer import CALLERS, SchedulerServicer
from torchrelay.scheduler.service.signed_reports import SignedReports
from torchrelay.scheduler.service.tickets import ClusterTickets
from torchrelay.scheduler.settings import SchedulerSettings

log = get_logger(__name__)

_COLLECT_EVERY_S = 0.05
_COLLECT_ALL_EVERY_S = 600.0  # a full collection of a large fleet's state takes some tenths of a second


@asynccontextmanager
async def serving(settings: SchedulerSettings) -> AsyncIterator[Addresses]:
    """Serves until the block is left, first as a standby while another scheduler has the lease; raises when a newer
    scheduler takes over, or a background task fails.
    """
    subjects, tls, cluster_key = Subjects(settings.nats_prefix), settings.tls, bytes.fromhex(settings.cluster_key)
    open_server = partial(RpcServer, settings.host, tls=tls, node_key=derive_node_key(cluster_key, SCHEDULER_NODE))
    async with AsyncExitStack() as stack:
        nats = await connect_at_start(settings.nats_url, "scheduler")
        stack.push_async_callback(nats.close)
        # When JetStream cannot store an event, NATS reads nothing more from the connection that it came by.
        history_nats = await connect_at_start(settings.nats_url, "scheduler-history")
        stack.push_async_callback(history_nats.close)
        js = history_nats.jetstream()
        stream_settings = js, subjects, settings.nats_replicas, settings.stream_sizes
        await try_streams(*stream_settings)
        port, lease = settings.port, None
        if settings.lease_s:
            port, lease = await _stand_by(settings, open_server(settings.port), nats, subjects)
        server = open_server(port)
        channels = PeerChannels(cluster_key, tls)
        stack.push_async_callback(channels.close)
        event_publisher = EventPublisher(history_nats, subjects)
        log_file = stack.enter_context(settings.record.open("wb")) if settings.record else None
        controller = _controller(settings, event_publisher, log_file)
        discovery = Discovery(controller, channels, nats, subjects, SignedReports(cluster_key))
        servicer = SchedulerServicer(controller, EventReader(js, subjects), cluster_key)
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, server.server)
        server.allow(CALLERS)

        group = await stack.enter_async_context(asyncio.TaskGroup())
        keeping = group.create_task(lease.keep()) if lease is not None else None
        ready = asyncio.Event()
        background = _background(controller, event_publisher, channels, discovery, ready)
        for running in (background, keep_streams(*stream_settings)):
            stack.callback(group.create_task(running).cancel)
        await ready.wait()
        await server.start()
        stack.push_async_callback(server.stop)
        await server.set_serving(SCHEDULER_SERVICE, True)
        if lease is not None and keeping is not None:
            stack.push_async_callback(_release, lease, keeping)
        stack.callback(controller.streams.close)
        if settings.keda_port:
            await _serve_keda(settings.keda_port, open_server, controller, stack)
        yield {"grpc": join_address(settings.advertised_host, server.port)}


async def _stand_by(
    settings: SchedulerSettings, server: RpcServer, nats: Client, subjects: Subjects
) -> tuple[int, Lease]:
    """Waits for the lease; ``server`` answers health checks meanwhile, at the port that it returns."""
    await server.set_serving(SCHEDULER_SERVICE, False)
    await server.start()
    try:
        # With the host's name, as schedulers of several hosts may all listen, and be advertised, at the same address.
        holder = f"{join_address(settings.advertised_host, server.port)} {socket.gethostname()}"
        log.info("standing_by", holder=holder)
        lease = Lease(nats, subjects, holder, settings.lease_s, settings.nats_replicas)
        await lease.acquire()
        log.info("lease_acquired", holder=holder)
    finally:
        await server.stop(0)
    return server.port, lease


async def _release(lease: Lease, keeping: asyncio.Task[None]) -> None:
    if not keeping.done():  # else another scheduler has it
        keeping.cancel()
        await lease.release()


async def _serve_keda(
    port: int, open_server: Callable[[int], RpcServer], controller: Controller, stack: AsyncExitStack
) -> None:
    """Serves KEDA until the stack ends. The port is its own because a standby must refuse connections there: KEDA takes
    any scheduler that accepts them for the active one.
    """
    try:
        server = open_server(port)
    except Conflict as error:
        raise Conflict(error.message, field="keda_port") from error
    servicer = ExternalScalerServicer(controller)
    external_scaler_pb2_grpc.add_ExternalScalerServicer_to_server(servicer, server.server)
    server.allow(KEDA_CALLERS)
    await server.start()
    stack.push_async_callback(server.stop)
    stack.callback(servicer.close)


def _controller(settings: SchedulerSettings, event_publisher: EventPublisher, log_file: BinaryIO | None) -> Controller:
    """``log_file``: where inputs are recorded."""
    clock = Clock()
    start = PolicyStart(settings.config, clock.now(), new_id("inst"))
    # A stream holds an answer for each of its requests at most a few times over.
    streams = AdmitStreams(max_queued=4 * settings.config.queue_limit_total)
    tickets = ClusterTickets(bytes.fromhex(settings.cluster_key))
    recorder = InputRecorder(log_file, start) if log_file else None
    return Controller(start.policy(), clock, streams, tickets, event_publisher, recorder)


async def _background(
    controller: Controller,
    event_publisher: EventPublisher,
    channels: PeerChannels,
    discovery: Discovery,
    ready: asyncio.Event,
) -> None:
    """Everything that runs beside the RPCs; cancelled together."""
    async with asyncio.TaskGroup() as tasks:
        controller.start_command = Actuator(controller, channels, tasks).start
        await discovery.start(tasks)
        tasks.create_task(event_publisher.run(), name="history")
        tasks.create_task(controller.run(), name="ticks")
        tasks.create_task(_collect_periodically(), name="garbage")
        ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            controller.start_command = drop_command


async def _collect_periodically() -> None:
    """Collects garbage by time rather than by allocation counts. Counts rise only with surviving objects, so a
    collection that they trigger visits all objects of a second of requests and delays the next requests.
    """
    gc.disable()
    try:
        for number in count(1):
            await asyncio.sleep(_COLLECT_EVERY_S)
            gc.collect(2 if number % round(_COLLECT_ALL_EVERY_S / _COLLECT_EVERY_S) == 0 else 1)
    finally:
        gc.enable()


def main() -> None:
    settings = load_settings(SchedulerSettings, "torchrelay-scheduler")
    if settings.replay is not None:
        try:
            for effects in replay(settings.replay):
                sys.stdout.buffer.write(effects + b"\n")
        except msgspec.DecodeError as error:
            sys.stdout.flush()  # the effects up to there
            sys.exit(f"torchrelay-scheduler: {settings.replay}: {error}")
        return
    run_service("scheduler", settings, partial(serving, settings), loop_factory=uvloop.new_event_loop)
