"""The RPCs that upload models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from torchrelay.common.errors import InvalidRequest, TorchrelayError, Unavailable, UploadRefused
from torchrelay.common.host.disk import write_error
from torchrelay.common.net.rpc.options import ACCEPTED
from torchrelay.common.process.telemetry import get_logger, record_span
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.param_store.grpc.cancellable_acquire import acquire_on_thread, release_on_thread
from torchrelay.param_store.grpc.messages import file_state, upload_state, version_description
from torchrelay.param_store.remote.versions import Version
from torchrelay.param_store.store import Store
from torchrelay.param_store.uploads.declared_files import DeclaredFile
from torchrelay.param_store.uploads.file_writer import FileWriter
from torchrelay.param_store.uploads.packer_process import PackJob, PackProgress, Turn, run_packer
from torchrelay.param_store.uploads.repeated_progress import repeated
from torchrelay.param_store.uploads.staged_upload import StagedUpload

Context = grpc.aio.ServicerContext[Any, Any]
log = get_logger(__name__)
MAX_PART_BYTES = 1 << 20
_REPEAT_S = 5.0  # the progress of a long stage is repeated, so that a gateway can distinguish slow from hung
_LEAST_PUBLISH_BYTES_PER_S = 4 << 20  # to the remote store


class UploadRpcs:
    """BeginUpload, DescribeUpload, PutFile, Commit, AbortUpload."""

    store: Store

    async def BeginUpload(self, request: pb.BeginUploadRequest, context: Context) -> pb.UploadState:
        files = [DeclaredFile(file.path, file.num_bytes, file.sha256.lower()) for file in request.files]
        upload = await asyncio.to_thread(
            self.store.uploads.begin, request.upload_id, request.tenant_id, files, request.quota_bytes
        )
        log.info("upload_begun", upload_id=request.upload_id, tenant_id=request.tenant_id, num_files=len(files))
        return upload_state(upload)

    async def DescribeUpload(self, request: pb.DescribeUploadRequest, context: Context) -> pb.UploadState:
        return upload_state(self.store.uploads.get(request.upload_id))

    async def PutFile(self, request_iterator: AsyncIterator[pb.PutFileRequest], context: Context) -> pb.FileState:
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("part") != "open":
            raise InvalidRequest("the first message of PutFile must be open", field="open")
        opening, upload = first.open, self.store.uploads.get(first.open.upload_id)
        writer = await acquire_on_thread(
            lambda: upload.open_file(opening.path, opening.offset),
            lambda opened: None if opened is None else opened.close(),
        )
        try:
            file = upload.declared(opening.path)
            num_left = file.num_bytes - opening.offset
            if opening.num_bytes > num_left:
                raise _too_long(file)
            await context.send_initial_metadata((ACCEPTED,))
            async with aclosing(_data(request_iterator, file, num_left)) as data:
                if writer is not None:
                    await self._receive(writer, data)
                async for _ in data:  # of a complete file, which is kept
                    pass
        except OSError as error:
            raise write_error(error, f"{opening.path}: cannot be written", upload.folder) from error
        finally:
            if writer is not None:
                await release_on_thread(writer.close)
        return file_state(upload.file_progress(opening.path))

    async def Commit(self, request: pb.CommitRequest, context: Context) -> AsyncIterator[pb.CommitProgress]:
        upload = self.store.uploads.get(request.upload_id)
        if upload.record.version_id:  # committed earlier; the reply was lost
            version = await asyncio.to_thread(self.store.versions.describe, upload.record.version_id)
            if version.document.base_id != request.base_version_id:
                raise InvalidRequest("this upload was committed with another base: upload again", field="base")
            if upload.record.quantize != request.quantize:
                message = "this upload was committed with another quantize: abort it, and upload again"
                raise InvalidRequest(message, field="quantize")
            yield pb.CommitProgress(stage="publish", version=version_description(version))
            return
        if upload.is_adapter != bool(request.base_version_id):
            hint = "needs a base model" if upload.is_adapter else "has no base model: it is not an adapter"
            raise InvalidRequest(f"this upload {hint}", field="base")
        if request.quantize not in ("", "int8"):
            raise InvalidRequest(f"quantize must be int8 or missing, not {request.quantize!r}", field="quantize")
        if request.quantize and upload.is_adapter:
            raise InvalidRequest("an adapter keeps its dtype", field="quantize")
        begin_unix_ns = time.time_ns()
        await acquire_on_thread(lambda: upload.begin_commit(request.quantize), lambda _: upload.end_commit())
        turn, packed, notes = Turn(upload.record.tenant_id), False, tuple[str, ...]()
        try:
            waiting = PackProgress("wait", 0, upload.num_bytes)
            async with aclosing(repeated(self._pack(upload, request, turn), waiting, _REPEAT_S)) as lines:
                async for line in lines:
                    notes = line.notes or notes
                    yield _progress(line)
            packed = True
        except TorchrelayError as error:
            log.info("commit_failed", upload_id=request.upload_id, error=error.message)
            if isinstance(error, UploadRefused):
                await asyncio.to_thread(self.store.uploads.refuse, upload)
            raise
        finally:
            if not packed:
                self.store.publish_queue.release(turn)
                await release_on_thread(upload.end_commit)
        # Once publishing has begun it must end and be recorded, even if the client is gone: cancelling this call
        # cancels only its wait.
        loop, threads, num_bytes = asyncio.get_running_loop(), self.store.publish_threads, upload.num_bytes
        publishing = loop.run_in_executor(threads, self._publish, upload, request.base_version_id, begin_unix_ns)
        limit_s = self.store.settings.commit_stall_s + num_bytes / _LEAST_PUBLISH_BYTES_PER_S
        limit = loop.call_later(limit_s, self.store.publish_queue.give_up, turn)
        publishing.add_done_callback(lambda ended: ended.exception())  # retrieved even if this call ends first
        publishing.add_done_callback(lambda _: limit.cancel())
        publishing.add_done_callback(lambda _: self.store.publish_queue.release(turn))
        while not (await asyncio.wait({publishing}, timeout=_REPEAT_S))[0]:
            if turn.is_stuck:
                raise Unavailable(
                    f"the remote store has not stored the model's {num_bytes:,} bytes within {limit_s:.0f} s; commit "
                    "again once it responds"
                )
            yield pb.CommitProgress(stage="publish", num_bytes_done=0, num_bytes_total=num_bytes)
        version = publishing.result()
        description = version_description(version)
        yield pb.CommitProgress(
            stage="publish", num_bytes_done=num_bytes, num_bytes_total=num_bytes, version=description, notes=notes
        )

    async def _pack(self, upload: StagedUpload, request: pb.CommitRequest, turn: Turn) -> AsyncGenerator[PackProgress]:
        """Waits for its turn to pack, validates and packs, then waits for its ``turn`` to publish."""
        tenant_id = upload.record.tenant_id
        settings, files = self.store.settings, upload.files.absolute()
        base_config, base_dtype, base_is_opaque = None, "", False
        if request.base_version_id:
            base = await asyncio.to_thread(self.store.versions.describe, request.base_version_id)
            if base.document.base_id:
                raise UploadRefused("the base is an adapter itself; name the model that it adapts", field="base")
            manifest = base.manifest
            base_config, base_dtype, base_is_opaque = manifest.config, manifest.dtype, manifest.is_opaque
        job = PackJob(
            files,
            upload.pack_path.absolute(),
            request.largest_slot_bytes,
            settings.packer_memory_bytes,
            base_config,
            base_dtype,
            base_is_opaque,
            tuple(request.engines),
            request.quantize,
        )
        async with self.store.packer_queue.acquired(tenant_id) as packer_turn:
            self.store.publish_queue.check_stuck(tenant_id)  # before it packs in vain
            packer = run_packer(job, settings.commit_stall_s, packer_turn)
            async with aclosing(packer) as lines:
                async for line in lines:
                    yield line
        await self.store.publish_queue.acquire(turn)

    async def AbortUpload(self, request: pb.AbortUploadRequest, context: Context) -> pb.AbortUploadReply:
        await asyncio.to_thread(self.store.uploads.abort, request.upload_id)
        log.info("upload_aborted", upload_id=request.upload_id)
        return pb.AbortUploadReply()

    def _publish(self, upload: StagedUpload, base: str, begin_unix_ns: int) -> Version:
        version_id, versions, files = "", self.store.versions, upload.published_files()
        try:
            if base:
                version = versions.publish_adapter(base, files, upload.claim)
            else:
                version = versions.publish(upload.pack_path, files, upload.claim)
            version_id = version.version_id
        except OSError as error:
            raise write_error(error, "the version cannot be published", self.store.settings.remote_folder) from error
        finally:
            upload.end_commit(version_id)
        attributes = {
            "upload_id": upload.record.upload_id,
            "tenant_id": upload.record.tenant_id,
            "version_id": version_id,
        }
        record_span("param_store.commit", "", begin_unix_ns, time.time_ns(), **attributes)
        log.info("version_published", pack_id=version.pack_id, pack_bytes=version.manifest.num_bytes, **attributes)
        return version

    async def _receive(self, writer: FileWriter, data: AsyncIterator[bytes]) -> None:
        if writer.must_resume:
            await asyncio.get_running_loop().run_in_executor(self.store.digest_thread, writer.resume)
        async for piece in data:
            await asyncio.to_thread(writer.write, piece)
        await asyncio.to_thread(writer.finish)


def _too_long(file: DeclaredFile) -> UploadRefused:
    return UploadRefused(f"{file.path}: more bytes were sent than the {file.num_bytes:,} declared", field=file.path)


async def _data(
    parts: AsyncIterator[pb.PutFileRequest], file: DeclaredFile, num_left: int
) -> AsyncGenerator[bytes, None]:
    """The data of a file's messages. Raises ``UploadRefused`` for more than ``num_left`` bytes."""
    async for part in parts:
        if part.WhichOneof("part") != "data" or len(part.data) > MAX_PART_BYTES:
            message = f"messages after the first must carry 1 to {MAX_PART_BYTES} bytes of data"
            raise InvalidRequest(message, field="data")
        num_left -= len(part.data)
        if num_left < 0:
            raise _too_long(file)
        yield part.data


def _progress(line: PackProgress) -> pb.CommitProgress:
    return pb.CommitProgress(stage=line.stage, num_bytes_done=line.num_bytes_done, num_bytes_total=line.num_bytes_total)
