"""The gateway process: builds and wires all parts, serves, and shuts down in order."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import uvloop

from torchrelay.common.errors import DiskFull
from torchrelay.common.health import Ask, Health
from torchrelay.common.host.addresses import join_address
from torchrelay.common.identity.callers import Caller
from torchrelay.common.ids import new_id
from torchrelay.common.net.probes import GrpcProbe, RedisProbe
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.process.heap import keep_heap_small, return_free_memory
from torchrelay.common.process.service import Serving, run_service
from torchrelay.common.process.settings import load_settings
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.auth.api_keys import ApiKeys, load_pepper
from torchrelay.gateway.auth.identities import Identities
from torchrelay.gateway.auth.operators import Operators
from torchrelay.gateway.auth.tenants import Tenants
from torchrelay.gateway.background import all_ended, background, repeat
from torchrelay.gateway.batches.files import Files
from torchrelay.gateway.batches.line_call import BatchCatalog
from torchrelay.gateway.batches.runner import BatchRunner, LineLimits
from torchrelay.gateway.batches.table import Batches
from torchrelay.gateway.billing.heartbeat import Heartbeat
from torchrelay.gateway.billing.invoices import Invoices
from torchrelay.gateway.billing.ledger import Ledger
from torchrelay.gateway.billing.orphan_sweep import OrphanSweep
from torchrelay.gateway.billing.prices import Prices
from torchrelay.gateway.catalog.catalog import Catalog
from torchrelay.gateway.catalog.garbage_collection import collect_garbage
from torchrelay.gateway.catalog.uploads import UploadLimits, Uploads
from torchrelay.gateway.clients.param_store import StoreClient
from torchrelay.gateway.clients.scheduler import SchedulerClient
from torchrelay.gateway.console.asgi_app import ConsoleApp
from torchrelay.gateway.console.live_feed import EVERY_S, LiveFeed
from torchrelay.gateway.core import PublishedModel
from torchrelay.gateway.grants import parse_grants
from torchrelay.gateway.grpc.server import public_grpc_server
from torchrelay.gateway.http.cors import CorsApp
from torchrelay.gateway.http.dependencies import ModelChanged, Services
from torchrelay.gateway.http.idempotency import IdempotentApp, forget_old_answers
from torchrelay.gateway.http.rest_app import make_app, public_pages
from torchrelay.gateway.http.router import AsgiRouter
from torchrelay.gateway.http.server import LAST_REQUEST_S, http_server
from torchrelay.gateway.inference.execution.minimums import announce_minimums
from torchrelay.gateway.limits.change_rate import ChangeRate
from torchrelay.gateway.limits.connection_shares import ConnectionShares, connection_shares
from torchrelay.gateway.limits.limiter import Limiter
from torchrelay.gateway.nats_events import NatsEvents
from torchrelay.gateway.settings import GatewaySettings
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.schema import ensure_schema
from torchrelay.gateway.sql.table_versions import TableVersions
from torchrelay.gateway.token_path import TokenPath, open_token_path
from torchrelay.gateway.webhooks.budget_warnings import warn_of_budgets
from torchrelay.gateway.webhooks.delivery import deliver_due
from torchrelay.gateway.webhooks.webhooks import Webhooks

log = get_logger(__name__)
GC_THRESHOLD = 20_000  # allocations between young collections; a request makes a few hundred
POSTGRESQL_QUERIES = 4  # at once, of 10 connections; SQLite has two, of which authentication needs one
MINIMUMS_EVERY_S = 5.0  # between looks at which models have a minimum of instances
IDEMPOTENT_PATHS = frozenset(
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages", "batches", "adjustments")
)
LAST_USES_EVERY_S = 30.0
BUDGETS_EVERY_S = 15.0
WEBHOOKS_EVERY_S = 1.0
END_S = 1.0  # for the remaining requests to report why they end


@asynccontextmanager
async def serving(settings: GatewaySettings) -> AsyncIterator[Serving]:
    """Runs the gateway inside the block; yields its HTTP and gRPC addresses.

    Shutdown reverses startup: servers end what still runs, the token path settles, background jobs end, the ledger
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
        stack.push_async_callback(heartbeat.leave)
        components = await _make_components(settings, gateway_id, database, stack)
        await stack.enter_async_context(_jobs(settings, database, heartbeat, components))
        token_path = await stack.enter_async_context(
            open_token_path(
                settings,
                gateway_id,
                keys=components.identities,
                catalog=components.services.catalog,
                ledger=components.ledger,
                limits=components.limits,
                shares=components.shares,
                scheduler=components.scheduler_channel,
                store=components.store_channel,
                fault=components.services.health.fault,
            )
        )
        announcing = announce_minimums(
            components.services.catalog.with_minimum, token_path.admissions, MINIMUMS_EVERY_S
        )
        await stack.enter_async_context(background(announcing))
        services = replace(components.services, model_changed=_model_changed(components.nats_events, token_path))
        runner = _batch_runner(settings, gateway_id, services, token_path)
        await stack.enter_async_context(background(runner.run()))
        served = await stack.enter_async_context(
            _servers(
                settings,
                token_path,
                services,
                components.shares,
                components.identities,
                gateway_id,
                runner.stop,
            )
        )
        # Everything allocated so far lives as long as the process; frozen, it is not traversed under load.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        yield replace(served, addresses={**served.addresses, "gateway_id": gateway_id})


