"""Discovers workers and stores from load reports on the broker, then watches each by a stream.

A stream delivers every change of a slot or a copy at once, and heartbeats between them. It carries our epoch to the
peer, so that an older scheduler learns of us and loses its streams, even if neither commands anything. A worker that
shuts down ends its stream. When a stream breaks, the peer's port shows whether the process is gone. Then the peer is
lost at once, otherwise after three seconds without a message on the stream or the broker. The stream to a lost peer is
opened again for a while, so that a peer that only hung comes back without the broker.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import grpc
from grpc.aio import UnaryStreamCall
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchrelay.common.cancellation import raise_if_cancelled
from torchrelay.common.liveness import SILENT_S
from torchrelay.common.net.nats_client import Subjects
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import param_store_pb2, worker_pb2
from torchrelay.control.v1.reports_pb2 import StoreReport, WorkerReport
from torchrelay.scheduler.policy.inputs import PeerGone, StreamClosed
from torchrelay.scheduler.policy.types import Peer
from torchrelay.scheduler.service.controller import Clock, Controller, Report
from torchrelay.scheduler.service.converters import peer_of
from torchrelay.scheduler.service.peer_channels import PeerChannels, is_refused
from torchrelay.scheduler.service.signed_reports import SignedReports, node_id

log = get_logger(__name__)

_BEAT_S = 1.0  # there are thousands of peers, and each also reports on NATS
_RETRY_S = 0.1
_MAX_RETRY_S = 1.0  # for a peer that is lost, or whose streams end soon
_AWAY_S = 60.0  # then only the broker can bring it back


class Discovery:
    """Owns a task per peer that watches it."""

    def __init__(
        self,
        controller: Controller,
        channels: PeerChannels,
        nats: Client,
        subjects: Subjects,
        signed_reports: SignedReports,
    ) -> None:
        self._controller, self._channels = controller, channels
        self._nats, self._subjects, self._signed_reports = nats, subjects, signed_reports
        # The error of a report. Cancelled as soon as the group of tasks ends for another reason: it takes no task then.
        self._failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._watches: dict[Peer, tuple[str, asyncio.Task[None]]] = {}  # the incarnation, and what watches it

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Watches peers in tasks of this group, until it ends."""
        self._tasks = tasks
        tasks.create_task(self._fail(), name="failure of a report")
        await self._nats.subscribe(self._subjects.worker_load(), cb=partial(self._on_report, WorkerReport))
        await self._nats.subscribe(self._subjects.store_load(), cb=partial(self._on_report, StoreReport))

    async def _fail(self) -> None:
        """Ends the service if a report fails: the broker's client only logs what a callback raises."""
        raise await self._failure

    async def _on_report(self, kind: type[Report], message: Msg) -> None:
        if self._failure.done():
            return
        peer = Peer(node_id(message), is_store=kind is StoreReport)
        if self._signed_reports.is_repeat(message) and self._controller.repeated(peer):
            return
        report = self._signed_reports.read(kind, message)
        if report is None:
            return
        try:
            self._controller.reported(report, streamed=False)
        except Exception as error:
            self._failure.set_result(error)
            return
        if self._controller.is_accepted(report):
            self._watch(report)

    def _watch(self, report: Report) -> None:
        """Watches the process that reports, unless a task does so already."""
        peer = peer_of(report)
        if peer in self._watches:
            incarnation, task = self._watches[peer]
            if incarnation == report.incarnation and not task.done():
                return
            task.cancel()
        task = self._tasks.create_task(self._watch_peer(report), name=f"watch {peer.node_id}")
        self._watches[peer] = report.incarnation, task

    async def _watch_peer(self, first: Report) -> None:
        peer, address = peer_of(first), first.grpc_address
        controller, retries = self._controller, StreamRetries(self._controller.clock)
        while retries.go_on(controller.is_present(peer)):
            is_ended = await self._follow(first, retries)
            if not peer.is_store:
                controller.apply(StreamClosed(peer.node_id))
            is_stopped = not peer.is_store and is_ended
            if is_stopped or await is_refused(address):
                controller.apply(PeerGone(peer, is_stopped))
                await self._channels.forget(address)
                return
            await asyncio.sleep(retries.next_delay_s())

    async def _follow(self, first: Report, retries: StreamRetries) -> bool:
        """Passes on the peer's reports until its stream ends or breaks. Returns whether the peer has ended it, because
        it shuts down.
        """
        controller, peer, epoch = self._controller, peer_of(first), self._controller.epoch.value
        stub = self._channels.stub(first.grpc_address, peer)
        call: UnaryStreamCall[Any, Report]
        try:
            if peer.is_store:
                call = stub.WatchCopies(param_store_pb2.WatchCopiesRequest(beat_every_s=_BEAT_S, epoch=epoch))
            else:
                call = stub.WatchSlot(worker_pb2.WatchSlotRequest(beat_every_s=_BEAT_S, epoch=epoch))
        except grpc.aio.UsageError:
            return False  # the channel was closed
        try:
            async for report in call:
                if peer_of(report) != peer or report.incarnation != first.incarnation:
                    return False  # another process uses the port by now
                controller.reported(report, streamed=True)
                if not controller.is_present(peer):
                    return False  # only a whole report brings the peer back, and a stream begins with a whole report
            return True
        except grpc.aio.AioRpcError as error:
            if not retries.is_repeated:
                log.info("watch_broken", peer=peer.node_id, status=error.code().name, detail=error.details())
        except asyncio.CancelledError:
            raise_if_cancelled()  # otherwise the peer hung, and its channel was closed
        finally:
            call.cancel()
        return False


class StreamRetries:
    """Times at which the stream to a peer is opened again: always while the peer is present, otherwise for ``_AWAY_S``.

    The delay grows while the streams end soon, as they do for a scheduler that the peer has fenced out.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._away_since: float | None = None
        self._began_at, self._delay_s = 0.0, 0.0

    def go_on(self, is_present: bool) -> bool:
        """Whether to open a stream now."""
        self._began_at = now = self._clock.now()
        self._away_since = None if is_present else self._away_since or now
        return self._away_since is None or now - self._away_since < _AWAY_S

    @property
    def is_repeated(self) -> bool:
        """Whether this stream follows a stream that ended soon, and has not lasted itself."""
        return self._delay_s > 0 and self._clock.now() - self._began_at < SILENT_S

    def next_delay_s(self) -> float:
        self._delay_s = min(2 * self._delay_s, _MAX_RETRY_S) if self.is_repeated else _RETRY_S
        return self._delay_s if self._away_since is None else _MAX_RETRY_S
