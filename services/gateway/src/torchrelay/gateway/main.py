"""The gateway process: everything made, wired, served, and ended in order."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
import uvloop

from torchrelay.common.errors import Unavailable
from torchrelay.common.heap import keep_heap_small
from torchrelay.common.ids import new_id
from torchrelay.common.rpc import RpcServer, open_channel
from torchrelay.common.service import Addresses, run_service
from torchrelay.common.settings import load_settings
from torchrelay.common.telemetry import get_logger
from torchrelay.gateway.background import background
from torchrelay.gateway.catalogue import Catalogue, Scaling
from torchrelay.gateway.freshness import TableVersions
from torchrelay.gateway.front import Front
from torchrelay.gateway.heartbeat import Heartbeat
from torchrelay.gateway.http_server import http_server
from torchrelay.gateway.inference.door import InferenceDoor
from torchrelay.gateway.keys import Keys, load_pepper
from torchrelay.gateway.ledger import Ledger
from torchrelay.gateway.limits import Limits
from torchrelay.gateway.prices import Prices
from torchrelay.gateway.rest.app import make_app
from torchrelay.gateway.rest.services import Services
from torchrelay.gateway.retire import Housekeeping
from torchrelay.gateway.scheduler_client import SchedulerClient
from torchrelay.gateway.settings import GatewaySettings
from torchrelay.gateway.signals import Signals
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.migrate import ensure_schema
from torchrelay.gateway.store import StoreClient
from torchrelay.gateway.sweep import Sweep
from torchrelay.gateway.tenants import Tenants
from torchrelay.gateway.uploads import Uploads
from torchrelay.inference.v1.inference_pb2_grpc import add_InferenceServicer_to_server

log = get_logger(__name__)
GC_ALLOCATIONS = 20_000  # container objects between collections of the youngest; a request makes some hundred
END_S = 1.0  # after the drain: how long what still runs has to say why it ends


@asynccontextmanager
async def serving(settings: GatewaySettings) -> AsyncIterator[Addresses]:
    """The gateway at work; its HTTP and gRPC addresses.

    Left in the reverse order of making: servers stop accepting and drain, the token path settles, the background jobs
    end, the ledger commits what waits, this gateway's heartbeat is taken away, and SQL is closed last.
    """
    gateway_id = new_id(settings.gateway_id)  # a restart is another gateway: the sweep must see the old one gone
    async with AsyncExitStack() as stack:
        database = Database(settings.database_url)
        stack.push_async_callback(database.close)
        await ensure_schema(database, settings.database_url)
        heartbeat = Heartbeat(database, gateway_id)
        await heartbeat.beat()
        stack.push_async_callback(_leave, heartbeat)
        parts = await _make_parts(settings, gateway_id, database, stack)
        await stack.enter_async_context(_jobs(settings, database, heartbeat, parts))
        door = await stack.enter_async_context(
            InferenceDoor(
                settings,
                gateway_id=gateway_id,
                keys=parts.services.keys,
                catalogue=parts.services.catalogue,
                ledger=parts.ledger,
                limits=parts.limits,
                scheduler=parts.scheduler_channel,
                store=parts.store_channel,
            )
        )
        addresses = await stack.enter_async_context(_servers(settings, door, parts.services))
        # What is alive now stays alive: the collector need not walk it again and again under load.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_ALLOCATIONS)
        yield {**addresses, "gateway_id": gateway_id}


@asynccontextmanager
async def _servers(settings: GatewaySettings, door: InferenceDoor, services: Services) -> AsyncIterator[Addresses]:
    """Both doors, which drain together at the end. What outlasts the drain ends with an error that says why.

    They speak no TLS: for tenants that is the ingress's, whose names and certificates are not the cluster's.
    """
    app = Front(door.asgi, make_app(services), settings.max_body_bytes)
    async with http_server(app, settings.host, settings.http_port, settings.drain_s + END_S) as http:
        rpc = RpcServer(settings.host, settings.grpc_port)
        add_InferenceServicer_to_server(door.servicer, rpc.server)
        await rpc.start()
        try:
            host = settings.reach_host
            yield {"http": f"http://{host}:{http.port}", "grpc": f"{host}:{rpc.port}"}
        finally:
            http.stop_accepting()
            await asyncio.gather(rpc.stop(settings.drain_s + END_S), door.intake.drain(settings.drain_s, END_S))


@dataclass(frozen=True, slots=True)
class _Parts:
    services: Services
    ledger: Ledger
    limits: Limits
    signals: Signals
    store: StoreClient
    scheduler_channel: grpc.aio.Channel
    store_channel: grpc.aio.Channel


async def _make_parts(settings: GatewaySettings, gateway_id: str, database: Database, stack: AsyncExitStack) -> _Parts:
    freshness = TableVersions(database, settings.confirm_s)
    signals = Signals(settings.nats_url, settings.nats_prefix, gateway_id, freshness.doubt)
    keys = Keys(
        database,
        freshness,
        await load_pepper(database, settings.key_pepper),
        admin_key=settings.admin_key,
        capacity=settings.cached_keys,
        announce=signals.key_revoked,
    )
    prices = Prices(database, freshness)
    catalogue = Catalogue(database, freshness, prices, settings.cached_models)
    tls = settings.tls
    store_channel = open_channel(settings.store_address, tls)
    stack.push_async_callback(store_channel.close)
    store = StoreClient(store_channel, settings.store_address)
    scheduler_channel = open_channel(settings.scheduler_address, tls)
    stack.push_async_callback(scheduler_channel.close)
    services = Services(
        database=database,
        tenants=Tenants(database, freshness),
        keys=keys,
        catalogue=catalogue,
        prices=prices,
        uploads=Uploads(database, catalogue, store),
        scheduler=SchedulerClient(scheduler_channel, settings.scheduler_address),
        default_scaling=Scaling(settings.idle_timeout_s, settings.max_instances),
        model_changed=signals.model_changed,
    )
    ledger = await stack.enter_async_context(Ledger(database))
    limits = Limits(settings.redis_url, database, settings.reservation_lease_s)
    stack.push_async_callback(limits.close)
    return _Parts(services, ledger, limits, signals, store, scheduler_channel, store_channel)


@asynccontextmanager
async def _jobs(
    settings: GatewaySettings, database: Database, heartbeat: Heartbeat, parts: _Parts
) -> AsyncIterator[None]:
    sweep = Sweep(
        database,
        parts.ledger,
        heartbeat,
        parts.signals.registers,
        every_s=settings.heartbeat_s,
        after_s=settings.sweep_after_s,
    )
    housekeeping = Housekeeping(
        database,
        parts.store,
        every_s=settings.housekeeping_s,
        lease_s=settings.upload_lease_s,
        retired_s=settings.retired_version_s,
    )
    async with background(parts.signals.run(), sweep.run(), housekeeping.run()):
        yield


async def _leave(heartbeat: Heartbeat) -> None:
    try:
        await heartbeat.leave()
    except Unavailable as error:
        log.warning("heartbeat_left_behind", error=error.message)  # the others notice that it stands still


def main() -> None:
    """The ``torchrelay-gateway`` program."""
    keep_heap_small()
    settings = load_settings(GatewaySettings, "torchrelay-gateway")
    run_service("gateway", settings, lambda: serving(settings), loop_factory=uvloop.new_event_loop)
