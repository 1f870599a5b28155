"""The gateway process: builds and wires all parts, serves, and shuts down in order."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
import uvloop

from torchrelay.common.errors import DiskFull, Unavailable
from torchrelay.common.ids import new_id
from torchrelay.common.net.rpc import RpcServer, open_channel
from torchrelay.common.process.heap import keep_heap_small
from torchrelay.common.process.service import Addresses, run_service
from torchrelay.common.process.settings import load_settings
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.auth.api_keys import ApiKeys, load_pepper
from torchrelay.gateway.auth.tenants import Tenants
from torchrelay.gateway.background import background
from torchrelay.gateway.billing.heartbeat import Heartbeat
from torchrelay.gateway.billing.ledger import Ledger
from torchrelay.gateway.billing.orphan_sweep import OrphanSweep
from torchrelay.gateway.billing.prices import Prices
from torchrelay.gateway.catalog.catalog import Catalog, ScalingSettings
from torchrelay.gateway.catalog.garbage_collection import collect_garbage
from torchrelay.gateway.catalog.uploads import Uploads
from torchrelay.gateway.clients.param_store import StoreClient
from torchrelay.gateway.clients.scheduler import SchedulerClient
from torchrelay.gateway.http.dependencies import Services
from torchrelay.gateway.http.rest_app import make_app
from torchrelay.gateway.http.router import AsgiRouter
from torchrelay.gateway.http.server import http_server
from torchrelay.gateway.limits.limiter import Limiter
from torchrelay.gateway.nats_events import NatsEvents
from torchrelay.gateway.settings import GatewaySettings
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.schema import ensure_schema
from torchrelay.gateway.sql.table_versions import TableVersions
from torchrelay.gateway.token_path import TokenPath, open_token_path
from torchrelay.inference.v1.inference_pb2_grpc import add_InferenceServicer_to_server

log = get_logger(__name__)
GC_THRESHOLD = 20_000  # allocations between young collections; a request makes a few hundred
ERROR_DRAIN_S = 1.0  # after the drain, for remaining requests to report why they end


@asynccontextmanager
async def serving(settings: GatewaySettings) -> AsyncIterator[Addresses]:
    """Runs the gateway inside the block; yields its HTTP and gRPC addresses.

    Shutdown reverses startup: servers stop accepting and drain, the token path settles, background jobs end, the ledger
    commits pending writes, this gateway's heartbeat row is deleted, and the database is closed last.
    """
    gateway_id = new_id(settings.gateway_id)  # unique per process, so that the sweep sees the old one as gone
    async with AsyncExitStack() as stack:
        database = Database(settings.database_url)
        stack.push_async_callback(database.close)
        await ensure_schema(database, settings.database_url)
        heartbeat = Heartbeat(database, gateway_id)
        try:
            await heartbeat.beat()
        except DiskFull as error:
            # Requests are refused, with this cause, until there is space; the sweep's first beat soon follows that.
            log.warning("started_with_a_full_disk", error=error.message)
        stack.push_async_callback(_leave, heartbeat)
        components = await _make_components(settings, gateway_id, database, stack)
        await stack.enter_async_context(_jobs(settings, database, heartbeat, components))
        token_path = await stack.enter_async_context(
            open_token_path(
                settings,
                gateway_id,
                keys=components.services.keys,
                catalog=components.services.catalog,
                ledger=components.ledger,
                limits=components.limits,
                scheduler=components.scheduler_channel,
                store=components.store_channel,
            )
        )
        addresses = await stack.enter_async_context(_servers(settings, token_path, components.services))
        # Everything allocated so far lives as long as the process; frozen, it is not traversed under load.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        yield {**addresses, "gateway_id": gateway_id}


@asynccontextmanager
async def _servers(settings: GatewaySettings, token_path: TokenPath, services: Services) -> AsyncIterator[Addresses]:
    """The HTTP and gRPC servers, which drain together. Requests that outlast the drain end with an error."""
    # No TLS here: tenants connect through an ingress, whose names and certificates are not the cluster's.
    app = AsgiRouter(token_path.asgi, make_app(services), settings.max_body_bytes)
    async with http_server(app, settings.host, settings.http_port, settings.drain_s + ERROR_DRAIN_S) as http:
        rpc = RpcServer(settings.host, settings.grpc_port)
        add_InferenceServicer_to_server(token_path.servicer, rpc.server)
        await rpc.start()
        try:
            host = settings.advertised_host
            yield {"http": f"http://{host}:{http.port}", "grpc": f"{host}:{rpc.port}"}
        finally:
            http.stop_accepting()
            await asyncio.gather(
                rpc.stop(settings.drain_s + ERROR_DRAIN_S), token_path.pipeline.drain(settings.drain_s, ERROR_DRAIN_S)
            )


@dataclass(frozen=True, slots=True)
class _Components:
    services: Services
    ledger: Ledger
    limits: Limiter
    nats_events: NatsEvents
    store: StoreClient
    scheduler_channel: grpc.aio.Channel
    store_channel: grpc.aio.Channel


async def _make_components(
    settings: GatewaySettings, gateway_id: str, database: Database, stack: AsyncExitStack
) -> _Components:
    table_versions = TableVersions(database, settings.confirm_s)
    nats_events = NatsEvents(
        settings.nats_url, settings.nats_prefix, gateway_id, table_versions.invalidate, settings.nats_replicas
    )
    keys = ApiKeys(
        database,
        table_versions,
        await load_pepper(database, settings.key_pepper),
        admin_key=settings.admin_key,
        capacity=settings.cached_keys,
        announce=nats_events.key_revoked,
    )
    prices = Prices(database, table_versions)
    catalog = Catalog(database, table_versions, prices, settings.cached_models)
    tls = settings.tls
    store_channel = await stack.enter_async_context(open_channel(settings.store_address, tls, settings.store_token))
    store = StoreClient(store_channel, settings.store_address)
    scheduler_channel = await stack.enter_async_context(
        open_channel(settings.scheduler_address, tls, settings.scheduler_token)
    )
    services = Services(
        database=database,
        tenants=Tenants(database, table_versions),
        keys=keys,
        catalog=catalog,
        prices=prices,
        uploads=Uploads(database, catalog, store),
        scheduler=SchedulerClient(scheduler_channel, settings.scheduler_address),
        default_scaling=ScalingSettings(settings.idle_timeout_s, settings.max_instances),
        model_changed=nats_events.model_changed,
    )
    ledger = await stack.enter_async_context(Ledger(database))
    limits = Limiter(settings.redis_url, database, settings.reservation_lease_s)
    stack.push_async_callback(limits.close)
    return _Components(services, ledger, limits, nats_events, store, scheduler_channel, store_channel)


def _jobs(
    settings: GatewaySettings, database: Database, heartbeat: Heartbeat, components: _Components
) -> AbstractAsyncContextManager[None]:
    sweep = OrphanSweep(
        database,
        components.ledger,
        heartbeat,
        components.nats_events.registers,
        every_s=settings.heartbeat_s,
        after_s=settings.sweep_after_s,
    )
    collecting = collect_garbage(
        database,
        components.store,
        every_s=settings.housekeeping_s,
        lease_s=settings.upload_lease_s,
        retired_s=settings.retired_version_s,
    )
    return background(components.nats_events.run(), sweep.run(), collecting)


async def _leave(heartbeat: Heartbeat) -> None:
    try:
        await heartbeat.leave()
    except Unavailable as error:
        log.warning("heartbeat_left_behind", error=error.message)  # the other gateways will notice that it has stopped


def main() -> None:
    """The ``torchrelay-gateway`` program."""
    keep_heap_small()
    settings = load_settings(GatewaySettings, "torchrelay-gateway")
    run_service("gateway", settings, lambda: serving(settings), loop_factory=uvloop.new_event_loop)
