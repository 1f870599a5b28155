"""Makes a launcher follow the scheduler's target for the pool of `up`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from contextlib import suppress

import grpc

from torchrelay.cli.launchers.launcher import Launcher, waits_text
from torchrelay.common.identity.callers import Caller
from torchrelay.common.identity.tls import Tls
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import reports_pb2, scheduler_pb2, scheduler_pb2_grpc

KEEP_S = 10.0  # how long a target must be lower before a worker is stopped
ABSENT_S = 120.0  # how long a member that runs may be unknown to the scheduler
_LOOK_EVERY_S = 1.0
_RETRY_S = 0.5
_REPORT_TIMEOUT_S = 5.0


class PoolDriver:
    """Follows the targets of the scheduler at ``address``. While the scheduler is away, nothing changes."""

    def __init__(self, address: str, tls: Tls | None, token: str, launcher: Launcher) -> None:
        self._address, self._tls, self._token, self._launcher = address, tls, token, launcher
        self._view: scheduler_pb2.ClusterView | None = None
        self._stub: scheduler_pb2_grpc.SchedulerAsyncStub | None = None
        self._reported = ""
        self._changed = asyncio.Event()
        self._lower_since: float | None = None
        self._absent_since: dict[str, float] = {}  # members that run and that the scheduler does not know

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_EVERY_S):
                        await self._changed.wait()
                self._changed.clear()
                if self._view is not None:
                    self.follow(self._view, time.monotonic())
                    await self._report()

    def follow(self, view: scheduler_pb2.ClusterView, now: float) -> None:
        """Starts the workers that the target lacks at once; after ``KEEP_S`` with a lower one stops
        workers that wait for a machine, and free ones. Stops workers that the scheduler does not know for ``ABSENT_S``.
        """
        for worker_id in self._absent(view, now):
            self._launcher.retire(worker_id)
        num_wanted = sum(pool.num_wanted for pool in view.pools if pool.num_devices == 1)  # as its workers have
        members = self._launcher.members()
        if num_wanted >= len(members):
            self._lower_since = None
            self._launcher.scale(num_wanted)
            return
        if self._lower_since is None:
            self._lower_since = now
        if now - self._lower_since >= KEEP_S:
            waiting = self._launcher.waiting()
            for worker_id in [*waiting, *free_workers(view, set(members) - set(waiting))][: len(members) - num_wanted]:
                self._launcher.retire(worker_id)

    async def _report(self) -> None:
        """Tells the scheduler why workers wait, if that has changed."""
        waits = waits_text(self._launcher.waiting())
        if waits == self._reported or self._stub is None:
            return
        with suppress(grpc.aio.AioRpcError):  # the next look tries again
            await self._stub.ReportLauncher(scheduler_pb2.LauncherReport(waits=waits), timeout=_REPORT_TIMEOUT_S)
            self._reported = waits

    def _absent(self, view: scheduler_pb2.ClusterView, now: float) -> list[str]:
        """Members that run, and are absent from the view for ``ABSENT_S``: they cannot join, or were lost unnoticed."""
        known = {worker.worker_id for worker in view.workers}.union(self._launcher.waiting())
        absent = [worker_id for worker_id in self._launcher.members() if worker_id not in known]
        self._absent_since = {worker_id: self._absent_since.get(worker_id, now) for worker_id in absent}
        return [worker_id for worker_id, since in self._absent_since.items() if now - since >= ABSENT_S]

    async def _watch(self) -> None:
        async with open_channel(self._address, self._tls, self._token, Caller.SCHEDULER) as channel:
            self._stub = scheduler_pb2_grpc.SchedulerStub(channel)
            while True:
                self._reported = ""  # to this scheduler
                try:
                    async for view in self._stub.WatchCluster(scheduler_pb2.WatchClusterRequest()):
                        self._view = view
                        self._changed.set()
                except grpc.aio.AioRpcError:
                    self._view = None
                await asyncio.sleep(_RETRY_S)


def free_workers(view: scheduler_pb2.ClusterView, members: Collection[str]) -> list[str]:
    """Members whose slot is free by their own report, and for which the scheduler has decided on no load."""
    taken = {instance.worker_id for instance in view.instances}
    free = reports_pb2.SlotState.STATE_FREE
    return [
        worker.worker_id
        for worker in sorted(view.workers, key=lambda worker: worker.worker_id)
        if worker.worker_id in members and worker.worker_id not in taken and worker.slot.state == free
    ]
