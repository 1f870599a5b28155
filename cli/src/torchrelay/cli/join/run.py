"""The run of `torchrelay join`, from its enrolment to the stop of its last child."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, nullcontext

from torchrelay.cli.api.scheduler_client import environment_settings
from torchrelay.cli.join.enroll import enroll
from torchrelay.cli.join.folder import NodeFolder
from torchrelay.cli.join.plan import JoinOptions, NodePlan
from torchrelay.cli.join.progress import JoinProgress
from torchrelay.cli.join_file import JoinFile
from torchrelay.cli.up.children.child import ChildSpec
from torchrelay.cli.up.children.stack import Stack
from torchrelay.cli.up.children.supervisor import Supervisor
from torchrelay.cli.up.stop_signals import stop_on_signals
from torchrelay.cli.views.console import out


async def run_join(cluster: JoinFile, options: JoinOptions) -> None:
    """Runs this machine's workers, and its store unless another program does, until a signal stops them."""
    settings = environment_settings()
    plan = NodePlan(cluster, options, settings)
    folder, progress = plan.folder(), JoinProgress(out())
    with ExitStack() as locks:
        for worker_id in plan.worker_ids:
            locks.enter_context(folder.worker_locked(worker_id))
        progress.joins(plan.host_id, cluster.scheduler, folder.path)
        store, *workers = [
            await enroll(cluster, settings.tls, plan.host_id, worker_id, progress.scheduler_away)
            for worker_id in ("", *plan.worker_ids)
        ]
        store_specs, worker_specs = [plan.store(folder, store)], plan.workers(folder, workers)
        stop, end_store = asyncio.Event(), asyncio.Event()
        store_supervisor = Supervisor(_stack(folder, store_specs), progress)
        worker_supervisor = Supervisor(_stack(folder, worker_specs), progress)

        def kill_all() -> None:
            worker_supervisor.kill_all()
            store_supervisor.kill_all()

        stop_on_signals(stop, kill_all)
        async with asyncio.TaskGroup() as tasks:
            keeping_store = tasks.create_task(_keep_store(folder, store_supervisor, end_store))
            await worker_supervisor.run(nullcontext, stop)
            end_store.set()
            await keeping_store
    progress.stopped()


async def _keep_store(folder: NodeFolder, supervisor: Supervisor, end: asyncio.Event) -> None:
    """Runs the store from the moment at which no other program does until ``end``."""
    async with asyncio.TaskGroup() as tasks:

        async def run() -> None:
            async with folder.store_locked():
                owns.set()
                await supervisor.run(nullcontext, end)

        owns = asyncio.Event()
        running = tasks.create_task(run())
        await end.wait()
        if not owns.is_set():
            running.cancel()


def _stack(folder: NodeFolder, specs: list[ChildSpec]) -> Stack:
    no_brokers: tuple[ChildSpec, ...] = ()
    return Stack((no_brokers, tuple(specs)), {}, folder.path)