def _batch_runner(settings: GatewaySettings, gateway_id: str, services: Services, token_path: TokenPath) -> BatchRunner:
    limits = LineLimits(settings.batch_lines_at_once, settings.max_batch_lines_at_once, settings.max_body_bytes)
    return BatchRunner(
        services.batches,
        services.files,
        token_path.apps,
        token_path.pipeline,
        BatchCatalog(services.catalog, services.prices),
        services.keys.caller_of,
        gateway_id,
        limits,
    )


def _model_changed(nats_events: NatsEvents, token_path: TokenPath) -> ModelChanged:
    """Tells the history, and of a deletion the scheduler too."""

    async def changed(kind: str, name: str, model: PublishedModel | None) -> None:
        if kind == "deleted":
            token_path.admissions.model_deleted(name)
        await nats_events.model_changed(kind, name, model)

    return changed


@asynccontextmanager
async def _servers(
    settings: GatewaySettings,
    token_path: TokenPath,
    services: Services,
    shares: ConnectionShares,
    identities: Identities,
    gateway_id: str,
    stop_batches: Callable[[], None],
) -> AsyncIterator[Serving]:
    """The HTTP and gRPC servers, which leave together. Requests that outlast the grace end with an error."""
    # No TLS here: tenants connect through an ingress, whose names and certificates are not the cluster's.
    rest = make_app(services)
    pages = public_pages(rest, services.health)
    router = AsgiRouter(token_path.apps, pages, rest, identities, shares)
    once = IdempotentApp(
        router, IDEMPOTENT_PATHS, identities, shares, services.database, gateway_id, settings.max_body_bytes
    )
    feed = LiveFeed(
        services.database, services.catalog, services.scheduler, services.health, token_path.pipeline.first_tokens
    )
    console = ConsoleApp(once, feed, identities, shares)
    app = CorsApp(console, settings.allowed_origins) if settings.allowed_origins else console
    async with (
        background(repeat("console", feed.refresh, EVERY_S)),
        background(repeat("idempotency", lambda: forget_old_answers(services.database), settings.housekeeping_s)),
        http_server(
            app,
            settings.host,
            settings.http_port,
            settings.grace_s,
            settings.idle_connection_s,
            settings.answer_silence_s,
        ) as http,
    ):
        rpc = public_grpc_server(settings, services.health.fault)
        for servicer in token_path.servicers:
            servicer.add_to(rpc.server)
        await rpc.start()

        async def leave(grace_s: float) -> None:
            services.health.leave("gateway")
            stop_batches()
            feed.close()
            http.stop_accepting()
            await all_ended(rpc.stop(grace_s), drain(max(grace_s - END_S, 0.0)))

        async def drain(drain_s: float) -> None:
            await http.last_requests()
            await token_path.pipeline.drain(drain_s - LAST_REQUEST_S, END_S)

        try:
            host = settings.advertised_host
            addresses = {"http": f"http://{join_address(host, http.port)}", "grpc": join_address(host, rpc.port)}
            yield Serving(addresses, leave)
        finally:
            feed.close()
            http.stop_accepting()
            await all_ended(rpc.stop(END_S), token_path.pipeline.stop_all(END_S))


@dataclass(frozen=True, slots=True)
class _Components:
    services: Services
    identities: Identities
    ledger: Ledger
    limits: Limiter
    shares: ConnectionShares
    nats_events: NatsEvents
    scheduler_channel: grpc.aio.Channel
    store_channel: grpc.aio.Channel


