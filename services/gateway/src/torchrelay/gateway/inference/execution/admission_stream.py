"""The gateway's one stream to the scheduler: admissions out, placements in.

The stream reconnects by itself and then admits everything open again, with its current placement, so that a restarted
scheduler learns what is running. Admitting is idempotent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from torchrelay.common.errors import Unavailable
from torchrelay.common.net.rpc import error_from_rpc
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import scheduler_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.control.v1.scheduler_pb2_grpc import SchedulerStub
from torchrelay.gateway.clients.endpoint import scheduler_endpoint
from torchrelay.gateway.inference.core import AdmissionFailed, RequestEvent

log = get_logger(__name__)

Listener: TypeAlias = Callable[[RequestEvent], None]
AttemptId: TypeAlias = tuple[str, int]

MAX_UNSENT = 100_000  # kept while the scheduler is away; it also drops whatever is not admitted again
STABLE_S = 1.0  # a stream that ends sooner served no request: a standby scheduler closes it at once
RETRY_S = (0.05, 0.1, 0.2, 0.5)


def attempt_id_of(key: types_pb2.AttemptKey) -> AttemptId:
    return key.request_id, key.attempt


@dataclass(slots=True)
class _Admission:
    request: pb.AdmitRequest
    listener: Listener
    is_placed: bool = False


class AdmissionStream:
    """All open admissions of this gateway. ``run()`` maintains the stream; ``admit`` and ``release`` never block."""

    def __init__(
        self, scheduler: SchedulerStub, gateway_id: str, address: str, unreachable_after_s: float = 10.0
    ) -> None:
        self._scheduler = scheduler
        self._gateway_id = gateway_id
        self._endpoint = scheduler_endpoint(address)
        self._unreachable_after_s = unreachable_after_s
        self._open: dict[AttemptId, _Admission] = {}
        self._unsent: deque[pb.AdmitCommand] = deque(maxlen=MAX_UNSENT)
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._connected_at: float | None = None

    @property
    def num_open(self) -> int:
        return len(self._open)

    def admit(self, request: pb.AdmitRequest, listener: Listener) -> None:
        """Requests a placement; ``listener`` receives it, or waiting notices, or a failure."""
        self._open[attempt_id_of(request.key)] = _Admission(request, listener)
        self._send(pb.AdmitCommand(admit=request))

    def release(self, release: pb.Release) -> None:
        """Ends an attempt: frees its resources, or withdraws it while it waits."""
        admission = self._open.pop(attempt_id_of(release.key), None)
        if admission is None:
            return
        if admission.is_placed:
            self._send(pb.AdmitCommand(release=release))
        else:
            self._send(pb.AdmitCommand(withdraw=pb.Withdraw(key=release.key)))

    async def flush(self, timeout_s: float) -> None:
        """Waits up to ``timeout_s`` until everything has been sent to the scheduler."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._emptied.wait()

    async def run(self) -> None:
        """Maintains the stream until cancelled; fails waiting requests if the scheduler stays away too long."""
        clock = asyncio.get_running_loop().time
        last_served, num_failures = clock(), 0
        while True:
            self._connected_at = None
            try:
                await self._run_stream()
            except grpc.aio.AioRpcError as error:
                if num_failures == 0:
                    log.warning("scheduler_lost", why=error_from_rpc(error).message)
            except asyncio.InvalidStateError:
                pass  # the call ended between two writes
            except asyncio.CancelledError:
                # NOTE: grpc raises this too for a call ended on this side; only our own cancellation ends the task.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
            if self._connected_at is not None and clock() - self._connected_at > STABLE_S:
                last_served, num_failures = clock(), 0
            if clock() - last_served > self._unreachable_after_s:
                self._fail_waiting(self._endpoint.unreachable())
            await asyncio.sleep(RETRY_S[min(num_failures, len(RETRY_S) - 1)])
            num_failures += 1

    async def _run_stream(self) -> None:
        call: Any = self._scheduler.Admit()  # type: ignore[call-arg]
        try:
            async with asyncio.timeout(self._unreachable_after_s):
                await call.wait_for_connection()
            self._connected_at = asyncio.get_running_loop().time()
            await call.write(pb.AdmitCommand(hello=pb.AdmitHello(gateway_id=self._gateway_id)))
            self._admit_again()
            writer = asyncio.ensure_future(self._write(call))
            try:
                async for event in call:
                    self._route(event)
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
        except TimeoutError:
            pass  # no connection yet; run() keeps the time
        finally:
            call.cancel()

    def _admit_again(self) -> None:
        others = [command for command in self._unsent if not command.HasField("admit")]
        self._unsent.clear()
        self._unsent.extend(pb.AdmitCommand(admit=admission.request) for admission in self._open.values())
        self._unsent.extend(others)
        self._filled.set()

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                while self._unsent:
                    await call.write(self._unsent[0])
                    self._unsent.popleft()
                self._emptied.set()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            call.cancel()  # also ends the reader; run() reconnects

    def _send(self, command: pb.AdmitCommand) -> None:
        self._unsent.append(command)
        self._emptied.clear()
        self._filled.set()

    def _route(self, event: pb.AdmitEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "placement":
            self._placed(event.placement)
        elif kind == "refusal":
            admission = self._open.pop(attempt_id_of(event.refusal.key), None)
            if admission is not None:
                admission.listener(event.refusal)
        elif kind == "waiting" and (waiting := self._open.get(attempt_id_of(event.waiting.key))) is not None:
            waiting.listener(event.waiting)

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
            if not admission.is_placed:
                del self._open[key]
                admission.listener(AdmissionFailed(key[1], error))
