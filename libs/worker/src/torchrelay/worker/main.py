"""`torchrelay-worker`: one worker process."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import torch

from torchrelay.common.host.addresses import join_address
from torchrelay.common.host.machine import Machine, check_threads
from torchrelay.common.identity.callers import Caller
from torchrelay.common.net.nats_client import connect_at_start
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.server import RpcServer
from torchrelay.common.process.service import Addresses, Serving, run_service
from torchrelay.common.process.settings import load_settings
from torchrelay.common.process.telemetry import get_logger
from torchrelay.common.process.watchdog import end_process
from torchrelay.control.v1 import worker_pb2_grpc
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.worker.device import gpus_of, locked, resolve_device, with_sizes
from torchrelay.worker.metrics.gpu_metrics import export_gpus
from torchrelay.worker.reporter import Reporter
from torchrelay.worker.servicer import CALLERS, WorkerServicer
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.worker import Worker

log = get_logger(__name__)
_CHECK_INTERVAL_S = 1.0
_MAX_FAULTS = 5


def process_age_s() -> float:
    """Seconds since this process started, imports included; 0 where /proc does not have it."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


@asynccontextmanager
async def running_worker(settings: WorkerSettings) -> AsyncIterator[tuple[Worker, Addresses]]:
    """Runs a worker: engine warmed up, KV pool faulted in, roles registered, reports published."""
    device = resolve_device(settings.device, torch.cuda.device_count(), settings.devices)
    settings = settings.model_copy(update={"device": device})
    machine = Machine.here()
    check_threads(settings.threads, machine)
    torch.set_num_threads(settings.threads or min(torch.get_num_threads(), machine.num_cores))
    tls = settings.tls
    async with AsyncExitStack() as stack:
        gpus = gpus_of(settings)
        stack.enter_context(locked(gpus))
        export_gpus([gpu.uuid for gpu in gpus])
        settings, weights_bytes = with_sizes(settings, gpus, machine)
        nats = await connect_at_start(settings.nats_url, settings.worker_id)
        stack.push_async_callback(nats.close)
        # Usage registers have their own connection: when JetStream cannot store them, NATS stops reading from it.
        usage_nats = await connect_at_start(settings.nats_url, f"{settings.worker_id}-usage")
        stack.push_async_callback(usage_nats.close)
        store_channel = open_channel(settings.store_address, tls, settings.store_token, Caller.STORE)
        channel = await stack.enter_async_context(store_channel)
        worker = Worker(settings, usage_nats, ParamStoreStub(channel), tls, weights_bytes, gpus[0].name if gpus else "")
        worker.engine.start()
        await worker.engine.call(worker.served_by.start)
        worker.holder.start()
        stack.callback(worker.holder.close)  # even if what follows fails
        server = RpcServer(
            settings.host, settings.port, tls, bytes.fromhex(settings.node_key), fault=worker.health_fault
        )
        address = join_address(settings.advertised_host, server.port)
        reporter = Reporter(worker, address)
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(worker, reporter), server.server)
        server.allow(CALLERS)
        for role in worker.roles:
            role.register(server)
            await stack.enter_async_context(role.serving())
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        worker.task_group = tasks
        background = [tasks.create_task(reporter.run(nats)), tasks.create_task(worker.usage.run())]
        worker.step_metrics.slot_start_s = process_age_s()
        await server.start()
        try:
            yield worker, {"grpc": address, "data": worker.data_address}
        finally:
            await worker.slot.close()
            await server.stop()
            for task in background:
                task.cancel()
            await worker.close()


@asynccontextmanager
async def watched_engine(worker: Worker) -> AsyncIterator[None]:
    """Ends a worker whose engine hangs inside the block, unless its watchdog is off: nothing else may replace it."""
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(_end_when_hung(worker)) if worker.settings.watchdog_s else None
        yield
        if watch is not None:
            watch.cancel()


async def _end_when_hung(worker: Worker) -> None:
    num_faults = 0
    while True:
        await asyncio.sleep(_CHECK_INTERVAL_S)
        # Several faults in a row: at the first check after a pause of the whole process the engine has not advanced
        # either.
        num_faults = num_faults + 1 if (fault := await worker.fault()) else 0
        if num_faults == _MAX_FAULTS:
            log.error("worker_hangs", fault=fault)
            end_process()


@asynccontextmanager
async def serving(settings: WorkerSettings) -> AsyncIterator[Serving]:
    """``running_worker`` with the signature that ``run_service`` needs."""
    async with running_worker(settings) as (worker, addresses), watched_engine(worker):
        # Imported modules are never freed, and a full collection walks them for 50 ms, perhaps during a cold start.
        gc.collect()
        gc.freeze()
        yield Serving(addresses, worker.leave)


def main() -> None:
    """Entry point of `torchrelay-worker`."""
    settings = load_settings(WorkerSettings, "torchrelay-worker")
    run_service("worker", settings, lambda: serving(settings))
