"""The gateway's one stream to the scheduler: admissions out, placements in.

The stream reconnects by itself and then admits everything open again, with its current placement, so that a restarted
scheduler learns what is running. Admitting is idempotent. A scheduler that is silent counts as away, whether it ended
or hangs.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import grpc

from torchrelay.common.errors import Unavailable
from torchrelay.common.liveness import BEAT_S, SILENT_S
from torchrelay.common.net.rpc.message_pace import EVERY_S, MessagePace
from torchrelay.common.net.rpc.options import MAX_MESSAGE_BYTES
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import scheduler_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.control.v1.scheduler_pb2_grpc import SchedulerStub
from torchrelay.gateway.clients.endpoint import scheduler_endpoint
from torchrelay.gateway.inference.core import AdmissionFailed, RequestEvent
from torchrelay.gateway.inference.execution.load_notices import LoadNotices
from torchrelay.gateway.inference.execution.stream_watch import WATCH_EVERY_S, StreamReports, read_watched

log = get_logger(__name__)

Listener: TypeAlias = Callable[[RequestEvent], None]
AttemptId: TypeAlias = tuple[str, int]  # an AttemptKey as the key of a dict

MAX_BATCH = 64  # commands in one message
MAX_BATCH_BYTES = MAX_MESSAGE_BYTES // 4  # a long prompt's hashes alone may be a megabyte
MAX_UNSENT = 100_000  # beyond a command per open attempt; the scheduler drops attempts that are not admitted again
STABLE_S = 1.0  # a stream that ends sooner served no request: a standby scheduler closes it at once
RETRY_S = (0.05, 0.1, 0.2, 0.5)


def attempt_id_of(key: types_pb2.AttemptKey) -> AttemptId:
    return key.request_id, key.attempt


@dataclass(slots=True)
class _Admission:
    request: pb.AdmitRequest
    listener: Listener
    arrived_at: float  # by the clock of ages
    is_placed: bool = False


class AdmissionStream:
    """All open admissions of this gateway. ``run()`` maintains the stream; ``admit`` and ``release`` never block."""

    def __init__(
        self,
        scheduler: SchedulerStub,
        gateway_id: str,
        address: str,
        unreachable_after_s: float = 10.0,
        max_unsent: int = MAX_UNSENT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock``: seconds, for the ages of requests."""
        self._scheduler = scheduler
        self._gateway_id = gateway_id
        self._endpoint = scheduler_endpoint(address)
        self._unreachable_after_s = unreachable_after_s
        self._clock = clock
        self._open: dict[AttemptId, _Admission] = {}
        self._call: Any = None  # the present stream, or the last one
        self._load_notices = LoadNotices()
        self._unsent: deque[pb.AdmitCommand] = deque()
        self._max_unsent = max_unsent
        self._minimums: pb.Minimums | None = None  # as last sent; None before the catalog was read
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._reports = StreamReports()  # of the present stream
        self._began_at = self._served_at = 0.0  # of the present stream; of the last stream that lasted
        self._is_hung = False  # the scheduler took the last connection and sent nothing

    def set_minimums(self, versions: Iterable[types_pb2.ModelVersion]) -> None:
        """Sends the models that have a minimum of instances, now and to every later scheduler."""
        self._minimums = pb.Minimums(versions=versions)
        self._send(pb.AdmitCommand(minimums=self._minimums))

    def model_deleted(self, model: str) -> None:
        """Sends once that the model is no longer in the catalog, to the present scheduler or else the next one.

        A scheduler that takes over later is not told. It may learn of the model from requests that are still open, of
        any gateway, and from minimums.
        """
        self._send(pb.AdmitCommand(model_deleted=pb.ModelDeleted(model=model)))

    @property
    def num_open(self) -> int:
        return len(self._open)

    def admit(self, request: pb.AdmitRequest, listener: Listener) -> None:
        """Requests a placement; ``listener`` receives it or a failure."""
        arrived_at = self._clock() - request.age_ms / 1000
        self._open[attempt_id_of(request.key)] = _Admission(request, listener, arrived_at)
        self._send(pb.AdmitCommand(admit=request))

    def load_text(self, version_id: str, model: str) -> str:
        """A line about the load that a request for ``model`` waits for; empty if it waits for none."""
        return self._load_notices.text(version_id, model, asyncio.get_running_loop().time())

    def first_token(self, key: types_pb2.AttemptKey) -> None:
        """Tells the scheduler that the attempt's prompt is computed."""
        admission = self._open.get(attempt_id_of(key))
        if admission is not None and admission.is_placed:
            admission.request.is_computed = True
            self._send(pb.AdmitCommand(first_token=pb.FirstToken(key=key)), EVERY_S)

    def release(self, release: pb.Release) -> None:
        """Ends an attempt: frees its resources, or withdraws it while it waits."""
        admission = self._open.pop(attempt_id_of(release.key), None)
        if admission is None:
            return
        if admission.is_placed:
            self._send(pb.AdmitCommand(release=release), EVERY_S)
        else:
            self._send(pb.AdmitCommand(withdraw=pb.Withdraw(key=release.key)))

    async def flush(self, timeout_s: float) -> None:
        """Waits up to ``timeout_s`` until everything has been sent to the scheduler."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._emptied.wait()

    async def run(self) -> None:
        """Maintains the stream until cancelled; fails waiting requests if the scheduler stays away too long."""
        self._served_at = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._maintain_stream())
            tasks.create_task(self._fail_overdue())

    async def _maintain_stream(self) -> None:
        clock, num_failures = asyncio.get_running_loop().time, 0
        while True:
            self._began_at, self._reports = clock(), StreamReports()
            try:
                await self._run_stream()
            except grpc.aio.AioRpcError as error:
                self._is_hung = False
                if num_failures == 0:
                    log.warning("scheduler_lost", why=error.details())
            except asyncio.InvalidStateError:
                pass  # the call ended between two writes
            except asyncio.CancelledError:
                # NOTE: grpc raises this too for a call ended on this side; only our own cancellation ends the task.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
            if self._serves(clock()):
                num_failures = 0
            self._reports = StreamReports()
            await asyncio.sleep(RETRY_S[min(num_failures, len(RETRY_S) - 1)])
            num_failures += 1

    def _serves(self, now: float) -> bool:
        return self._reports.num_messages > 0 and now - self._began_at > STABLE_S

    async def _fail_overdue(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if self._serves(clock()):
                self._served_at = clock()
            elif not self._reports.num_messages and clock() - self._served_at > self._unreachable_after_s:
                self._fail_waiting(self._endpoint.silent() if self._is_hung else self._endpoint.unreachable())

    async def _run_stream(self) -> None:
        call: Any = self._scheduler.Admit()  # type: ignore[call-arg]
        self._call = call
        try:
            async with asyncio.timeout(SILENT_S):
                await call.wait_for_connection()
            hello = pb.AdmitHello(gateway_id=self._gateway_id, beat_every_s=BEAT_S)
            first = [pb.AdmitCommand(hello=hello)]
            if self._minimums is not None:
                first.append(pb.AdmitCommand(minimums=self._minimums))
            await call.write(pb.AdmitCommands(commands=first))
            self._admit_again()
            await read_watched(call, self._write(call), self._route_all, self._reports, self._note_hung)
        except TimeoutError:
            self._is_hung = True  # no connection; a process that has ended would refuse it
        finally:
            call.cancel()

    def _note_hung(self, fault: str) -> None:
        log.warning("scheduler_lost", why=f"it {fault}")
        self._is_hung = True

    def _route_all(self, batch: pb.AdmitEvents) -> None:
        for event in batch.events:
            self._route(event)

    def _admit_again(self) -> None:
        others = [command for command in self._unsent if not command.HasField("admit")]
        self._unsent.clear()
        now = self._clock()
        # Placed attempts come first: a new scheduler would give their KV to an attempt that it learned of before.
        for admission in sorted(self._open.values(), key=lambda admission: not admission.is_placed):
            admission.request.age_ms = round((now - admission.arrived_at) * 1000)
            self._unsent.append(pb.AdmitCommand(admit=admission.request))
        self._unsent.extend(others)
        self._filled.set()

    async def _write(self, call: Any) -> None:
        pace = MessagePace()
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                while self._unsent:
                    if len(self._unsent) < MAX_BATCH:
                        await pace.wait()
                    batch = self._next_batch()
                    await call.write(pb.AdmitCommands(commands=batch))
                    if self._unsent[0] is batch[0]:  # not cleared meanwhile
                        for _ in batch:
                            self._unsent.popleft()
                self._emptied.set()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            call.cancel()  # also ends the reader; run() reconnects

    def _next_batch(self) -> list[pb.AdmitCommand]:
        """The first unsent commands, within the limits of a message."""
        batch, num_bytes = [self._unsent[0]], self._unsent[0].ByteSize()
        for command in islice(self._unsent, 1, MAX_BATCH):
            num_bytes += command.ByteSize()
            if num_bytes > MAX_BATCH_BYTES:
                break
            batch.append(command)
        return batch

    def _send(self, command: pb.AdmitCommand, within_s: float = 0.0) -> None:
        """Sends a command ``within_s``, together with others that come until then.

        Messages are rationed: a message of its own for a command that can wait would delay the next request.
        """
        if len(self._unsent) >= self._max_unsent + len(self._open):
            # Nothing is lost: the next stream admits all open attempts again, which stands for all of these commands
            # but deletions.
            log.warning("unsent_commands_dropped", num_dropped=len(self._unsent))
            deleted = {each.model_deleted.model: None for each in self._unsent if each.HasField("model_deleted")}
            self._unsent.clear()
            newest = list(deleted)[-(self._max_unsent // 2) :]
            self._unsent.extend(pb.AdmitCommand(model_deleted=pb.ModelDeleted(model=model)) for model in newest)
            if self._call is not None:
                self._call.cancel()
        self._unsent.append(command)
        self._emptied.clear()
        if within_s:
            asyncio.get_running_loop().call_later(within_s, self._filled.set)
        else:
            self._filled.set()

    def _route(self, event: pb.AdmitEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "placement":
            self._placed(event.placement)
        elif kind == "refusal":
            admission = self._open.pop(attempt_id_of(event.refusal.key), None)
            if admission is not None:
                admission.listener(event.refusal)
        elif kind == "loading":
            self._load_notices.note(event.loading, asyncio.get_running_loop().time())
        elif kind == "recall" and (placed := self._open.get(attempt_id_of(event.recall.key))) is not None:
            placed.listener(event.recall)

    def _placed(self, placement: pb.Placement) -> None:
        admission = self._open.get(attempt_id_of(placement.key))
        if admission is None:  # the placement crossed our withdrawal
            self._send(pb.AdmitCommand(release=pb.Release(key=placement.key)))
            return
        admission.is_placed = True
        admission.request.current.CopyFrom(placement)
        admission.listener(placement)

    def _fail_waiting(self, error: Unavailable) -> None:
        for key, admission in list(self._open.items()):
            # A listener may release its request's other attempts on a failure.
            if not admission.is_placed and self._open.pop(key, None) is not None:
                admission.listener(AdmissionFailed(key[1], error))
