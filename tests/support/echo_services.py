"""A scheduler and a store that go with echo workers: they place everything, and know files by digest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from tests.support.echo_worker import EchoWorker
from tests.support.partial_service import serve
from torchrelay.common.net.rpc.server import RpcServer
from torchrelay.control.v1 import param_store_pb2 as store_pb
from torchrelay.control.v1 import scheduler_pb2 as admit_pb
from torchrelay.control.v1 import types_pb2


class EchoScheduler:
    """Places every admission on the first worker that is not lost; ``refusals`` answer the next ones."""

    def __init__(self, workers: Sequence[EchoWorker], *, decode: Sequence[EchoWorker] = ()) -> None:
        self.prompt_source: types_pb2.PromptSource | None = None  # of each placement
        self.prefill_workers = list(workers)
        self.decode_workers = list(decode) or self.prefill_workers
        self.refusals: list[admit_pb.Refusal] = []
        self.open_gate = asyncio.Event()  # cleared: everybody waits
        self.open_gate.set()
        self.answers = asyncio.Event()  # cleared: it says nothing, not even that it lives
        self.answers.set()
        self.messages: list[list[str | None]] = []  # the commands in each, by kind
        self.hellos: list[str] = []
        self.admits: list[admit_pb.AdmitRequest] = []
        self.releases: list[admit_pb.Release] = []
        self.withdrawals: list[admit_pb.Withdraw] = []
        self.minimums: list[admit_pb.Minimums] = []
        self.deleted: list[str] = []
        self._streams: list[asyncio.Queue[admit_pb.AdmitEvent]] = []
        self._server = self._new_server(0)
        self.port = self._server.port

    def _new_server(self, port: int) -> RpcServer:
        server = RpcServer("127.0.0.1", port)
        serve(server, "Scheduler/Admit", self.Admit, admit_pb.AdmitCommands.FromString)
        return server

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        await self._server.start()

    async def kill(self) -> None:
        """Breaks every stream at once."""
        await self._server.server.stop(None)

    async def revive(self) -> None:
        """Comes back on its port after ``kill``; what tests look at is kept."""
        self._server = self._new_server(self.port)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def Admit(
        self, batches: AsyncIterator[admit_pb.AdmitCommands], context: object
    ) -> AsyncIterator[admit_pb.AdmitEvents]:
        events: asyncio.Queue[admit_pb.AdmitEvent] = asyncio.Queue(10_000)
        self._streams.append(events)
        reader = asyncio.ensure_future(self._read(batches, events))
        try:
            while True:
                event = await events.get()
                await self.answers.wait()
                yield admit_pb.AdmitEvents(events=[event])
        finally:
            self._streams.remove(events)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def recall(self, key: types_pb2.AttemptKey, keeps_prompt: bool = False) -> None:
        """Says so to every gateway."""
        for events in self._streams:
            await events.put(admit_pb.AdmitEvent(recall=admit_pb.Recall(key=key, keeps_prompt=keeps_prompt)))

    async def place(self, placement: admit_pb.Placement) -> None:
        """Places an attempt by itself, whether the gate is open or not."""
        for events in self._streams:
            await events.put(admit_pb.AdmitEvent(placement=placement))

    async def tell(self, loading: admit_pb.Loading) -> None:
        """Tells every gateway about a load."""
        for events in self._streams:
            await events.put(admit_pb.AdmitEvent(loading=loading))

    async def _commands(self, batches: AsyncIterator[admit_pb.AdmitCommands]) -> AsyncIterator[admit_pb.AdmitCommand]:
        async for batch in batches:
            self.messages.append([command.WhichOneof("command") for command in batch.commands])
            for command in batch.commands:
                yield command

    async def _read(
        self, batches: AsyncIterator[admit_pb.AdmitCommands], events: asyncio.Queue[admit_pb.AdmitEvent]
    ) -> None:
        async with asyncio.TaskGroup() as placing:
            async for command in self._commands(batches):
                match command.WhichOneof("command"):
                    case "hello":
                        self.hellos.append(command.hello.gateway_id)
                        placing.create_task(self._beat(command.hello.beat_every_s, events))
                    case "admit":
                        self.admits.append(command.admit)
                        placing.create_task(self._place(command.admit, events))
                    case "release":
                        self.releases.append(command.release)
                    case "withdraw":
                        self.withdrawals.append(command.withdraw)
                    case "model_deleted":
                        self.deleted.append(command.model_deleted.model)
                    case "minimums":
                        self.minimums.append(command.minimums)

    async def _beat(self, every_s: float, events: asyncio.Queue[admit_pb.AdmitEvent]) -> None:
        while every_s:
            await events.put(admit_pb.AdmitEvent(beat=admit_pb.Beat()))
            await asyncio.sleep(every_s)

    async def _place(self, request: admit_pb.AdmitRequest, events: asyncio.Queue[admit_pb.AdmitEvent]) -> None:
        if request.HasField("current"):
            return
        if self.refusals:
            refusal = self.refusals.pop(0)
            refusal.key.CopyFrom(request.key)
            await events.put(admit_pb.AdmitEvent(refusal=refusal))
            return
        await self.open_gate.wait()
        placement = admit_pb.Placement(
            key=request.key,
            prefill=self._alive(self.prefill_workers, request).ref,
            decode=self._alive(self.decode_workers, request).ref,
            prompt_source=self.prompt_source,
        )
        await events.put(admit_pb.AdmitEvent(placement=placement))

    def _alive(self, workers: Sequence[EchoWorker], request: admit_pb.AdmitRequest) -> EchoWorker:
        return next((worker for worker in workers if worker.worker_id not in request.lost_workers), workers[-1])


class EchoStore:
    """A param-store that knows ``ReadFile`` alone."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)  # by digest
        self.reads: list[str] = []
        self.answers = asyncio.Event()  # cleared: it keeps its connections and says nothing
        self.answers.set()
        self._server = self._new_server(0)
        self.port = self._server.port

    def _new_server(self, port: int) -> RpcServer:
        server = RpcServer("127.0.0.1", port)
        serve(server, "ParamStore/ReadFile", self.ReadFile, store_pb.ReadFileRequest.FromString)
        return server

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        await self._server.start()

    async def revive(self) -> None:
        """Comes back on its port after ``stop``."""
        self._server = self._new_server(self.port)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def ReadFile(self, request: store_pb.ReadFileRequest, context: object) -> AsyncIterator[store_pb.FileBytes]:
        self.reads.append(request.digest)
        await self.answers.wait()
        data = self.files[request.digest]
        for begin in range(0, len(data), 1 << 20):
            yield store_pb.FileBytes(data=data[begin : begin + (1 << 20)])
