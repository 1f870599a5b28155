"""A scripted param-store and scheduler behind real gRPC."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from torchrelay.common.errors import Conflict, NotFound, TorchrelayError
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.options import ACCEPTED
from torchrelay.common.net.rpc.server import RpcServer
from torchrelay.control.v1 import param_store_pb2, reports_pb2, scheduler_pb2, types_pb2
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreServicer, add_ParamStoreServicer_to_server
from torchrelay.control.v1.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server


class ScriptedStore(ParamStoreServicer):
    """Keeps uploads and versions in memory. ``stored_bytes`` is a version's size.

    ``begin_refusal`` is raised by BeginUpload, ``refusal`` by Commit, ``put_refusal`` by PutFile at once.
    """

    def __init__(self) -> None:
        self.uploads: dict[str, dict[str, tuple[param_store_pb2.DeclaredFile, bytearray]]] = {}
        self.begin_refusal: TorchrelayError | None = None
        self.refusal: TorchrelayError | None = None
        self.put_refusal: TorchrelayError | None = None
        self.notes: tuple[str, ...] = ()
        self.openings: list[param_store_pb2.PutFileRequest.Open] = []
        self.stored_bytes = 1000
        self.published: dict[str, int] = {}  # version -> when it was published last
        self.claims: dict[str, str] = {}  # upload -> the version it published
        self.deleted: list[str] = []
        self.aborted: list[str] = []
        self.largest_slice = 0
        self.largest_slot_bytes: int | None = None
        self.engines: list[str] = []
        self.quantize = ""
        self.needed_engine = ""
        self.content = "one"
        self.objects: dict[tuple[str, str], bytes] = {}  # by tenant and name

    async def BeginUpload(self, request: Any, context: Any) -> param_store_pb2.UploadState:
        if self.begin_refusal is not None:
            raise self.begin_refusal
        self.uploads.setdefault(request.upload_id, {file.path: (file, bytearray()) for file in request.files})
        return self._state(request.upload_id)

    async def DescribeUpload(self, request: Any, context: Any) -> param_store_pb2.UploadState:
        return self._state(request.upload_id)

    async def PutFile(self, request_iterator: AsyncIterator[Any], context: Any) -> param_store_pb2.FileState:
        opening = (await anext(aiter(request_iterator))).open
        self.openings.append(opening)
        if self.put_refusal is not None:
            raise self.put_refusal
        await context.send_initial_metadata((ACCEPTED,))
        received = self._upload(opening.upload_id)[opening.path][1]
        async for part in request_iterator:
            self.largest_slice = max(self.largest_slice, len(part.data))
            received += part.data
        return self._file(opening.upload_id, opening.path)

    async def Commit(self, request: Any, context: Any) -> AsyncIterator[param_store_pb2.CommitProgress]:
        self._upload(request.upload_id)
        self.largest_slot_bytes, self.engines = request.largest_slot_bytes, list(request.engines)
        self.quantize = request.quantize
        yield param_store_pb2.CommitProgress(stage="validate", num_bytes_done=5, num_bytes_total=10)
        if self.refusal is not None:
            raise self.refusal
        self.publish(f"version-{self.content}", request.upload_id)
        yield param_store_pb2.CommitProgress(
            stage="publish",
            num_bytes_done=10,
            num_bytes_total=10,
            version=self._description(f"version-{self.content}"),
            notes=self.notes,
        )

    def publish(self, version_id: str, upload_id: str = "") -> None:
        self.published[version_id] = self.published.get(version_id, 0) + 1
        if upload_id:
            self.claims[upload_id] = version_id

    def _description(self, version_id: str) -> param_store_pb2.VersionDescription:
        return param_store_pb2.VersionDescription(
            version_id=version_id,
            pack_id=f"pack-{self.content}",
            pack_bytes=900,
            architecture="LlamaForCausalLM",
            dtype="float32",
            shape=types_pb2.ModelShape(
                num_layers=2,
                num_kv_heads=1,
                head_dim=16,
                kv_dtype_bytes=4,
                max_context_tokens=128,
                vocab_size=64,
            ),
            routing_block_tokens=64,
            file_digests={"tokenizer.json": "abc"},
            eos_token_ids=[2],
            stored_bytes=self.stored_bytes,
            engine=self.needed_engine,
        )

    async def AbortUpload(self, request: Any, context: Any) -> param_store_pb2.AbortUploadReply:
        self.aborted.append(request.upload_id)
        self.uploads.pop(request.upload_id, None)
        self.claims.pop(request.upload_id, None)
        return param_store_pb2.AbortUploadReply()

    async def Describe(self, request: Any, context: Any) -> param_store_pb2.DescribeReply:
        if request.version_id not in self.published:
            raise NotFound(f"there is no version {request.version_id}")
        return param_store_pb2.DescribeReply(version=self._description(request.version_id))

    async def ListVersions(self, request: Any, context: Any) -> AsyncIterator[param_store_pb2.StoredVersion]:
        for version_id, published in tuple(self.published.items()):
            uploads = [upload_id for upload_id, claimed in self.claims.items() if claimed == version_id]
            yield param_store_pb2.StoredVersion(version_id=version_id, published_unix_us=published, upload_ids=uploads)

    async def DeleteVersion(self, request: Any, context: Any) -> param_store_pb2.DeleteVersionReply:
        if self.published.get(request.version_id) != request.published_unix_us:
            raise Conflict(f"version {request.version_id} was published again")
        del self.published[request.version_id]
        self.deleted.append(request.version_id)
        return param_store_pb2.DeleteVersionReply()

    async def PutObject(self, request_iterator: AsyncIterator[Any], context: Any) -> param_store_pb2.PutObjectReply:
        opening, data = (await anext(aiter(request_iterator))).open, bytearray()
        await context.send_initial_metadata((ACCEPTED,))
        async for part in request_iterator:
            self.largest_slice = max(self.largest_slice, len(part.data))
            data += part.data
        self.objects[opening.object.tenant_id, opening.object.name] = bytes(data)
        return param_store_pb2.PutObjectReply(num_bytes=len(data))

    async def ReadObject(self, request: Any, context: Any) -> param_store_pb2.FileBytes:
        data = self.objects[request.object.tenant_id, request.object.name]
        return param_store_pb2.FileBytes(data=data[request.offset : request.offset + request.num_bytes])

    async def DeleteObject(self, request: Any, context: Any) -> param_store_pb2.DeleteObjectReply:
        self.objects.pop((request.tenant_id, request.name), None)
        return param_store_pb2.DeleteObjectReply()

    def _upload(self, upload_id: str) -> dict[str, tuple[param_store_pb2.DeclaredFile, bytearray]]:
        if upload_id not in self.uploads:
            raise NotFound(f"there is no upload {upload_id}")
        return self.uploads[upload_id]

    def _state(self, upload_id: str) -> param_store_pb2.UploadState:
        files = [self._file(upload_id, path) for path in self._upload(upload_id)]
        return param_store_pb2.UploadState(upload_id=upload_id, files=files, version_id=self.claims.get(upload_id, ""))

    def _file(self, upload_id: str, path: str) -> param_store_pb2.FileState:
        declared, received = self.uploads[upload_id][path]
        complete = hashlib.sha256(received).hexdigest() == declared.sha256
        return param_store_pb2.FileState(
            path=path,
            num_bytes=declared.num_bytes,
            num_bytes_received=len(received),
            complete=complete,
            sha256=declared.sha256,
        )


class ScriptedScheduler(SchedulerServicer):
    def __init__(self) -> None:
        labels = ["gpu=l4", "zone=a"]
        self.workers = [reports_pb2.WorkerReport(worker_id="w1", labels=labels, kv_pool_bytes=1 << 30)]

    async def WatchCluster(self, request: Any, context: Any) -> AsyncIterator[scheduler_pb2.ClusterView]:
        yield scheduler_pb2.ClusterView(epoch=1, largest_slot_bytes=12345, workers=self.workers)

    async def Explain(self, request: Any, context: Any) -> scheduler_pb2.ExplainReply:
        if request.request_id == "req-old":
            raise NotFound("too old")
        phase = types_pb2.Phase(name="queue", begin_unix_us=1, end_unix_us=2, where="scheduler", detail="cold")
        decision = scheduler_pb2.Decision(at_unix_us=1, kind="load", subject="acme/glossary", reason="first request")
        if request.model:
            worth = scheduler_pb2.WorthLine(label="bid", text=f"of {request.model}")
            return scheduler_pb2.ExplainReply(decisions=[decision], worth=[worth])
        return scheduler_pb2.ExplainReply(phases=[phase], decisions=[decision])

    async def WatchEvents(self, request: Any, context: Any) -> AsyncIterator[scheduler_pb2.Event]:
        for number in range(request.after_sequence + 1, 4):
            fields = f'{{"urgency": "event {number} since {request.since_unix_us}"}}'
            yield scheduler_pb2.Event(sequence=number, at_unix_us=number, kind="relay.started", fields_json=fields)


@asynccontextmanager
async def serving(*services: ScriptedStore | ScriptedScheduler) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server of these."""
    server = RpcServer("127.0.0.1")
    for service in services:
        if isinstance(service, ScriptedStore):
            add_ParamStoreServicer_to_server(service, server.server)
        else:
            add_SchedulerServicer_to_server(service, server.server)
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel
    await server.stop(0)
