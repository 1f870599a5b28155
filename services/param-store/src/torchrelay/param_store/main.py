"""`torchrelay-param-store`: a store process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from torchrelay.common.health import Health
from torchrelay.common.host.addresses import join_address
from torchrelay.common.net.rpc.server import RpcServer
from torchrelay.common.process.service import Addresses, run_service
from torchrelay.common.process.settings import load_settings
from torchrelay.control.v1 import param_store_pb2_grpc
from torchrelay.param_store.background_tasks import expire_uploads, fill_disk_cache, publish_reports, release_recovered
from torchrelay.param_store.grpc.servicer import CALLERS, ParamStoreServicer
from torchrelay.param_store.metrics import export_metrics
from torchrelay.param_store.settings import StoreSettings
from torchrelay.param_store.storage_checks import ASK_EVERY_S, SILENT_S, storage_checks
from torchrelay.param_store.store import Store

Work = Callable[[Store], Coroutine[Any, Any, None]]


@asynccontextmanager
async def serving(
    settings: StoreSettings,
    background: tuple[Work, ...] = (publish_reports, expire_uploads, release_recovered, fill_disk_cache),
) -> AsyncIterator[Addresses]:
    """Runs a store: arena, data plane, gRPC, then the background tasks."""
    async with AsyncExitStack() as stack:
        store = Store(settings, asyncio.get_running_loop())
        stack.push_async_callback(asyncio.to_thread, store.close)
        await asyncio.to_thread(store.start)
        export_metrics(store)
        health = Health(storage_checks(store), {}, silent_s=SILENT_S, ask_every_s=ASK_EVERY_S)
        stack.push_async_callback(health.close)
        node_key = bytes.fromhex(settings.node_key)
        server = RpcServer(settings.host, settings.port, settings.tls, node_key, fault=health.fault)
        store.grpc_address = join_address(settings.advertised_host, server.port)
        param_store_pb2_grpc.add_ParamStoreServicer_to_server(ParamStoreServicer(store), server.server)
        server.allow(CALLERS)
        await server.start()
        stack.push_async_callback(server.stop)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        running = [tasks.create_task(work(store)) for work in background]
        try:
            yield {"grpc": store.grpc_address, "data": store.data_address}
        finally:
            for task in running:
                task.cancel()


def main() -> None:
    """Entry point of `torchrelay-param-store`."""
    settings = load_settings(StoreSettings, "torchrelay-param-store")
    run_service("param-store", settings, lambda: serving(settings), stop_limit_s=settings.stop_limit_s)
