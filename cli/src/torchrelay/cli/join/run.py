"""The run of `torchrelay join`, from its enrolment to the stop of its last child."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TypeVar

from torchrelay.cli.environment import environment_settings
from torchrelay.cli.errors import CliError
from torchrelay.cli.join.enroll import enroll
from torchrelay.cli.join.folder import NodeFolder
from torchrelay.cli.join.plan import JoinOptions, NodePlan
from torchrelay.cli.join.progress import JoinProgress
from torchrelay.cli.join_file import JoinFile
from torchrelay.cli.up.children.child import ChildSpec
from torchrelay.cli.up.children.stack import Stack
from torchrelay.cli.up.children.supervisor import Supervisor, first_cause
from torchrelay.cli.up.stop_signals import stop_on_signals
from torchrelay.cli.views.console import out
from torchrelay.common.identity.tls import Tls
from torchrelay.control.v1 import scheduler_pb2

_RETRY_S = 1.0
_T = TypeVar("_T")


async def run_join(cluster: JoinFile, options: JoinOptions) -> None:
    """Runs this machine's workers, and its store unless another program does, until a signal stops them.

    Raises ``CliError``.
    """
    settings = environment_settings()
    plan = NodePlan(cluster, options, settings)
    folder, progress = plan.folder(), JoinProgress(out())
    stop, supervisors = asyncio.Event(), list[Supervisor]()

    def kill_all() -> None:
        for supervisor in supervisors:
            supervisor.kill_all()

    def supervisor_of(specs: list[ChildSpec]) -> Supervisor:
        no_brokers: tuple[ChildSpec, ...] = ()
        supervisors.append(Supervisor(Stack((no_brokers, tuple(specs)), {}, folder.path), progress))
        return supervisors[-1]

    stop_on_signals(stop, kill_all)
    with ExitStack() as locks:
        for worker_id in plan.worker_ids:
            locks.enter_context(folder.worker_locked(worker_id))
        progress.joins(plan.host_id, cluster.scheduler, folder.path)
        try:
            enrolled = await _unless(stop, _enroll_all(cluster, settings.tls, plan, progress))
            if enrolled is not None:
                store, *workers = enrolled
                store_supervisor = partial(supervisor_of, [plan.store(folder, store)])
                end_store = asyncio.Event()
                async with asyncio.TaskGroup() as tasks:
                    keeping = tasks.create_task(_keep_store(folder, store_supervisor, progress, end_store))
                    await supervisor_of(plan.workers(folder, workers)).run(nullcontext, stop)
                    end_store.set()
                    await keeping
        except ExceptionGroup as group:
            raise first_cause(group) from None
    progress.stopped()


async def _enroll_all(
    cluster: JoinFile, tls: Tls | None, plan: NodePlan, progress: JoinProgress
) -> list[scheduler_pb2.EnrollReply]:
    """The credentials of the store and of each worker."""
    ids = ("", *plan.worker_ids)
    return [await enroll(cluster, tls, plan.host_id, worker_id, progress.scheduler_away) for worker_id in ids]


async def _unless(stop: asyncio.Event, work: Coroutine[None, None, _T]) -> _T | None:
    """The result of the work; None if ``stop`` is set before its end."""
    async with asyncio.TaskGroup() as tasks:
        working, stopping = tasks.create_task(work), tasks.create_task(stop.wait())
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        stopping.cancel()
    return None if working.cancelled() else working.result()


async def _keep_store(
    folder: NodeFolder, supervisor: Callable[[], Supervisor], progress: JoinProgress, end: asyncio.Event
) -> None:
    """Runs the store from the moment at which no other program does until ``end``."""
    async with asyncio.TaskGroup() as tasks:

        async def run() -> None:
            async with folder.store_locked() as was_taken:
                owns.set()
                while True:
                    try:
                        return await supervisor().run(nullcontext, end)
                    except CliError as error:
                        if not was_taken:
                            raise
                        progress.failed(error)  # the other's store may not have ended
                        await asyncio.sleep(_RETRY_S)

        owns = asyncio.Event()
        running = tasks.create_task(run())
        await end.wait()
        if not owns.is_set():
            running.cancel()
