"""Streams to workers: one per worker and role carries all requests of this gateway.

A stream opens with the first attempt sent to its worker and closes after a while without any. When it breaks, every
attempt on it is notified; the next attempt opens a new one. A worker that is silent, or whose engine has work and does
not advance, counts as lost: its stream is broken here. The streams never wait for a request: tokens that a slow client
has not read yet are buffered in its own request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, Self, TypeAlias

import grpc

from torchrelay.common.identity.callers import Caller
from torchrelay.common.identity.tls import Tls
from torchrelay.common.liveness import BEAT_S, SILENT_S
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.control.v1.decode_pb2_grpc import DecodeStub
from torchrelay.control.v1.prefill_pb2_grpc import PrefillStub
from torchrelay.gateway.inference.core import WorkerLost
from torchrelay.gateway.inference.execution.admission_stream import AttemptId, Listener, attempt_id_of
from torchrelay.gateway.inference.execution.stream_watch import StreamReports, read_watched

log = get_logger(__name__)

RoleName: TypeAlias = Literal["prefill", "decode"]


class RunStream:
    """A ``Run`` stream; ``run()`` serves it until it breaks, times out idle, or is cancelled."""

    def __init__(
        self,
        role: RoleName,
        worker: types_pb2.WorkerRef,
        gateway_id: str,
        idle_s: float,
        on_end: Callable[[], None],
        tls: Tls | None = None,
    ) -> None:
        self._role = role
        self._worker = worker
        self._gateway_id = gateway_id
        self._idle_s = idle_s
        self._on_end = on_end
        self._tls = tls
        self._routes: dict[AttemptId, Listener] = {}
        self._unsent: deque[pb.RunCommand] = deque()
        self._filled = asyncio.Event()
        self._reports = StreamReports()
        self._why_broken = "the stream ended"

    def start(self, start: pb.AttemptStart, listener: Listener) -> None:
        """Sends an attempt; ``listener`` receives its outputs, or the loss of the worker, until ``forget``."""
        self._routes[attempt_id_of(start.key)] = listener
        self._send(pb.RunCommand(start=start))

    def cancel(self, key: types_pb2.AttemptKey) -> None:
        """Cancels an attempt that may still be running on the worker."""
        if self._routes.pop(attempt_id_of(key), None) is not None:
            self._send(pb.RunCommand(cancel=pb.CancelAttempt(key=key)))

    def recall(self, key: types_pb2.AttemptKey) -> None:
        """Recalls an attempt; its prefill worker keeps what it has computed for a while."""
        if self._routes.pop(attempt_id_of(key), None) is not None:
            self._send(pb.RunCommand(recall=pb.RecallAttempt(key=key)))
            self._send(pb.RunCommand(cancel=pb.CancelAttempt(key=key)))  # for a worker that does not know recalls

    def forget(self, key: types_pb2.AttemptKey) -> None:
        """Stops routing an attempt that has ended by itself."""
        self._routes.pop(attempt_id_of(key), None)

    async def run(self) -> None:
        channel = open_channel(self._worker.grpc_address, self._tls, self._worker.gateway_token, Caller.WORKER)
        try:
            call: Any = (PrefillStub(channel) if self._role == "prefill" else DecodeStub(channel)).Run()
            async with asyncio.timeout(SILENT_S):
                await call.wait_for_connection()
            await call.write(pb.RunCommand(hello=pb.RunHello(gateway_id=self._gateway_id, beat_every_s=BEAT_S)))
            await read_watched(call, self._write(call), self._route, self._reports, self._note_hung)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
            self._why_broken = error.details() or "" if isinstance(error, grpc.aio.AioRpcError) else "no connection"
        finally:
            self._end()
            await channel.close()

    def _note_hung(self, fault: str) -> None:
        self._why_broken = f"it {fault}"

    def _route(self, step: pb.StepOutput) -> None:
        routes = self._routes
        if step.HasField("beat"):
            self._reports.beat = step.beat
        for output in step.outputs:
            listener = routes.get(attempt_id_of(output.key))
            if listener is not None:
                listener(output)

    async def _write(self, call: Any) -> None:
        try:
            while await self._has_more():
                while self._unsent:
                    await call.write(self._unsent.popleft())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader sees the same failure and reports it
        finally:
            call.cancel()

    async def _has_more(self) -> bool:
        while not self._unsent:
            self._filled.clear()
            try:
                async with asyncio.timeout(self._idle_s):
                    await self._filled.wait()
            except TimeoutError:
                if not self._routes:
                    self._on_end()  # deregistered before anything can be sent into the closing stream
                    return False
        return True

    def _send(self, command: pb.RunCommand) -> None:
        self._unsent.append(command)
        self._filled.set()

    def _end(self) -> None:
        self._on_end()
        routes, self._routes = self._routes, {}
        if routes:
            log.warning("worker_lost", worker_id=self._worker.worker_id, role=self._role, why=self._why_broken)
        for (_, attempt), listener in routes.items():
            listener(WorkerLost(attempt, self._worker.worker_id))


class WorkerStreams:
    """All ``Run`` streams of this gateway. An async context manager that owns their tasks."""

    def __init__(self, gateway_id: str, idle_s: float = 60.0, tls: Tls | None = None) -> None:
        self._gateway_id = gateway_id
        self._idle_s = idle_s
        self._tls = tls
        self._streams: dict[tuple[RoleName, str], RunStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stream(self, role: RoleName, worker: types_pb2.WorkerRef) -> RunStream:
        """The stream to a worker in one of its roles, opened if there is none."""
        key = (role, worker.grpc_address)
        stream = self._streams.get(key)
        if stream is None:
            stream = RunStream(
                role, worker, self._gateway_id, self._idle_s, lambda: self._forget(key, stream), self._tls
            )
            self._streams[key] = stream
            task = asyncio.get_running_loop().create_task(stream.run(), name=f"{role}@{worker.grpc_address}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return stream

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def _forget(self, key: tuple[RoleName, str], stream: RunStream | None) -> None:
        if self._streams.get(key) is stream:
            del self._streams[key]
