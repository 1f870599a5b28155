"""The scheduler process: put together, kept running, taken apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from nats.aio.client import Client

from torchrelay.common.events import Subjects, connect, ensure_streams
from torchrelay.common.ids import new_id
from torchrelay.common.rpc import RpcServer
from torchrelay.common.service import Addresses, run_service
from torchrelay.common.settings import load_settings
from torchrelay.control.v1 import scheduler_pb2_grpc
from torchrelay.scheduler.actuator import Actuator
from torchrelay.scheduler.desk import Clock, Desk
from torchrelay.scheduler.epoch import Epoch
from torchrelay.scheduler.explain import Explain
from torchrelay.scheduler.history import History
from torchrelay.scheduler.past import Past
from torchrelay.scheduler.peers import Peers
from torchrelay.scheduler.policy import Policy
from torchrelay.scheduler.servicer import SchedulerServicer
from torchrelay.scheduler.settings import SchedulerSettings
from torchrelay.scheduler.streams import AdmitStreams
from torchrelay.scheduler.ticketing import Ticketing
from torchrelay.scheduler.watch import Watcher

_TICK_S = 0.1
_STALL_S = 1.0  # a loop that stood still this long may have reports unread


@asynccontextmanager
async def serving(settings: SchedulerSettings) -> AsyncIterator[Addresses]:
    """Serves until the block is left; a newer scheduler, or a fault of its own, raises out of it."""
    clock, subjects = Clock(), Subjects(settings.nats_prefix)
    nats = await connect(settings.nats_url, "scheduler")
    tls = settings.tls
    peers = Peers(tls)
    server = RpcServer(settings.host, settings.port, tls)
    try:
        await ensure_streams(nats.jetstream(), subjects)
        desk, history = _desk(settings, clock, nats, subjects)
        servicer = SchedulerServicer(desk, Past(nats.jetstream(), subjects))
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, server.server)
        async with asyncio.TaskGroup() as group:
            ready = asyncio.Event()
            background = group.create_task(_background(desk, history, peers, nats, subjects, ready))
            await ready.wait()
            await server.start()
            try:
                yield {"grpc": f"{settings.reach_host}:{server.port}"}
            finally:
                desk.streams.close()
                await server.stop()
                background.cancel()
    finally:
        await peers.close()
        await nats.close()


def _desk(settings: SchedulerSettings, clock: Clock, nats: Client, subjects: Subjects) -> tuple[Desk, History]:
    history = History(nats.jetstream(), subjects)
    desk = Desk(
        policy=Policy(settings.rules, partial(new_id, "inst"), clock.now()),
        clock=clock,
        epoch=Epoch(clock.now()),
        # A stream holds an answer for each of its requests at most a few times over.
        streams=AdmitStreams(max_queued=4 * settings.queue_limit_total),
        ticketing=Ticketing(bytes.fromhex(settings.cluster_key)),
        explain=Explain(),
        history=history,
    )
    return desk, history


async def _background(
    desk: Desk, history: History, peers: Peers, nats: Client, subjects: Subjects, ready: asyncio.Event
) -> None:
    """Everything that runs beside the RPCs; cancelled as one."""
    async with asyncio.TaskGroup() as tasks:
        desk.actuator = Actuator(desk, peers, tasks)
        watcher = Watcher(desk, peers, nats, subjects, tasks)
        await watcher.start()
        tasks.create_task(history.run(), name="history")
        tasks.create_task(_ticking(desk, nats), name="ticks")
        ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            watcher.stop()
            desk.actuator.stop()


async def _ticking(desk: Desk, nats: Client) -> None:
    """The timer of timeouts. While the broker is away, or the loop stood still, silence means nothing."""
    last = heard_since = desk.clock.now()
    while True:
        await asyncio.sleep(_TICK_S)
        now = desk.clock.now()
        if not nats.is_connected or now - last > _STALL_S:
            heard_since = now
        last = now
        desk.tick(heard_since)


def main() -> None:
    settings = load_settings(SchedulerSettings, "torchrelay-scheduler")
    run_service("scheduler", settings, partial(serving, settings))
