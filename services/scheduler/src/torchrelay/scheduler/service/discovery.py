"""Discovers workers and stores from load reports on the broker, then watches each by a stream.

A stream brings every change of a slot or a copy at once, and beats between them. It carries our epoch there, so that
an older scheduler learns of us and loses its streams, even if neither commands anything. A worker that shuts down ends
its stream. When a stream breaks, the peer's port shows whether the process is gone: then the peer is lost at once, else
after three seconds without a word on either road. The stream to a lost peer is tried again for a while: one that only
hung comes back without the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import UnaryStreamCall
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchrelay.common.liveness import SILENT_S
from torchrelay.common.net.nats_client import Subjects
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import param_store_pb2, worker_pb2
from torchrelay.control.v1.reports_pb2 import StoreReport, WorkerReport
from torchrelay.scheduler.policy.inputs import StoreGone, WorkerGone, WorkerStopped, WorkerStreamClosed
from torchrelay.scheduler.service.controller import Clock, Controller
from torchrelay.scheduler.service.peer_channels import PeerChannels, is_refused
from torchrelay.scheduler.service.repeats import Repeats
from torchrelay.scheduler.service.report_check import ReportCheck, node_id

log = get_logger(__name__)

_BEAT_S = 1.0  # there are thousands of peers, and each is heard on NATS too
_RETRY_S = 0.1
_MAX_RETRY_S = 1.0  # for a peer that is lost, or whose streams end soon
_AWAY_S = 60.0  # then only the broker can bring it back

Report = TypeVar("Report", WorkerReport, StoreReport)


@dataclass(frozen=True)
class _Watch:
    incarnation: str
    task: asyncio.Task[None]


class Discovery:
    """Owns one watching task per peer; ``tasks`` ends them."""

    def __init__(
        self,
        controller: Controller,
        channels: PeerChannels,
        nats: Client,
        subjects: Subjects,
        report_check: ReportCheck,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._controller = controller
        self._channels = channels
        self._nats = nats
        self._subjects = subjects
        self._report_check = report_check
        self._tasks = tasks
        self._stopped = False
        self._repeats = Repeats()
        self._watches: dict[str, _Watch] = {}  # by "worker <id>" or "store <id>"

    async def start(self) -> None:
        await self._nats.subscribe(self._subjects.worker_load(), cb=self._on_worker)
        await self._nats.subscribe(self._subjects.store_load(), cb=self._on_store)

    def stop(self) -> None:
        """Ignores further reports: the task group is closing."""
        self._stopped = True

    async def _on_worker(self, message: Msg) -> None:
        if not self._stopped and self._repeats.is_one(message) and self._controller.worker_repeated(node_id(message)):
            return
        report = self._apply(WorkerReport, message, partial(self._controller.worker_reported, streamed=False))
        if report is not None and report.worker_id in self._controller.policy.state.membership.workers:
            self._watch(f"worker {report.worker_id}", report.incarnation, lambda: self._watch_worker(report))

    async def _on_store(self, message: Msg) -> None:
        if not self._stopped and self._repeats.is_one(message) and self._controller.store_repeated(node_id(message)):
            return
        report = self._apply(StoreReport, message, partial(self._controller.store_reported, streamed=False))
        if report is not None and report.store_id in self._controller.policy.state.membership.stores:
            self._watch(f"store {report.store_id}", report.incarnation, lambda: self._watch_store(report))

    def _apply(self, kind: type[Report], message: Msg, apply: Callable[[Report], None]) -> Report | None:
        """The report of a message, once applied; None if it cannot be read or is another's, or reports are ignored."""
        if self._stopped or not self._report_check.is_signed(message):
            return None
        self._repeats.note(message)
        try:
            report = kind.FromString(message.data)
        except DecodeError as error:
            log.warning("report_unreadable", subject=message.subject, error=str(error))
            return None
        claimed_id = report.worker_id if isinstance(report, WorkerReport) else report.store_id
        if not self._report_check.names_its_node(message, claimed_id):
            return None
        try:
            apply(report)
        except Exception as error:
            # The broker's client only logs what a callback raises; an error here must end the service.
            self._stopped = True
            self._tasks.create_task(_fail(error))
        return report

    def _watch(self, name: str, incarnation: str, watch: Callable[[], Coroutine[None, None, None]]) -> None:
        if present := self._watches.get(name):
            if present.incarnation == incarnation and not present.task.done():
                return
            present.task.cancel()
        self._watches[name] = _Watch(incarnation, self._tasks.create_task(watch(), name=f"watch {name}"))

    async def _watch_worker(self, first: WorkerReport) -> None:
        membership, worker_id, address = self._controller.policy.state.membership, first.worker_id, first.grpc_address
        patience = _Patience(self._controller.clock)
        while patience.lasts(worker_id in membership.workers):
            request = worker_pb2.WatchSlotRequest(beat_every_s=_BEAT_S, epoch=self._controller.epoch.value)
            stub = self._channels.worker(address, worker_id)
            stream = _ReportStream(partial(stub.WatchSlot, request), worker_id, patience)
            async with aclosing(stream.reports()) as reports:
                async for report in reports:
                    if report.worker_id != worker_id or report.incarnation != first.incarnation:
                        break  # another process uses the port by now
                    self._controller.worker_reported(report, streamed=True)
                    if worker_id not in membership.workers:
                        break  # only a whole report brings it back, and a stream begins with one
            self._controller.apply(WorkerStreamClosed(worker_id))
            if stream.was_ended or await is_refused(address):
                self._controller.apply(WorkerStopped(worker_id) if stream.was_ended else WorkerGone(worker_id))
                await self._channels.forget(address)
                return
            await asyncio.sleep(patience.next_retry_s())

    async def _watch_store(self, first: StoreReport) -> None:
        membership, store_id, address = self._controller.policy.state.membership, first.store_id, first.grpc_address
        patience = _Patience(self._controller.clock)
        while patience.lasts(store_id in membership.stores):
            request = param_store_pb2.WatchCopiesRequest(beat_every_s=_BEAT_S, epoch=self._controller.epoch.value)
            stub = self._channels.store(address, store_id)
            stream = _ReportStream(partial(stub.WatchCopies, request), store_id, patience)
            async with aclosing(stream.reports()) as reports:
                async for report in reports:
                    if report.store_id != store_id or report.incarnation != first.incarnation:
                        break
                    self._controller.store_reported(report, streamed=True)
                    if store_id not in membership.stores:
                        break
            if await is_refused(address):
                self._controller.apply(StoreGone(store_id))
                await self._channels.forget(address)
                return
            await asyncio.sleep(patience.next_retry_s())