async def _make_components(
    settings: GatewaySettings, gateway_id: str, database: Database, stack: AsyncExitStack
) -> _Components:
    table_versions = TableVersions(database, settings.confirm_s)
    nats_events = NatsEvents(
        settings.nats_url, settings.nats_prefix, gateway_id, table_versions.invalidate, settings.nats_replicas
    )
    pepper = await load_pepper(database, settings.key_pepper)
    keys = ApiKeys(
        database,
        table_versions,
        pepper,
        admin_key=settings.admin_key,
        capacity=settings.cached_keys,
        announce=nats_events.key_revoked,
    )
    operators, tenants = Operators(database, table_versions, pepper), Tenants(database, table_versions)
    tokens = None
    if settings.oidc_issuer:
        # With joserfc and cryptography 8 MB, which installations without an issuer never need.
        from torchrelay.gateway.auth.oidc import OidcTokens

        grants = parse_grants(settings.oidc_grants)
        tokens = OidcTokens(settings.oidc_issuer, settings.oidc_audience, grants, tenants, table_versions)
    prices = Prices(database, table_versions)
    catalog = Catalog(database, table_versions, prices, settings.cached_models, retired_s=settings.retired_version_s)
    tls = settings.tls
    store_channel = await stack.enter_async_context(
        open_channel(settings.store_address, tls, settings.store_token, Caller.STORE)
    )
    store = StoreClient(store_channel, settings.store_address)
    scheduler_channel = await stack.enter_async_context(
        open_channel(settings.scheduler_address, tls, settings.scheduler_token, Caller.SCHEDULER)
    )
    others: dict[str, Ask] = {
        "scheduler": GrpcProbe(scheduler_channel).ask,
        "param-store": GrpcProbe(store_channel).ask,
        "nats": nats_events.ask,
    }
    if settings.redis_url:  # by a connection of its own: without limits no client of Redis is imported
        redis = RedisProbe(settings.redis_url)
        stack.push_async_callback(redis.close)
        others["redis"] = redis.ask
    health = Health({"database": database.ask}, others)
    stack.push_async_callback(health.close)
    files = Files(database, store, settings.max_files)
    shares = connection_shares(settings, queries_at_once=1 if database.is_sqlite else POSTGRESQL_QUERIES)
    limits = Limiter(settings.redis_url, database, settings.reservation_lease_s)
    stack.push_async_callback(limits.close)
    services = Services(
        database=database,
        tenants=tenants,
        operators=operators,
        webhooks=Webhooks(database),
        keys=keys,
        limits=limits,
        catalog=catalog,
        prices=prices,
        registers=nats_events.registers,
        invoices=Invoices(database),
        uploads=Uploads(
            database,
            catalog,
            store,
            UploadLimits(settings.max_open_uploads, settings.open_upload_bytes_per_tenant, settings.upload_lease_s),
        ),
        files=files,
        batches=Batches(database, files, settings.max_open_batches, settings.batch_window_s),
        store=store,
        scheduler=SchedulerClient(scheduler_channel, settings.scheduler_address),
        queries=shares.queries,
        lists=shares.lists,
        explanations=shares.explanations,
        changes=ChangeRate(),
        default_idle_timeout_s=settings.idle_timeout_s,
        default_max_instances=settings.max_instances,
        health=health,
        model_changed=nats_events.model_changed,
    )
    ledger = await stack.enter_async_context(Ledger(database))
    return _Components(
        services,
        Identities(keys, operators, tokens),
        ledger,
        limits,
        shares,
        nats_events,
        scheduler_channel,
        store_channel,
    )


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
        components.services.store,
        components.services.uploads,
        every_s=settings.housekeeping_s,
        lease_s=settings.upload_lease_s,
        retired_s=settings.retired_version_s,
    )
    lease_s, every_s = settings.upload_lease_s, settings.housekeeping_s
    files, batches = components.services.files, components.services.batches
    tidying = repeat("files", lambda: files.drop_abandoned(lease_s), every_s)
    clearing = repeat("results", batches.clear_ended, every_s)
    beating = heartbeat.run(settings.heartbeat_s, timeout_s=settings.sweep_after_s / 2)
    noting_uses = repeat("last_uses", components.services.keys.write_last_uses, LAST_USES_EVERY_S)
    services, warned = components.services, components.nats_events.budget_warned
    warning = repeat("budgets", lambda: warn_of_budgets(database, warned), BUDGETS_EVERY_S)
    delivering = repeat("webhooks", lambda: deliver_due(services.webhooks, database), WEBHOOKS_EVERY_S)
    forgetting = repeat("webhooks", services.webhooks.forget_old, every_s)
    rounds = beating, sweep.run(), collecting, tidying, clearing, noting_uses, warning, delivering, forgetting
    return background(components.nats_events.run(), *rounds, return_free_memory())


def main() -> None:
    """The ``torchrelay-gateway`` program."""
    keep_heap_small()
    settings = load_settings(GatewaySettings, "torchrelay-gateway")
    run_service("gateway", settings, lambda: serving(settings), loop_factory=uvloop.new_event_loop)