async def _fail(error: Exception) -> None:
    raise error


class _Patience:
    """How long the stream to a peer is tried again: for good while it is present, else for ``_AWAY_S``.

    Ever less often while its streams end soon, as those of a scheduler do that the peer has fenced out.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._away_since: float | None = None
        self._began_at, self._retry_s = 0.0, 0.0

    def lasts(self, is_present: bool) -> bool:
        self._began_at = now = self._clock.now()
        self._away_since = None if is_present else self._away_since or now
        return self._away_since is None or now - self._away_since < _AWAY_S

    @property
    def is_tried(self) -> bool:
        """Whether this stream follows one that ended soon, and has not lasted itself."""
        return self._retry_s > 0 and self._clock.now() - self._began_at < SILENT_S

    def next_retry_s(self) -> float:
        self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S) if self.is_tried else _RETRY_S
        return self._retry_s if self._away_since is None else _MAX_RETRY_S


class _ReportStream(Generic[Report]):
    """A peer's reports until its stream ends or breaks. ``was_ended``: by the peer, because it shuts down."""

    def __init__(self, watch: Callable[[], UnaryStreamCall[Any, Report]], peer: str, patience: _Patience) -> None:
        self._watch: Callable[[], UnaryStreamCall[Any, Report]] = watch
        self._peer, self._patience = peer, patience
        self.was_ended = False

    async def reports(self) -> AsyncGenerator[Report]:
        try:
            call = self._watch()
        except grpc.aio.UsageError:
            return  # the channel was closed
        try:
            async for report in call:
                yield report
        except grpc.aio.AioRpcError as error:
            if not self._patience.is_tried:
                log.info("watch_broken", peer=self._peer, status=error.code().name, detail=error.details())
        except asyncio.CancelledError:
            # Either we are cancelled, or the peer hung and its channel was closed under the call.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
        else:
            self.was_ended = True
        finally:
            call.cancel()
