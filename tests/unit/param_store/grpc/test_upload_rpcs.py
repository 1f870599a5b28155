"""Uploads over gRPC: what may be declared, resuming, digests, quota, expiry."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.quantized_checkpoints import quantized_checkpoint
from tests.support.wait import HANG_S, eventually
from tests.unit.param_store.model_folders import (
    config_of,
    sha256_of,
    shard_name,
    tensors_of,
    write_folder,
    write_shards,
)
from tests.unit.param_store.running_store import (
    RunningStore,
    begin,
    commit,
    contents,
    put,
    put_requests,
    running_store,
    send,
)
from torchrelay.common.errors import (
    Conflict,
    NotFound,
    Overloaded,
    QuotaExceeded,
    TorchrelayError,
    Unavailable,
    UploadRefused,
)
from torchrelay.common.ids import new_id
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.common.net.rpc.options import ACCEPTED
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.param_store.grpc import upload_rpcs
from torchrelay.param_store.remote.versions import Version, Versions
from torchrelay.param_store.uploads.declared_files import DeclaredFile, check_declared
from torchrelay.param_store.uploads.file_writer import FileWriter
from torchrelay.param_store.uploads.packer_process import CommitQueue, Turn
from torchrelay.param_store.uploads.staged_upload import StagedUpload, UploadRecord

ZERO = "0" * 64


def refusal(caught: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> TorchrelayError:
    return error_from_rpc(caught.value)


def a_model(*more: DeclaredFile) -> list[DeclaredFile]:
    return [DeclaredFile(name, 10, ZERO) for name in ("config.json", "tokenizer.json", "model.safetensors")] + [*more]


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("pytorch_model.bin", "pickled weights are never loaded"),
        ("model.pt", "save the model as safetensors"),
        ("weights/model.PKL", "pickled weights"),
        ("../config.json", "it is not a plain file name"),
        ("/etc/passwd", "it is not a plain file name"),
        ("a\\b", "it is not a plain file name"),
        ("..", "it is not a plain file name"),
        ("", "it is not a plain file name"),
        ("modeling_llama.py", "it is not one of the files that a model consists of"),
        ("model-1-of-2.safetensors", "the upload has shards and model.safetensors; it must have either"),
        (f"{shard_name(1, 2)}\n", "it is not one of the files"),
        ("config.json", "it is declared twice"),
        (shard_name(1, 2), "must have either"),
    ],
)
def test_only_known_names_may_be_declared(path: str, detail: str) -> None:
    with pytest.raises(UploadRefused, match=detail) as refused:
        check_declared(a_model(DeclaredFile(path, 10, ZERO)), 0, 1 << 20)
    assert refused.value.field in (path, "files")


@pytest.mark.parametrize("gone", ["config.json", "tokenizer.json", "model.safetensors"])
def test_required_files_must_be_declared(gone: str) -> None:
    with pytest.raises(UploadRefused, match=f"{gone}: it is missing") as refused:
        check_declared([file for file in a_model() if file.path != gone], 0, 1 << 20)
    assert refused.value.field == gone


def test_sizes_digests_and_numbers_of_files_are_bounded() -> None:
    large = DeclaredFile("merges.txt", 65 << 20, ZERO)
    with pytest.raises(UploadRefused, match=r"merges.txt: it has 68,157,440 bytes; at most 67,108,864"):
        check_declared(a_model(large), 0, 1 << 40)
    with pytest.raises(UploadRefused, match=r"merges.txt: sha256 must be 64"):
        check_declared(a_model(DeclaredFile("merges.txt", 1, "ab")), 0, 1 << 40)
    with pytest.raises(UploadRefused, match="at most 512 files"):
        check_declared(a_model() * 200, 0, 1 << 40)
    with pytest.raises(UploadRefused, match="the upload has 30 bytes; at most 29"):
        check_declared(a_model(), 0, 29)
    with pytest.raises(QuotaExceeded, match="30 bytes and the tenant's quota has 29 left"):
        check_declared(a_model(), 29, 1 << 20)
    check_declared(a_model(), 30, 30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


async def test_interrupted_file_resumes_after_restart(tmp_path: Path, folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    async with running_store(tmp_path) as store:
        state = await begin(store, folder, "u1")
        assert {file.path for file in state.files} == set(contents(folder))
        assert not any(file.complete or file.num_bytes_received for file in state.files)
        state_of = await put(store, "u1", "model.safetensors", data[:100_000], part_bytes=30_000)
        assert (state_of.num_bytes_received, state_of.complete) == (100_000, False)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await put(store, "u1", "model.safetensors", data)
        assert isinstance(refusal(caught), Conflict)
        assert "model.safetensors continues at offset 100000, not 0" in refusal(caught).message
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await commit(store, "u1")
        assert "chat_template.jinja: the file is not complete: 0 of 14 bytes" in refusal(caught).message
        assert isinstance(refusal(caught), Conflict)  # it can still be sent
    async with running_store(tmp_path) as store:
        again = await begin(store, folder, "u1")
        assert {f.path: f.num_bytes_received for f in again.files}["model.safetensors"] == 100_000
        state_of = await put(store, "u1", "model.safetensors", data[100_000:], 100_000)
        assert (state_of.num_bytes_received, state_of.complete) == (len(data), True)
        assert (await put(store, "u1", "model.safetensors", b"", len(data))).complete
        assert (await put(store, "u1", "model.safetensors", data)).complete  # sent again, as plain clients do
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await put(store, "u1", "model.safetensors", data + b"x")
        assert "more bytes were sent" in refusal(caught).message
        assert (await store.stub.DescribeUpload(pb.DescribeUploadRequest(upload_id="u1"))).files == (
            await begin(store, folder, "u1")
        ).files


async def test_broken_connection_keeps_received_bytes(tmp_path: Path, folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    async with running_store(tmp_path) as store:
        await begin(store, folder, "u1")
        call = store.stub.PutFile()
        await call.write(pb.PutFileRequest(open=pb.PutFileRequest.Open(upload_id="u1", path="model.safetensors")))
        await call.write(pb.PutFileRequest(data=data[:5000]))
        received = await received_bytes(store, "u1", 5000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await put(store, "u1", "model.safetensors", data, received)
        assert "another call is sending this file" in refusal(caught).message
        call.cancel()
        await until_accepted(store, "u1", data, received)


async def received_bytes(store: RunningStore, upload_id: str, wanted: int, path: str = "model.safetensors") -> int:
    async with asyncio.timeout(HANG_S):
        while True:
            state = await store.stub.DescribeUpload(pb.DescribeUploadRequest(upload_id=upload_id))
            received = {file.path: file.num_bytes_received for file in state.files}[path]
            if received >= wanted:
                return received


async def until_accepted(store: RunningStore, upload_id: str, data: bytes, offset: int) -> None:
    """The store notices the broken call in its own time; until then it refuses another."""
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                assert (await put(store, upload_id, "model.safetensors", data[offset:], offset)).complete
                return
            except grpc.aio.AioRpcError as error:
                assert "another call is sending" in error_from_rpc(error).message


async def test_wrong_digest_drops_bytes(tmp_path: Path, folder: Path) -> None:
    good = (folder / "tokenizer.json").read_bytes()
    async with running_store(tmp_path) as store:
        await begin(store, folder, "u1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await put(store, "u1", "tokenizer.json", good[:-1] + b" ")
        assert isinstance(refusal(caught), UploadRefused)
        assert refusal(caught).field == "tokenizer.json"
        assert f"{sha256_of(good)} was declared" in refusal(caught).message
        assert (await put(store, "u1", "tokenizer.json", good)).complete


async def test_more_bytes_than_declared_and_wrong_messages_are_refused(tmp_path: Path, folder: Path) -> None:
    good = (folder / "tokenizer.json").read_bytes()
    async with running_store(tmp_path) as store:
        await begin(store, folder, "u1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await put(store, "u1", "tokenizer.json", good + b"x")
        assert "more bytes were sent" in refusal(caught).message
        opening = pb.PutFileRequest.Open(upload_id="u1", path="config.json", num_bytes=1 << 20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # announced, so that no byte is stored
            await put_requests(store, pb.PutFileRequest(open=opening), pb.PutFileRequest(data=b"{"))
        assert isinstance(refusal(caught), UploadRefused) and refusal(caught).field == "config.json"
        assert await received_bytes(store, "u1", 0, "config.json") == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await put(store, "u1", "vocab.json", b"")
        assert isinstance(refusal(caught), NotFound)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await put(store, "u2", "tokenizer.json", b"")
        assert isinstance(refusal(caught), NotFound)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await put_requests(store, pb.PutFileRequest(data=b"x"))
        assert refusal(caught).field == "open"


async def test_announced_excess_is_refused_before_received_bytes_are_digested(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, resumed = (folder / "model.safetensors").read_bytes(), list[FileWriter]()
    async with running_store(tmp_path) as store:
        await begin(store, folder, "u1")
        await put(store, "u1", "model.safetensors", data[:5000])
    monkeypatch.setattr(FileWriter, "resume", resumed.append)
    async with running_store(tmp_path) as store:  # restarted: what it has must be digested once more
        opening = pb.PutFileRequest.Open(
            upload_id="u1", path="model.safetensors", offset=5000, num_bytes=len(data) - 4999
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await put_requests(store, pb.PutFileRequest(open=opening))
        assert isinstance(refusal(caught), UploadRefused) and not resumed
        opening.num_bytes = 0
        call = store.stub.PutFile()
        await call.write(pb.PutFileRequest(open=opening))
        assert ACCEPTED in tuple(await call.initial_metadata())
        call.cancel()


async def test_begin_checks_quota_id_and_sameness(tmp_path: Path, folder: Path) -> None:
    async with running_store(tmp_path) as store:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await begin(store, folder, "u1", quota_bytes=1000)
        assert isinstance(refusal(caught), QuotaExceeded)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await begin(store, folder, "../u1")
        assert refusal(caught).field == "upload_id"
        await begin(store, folder, "u1", quota_bytes=1 << 30)
        (folder / "config.json").write_text("{}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await begin(store, folder, "u1")
        assert isinstance(refusal(caught), Conflict)
        assert (await store.report()).num_running_uploads == 1


async def test_refused_commit_publishes_nothing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", config_of())
    (folder / "config.json").write_text('{"architectures": ["Other"]}')
    async with running_store(tmp_path) as store:
        await send(store, folder, "u1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await commit(store, "u1")
        assert isinstance(refusal(caught), UploadRefused)
        assert refusal(caught).field == "config.json"
        assert "config.json: architectures: architecture 'Other' is not supported" in refusal(caught).message
        assert [path for path in (tmp_path / "remote").rglob("*") if path.is_file()] == []
        await store.stub.AbortUpload(pb.AbortUploadRequest(upload_id="u1"))
        assert list((tmp_path / "data/uploads").iterdir()) == []
        await store.stub.AbortUpload(pb.AbortUploadRequest(upload_id="u1"))


async def test_commit_ends_with_notes_about_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", config_of())
    tensors = tensors_of(config_of())
    tensors.by_name["score.weight"] = ("F32", (2,), bytes(8))
    tensors.write(folder / "model.safetensors")
    async with running_store(tmp_path) as store:
        await send(store, folder, "u1")
        *before, last = await commit(store, "u1")
        note = "tensors that LlamaForCausalLM does not use were left out: 'score.weight'"
        assert (list(last.notes), [list(each.notes) for each in before if each.notes]) == ([note], [])


async def test_model_larger_than_slots_refused(tmp_path: Path, folder: Path) -> None:
    async with running_store(tmp_path) as store:
        await send(store, folder, "u1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await commit(store, "u1", largest_slot_bytes=200_000)
        assert "the weights need 307,200 bytes and the largest slot has 200,000" in refusal(caught).message
        assert all(file.complete for file in (await begin(store, folder, "u2")).files)  # nothing to be sent again
        assert (await commit(store, "u2", largest_slot_bytes=307_200))[-1].version.pack_bytes == 307_200


async def test_model_that_no_engine_computes_refused(tmp_path: Path) -> None:
    awq, _ = quantized_checkpoint(tmp_path / "model", "awq")
    async with running_store(tmp_path) as store:
        await send(store, awq, "u1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await commit(store, "u1", engines=["torchrelay"])
        assert refusal(caught).field == "config.json"
        assert "only the engine vllm computes weights that are quantized so" in refusal(caught).message
        await send(store, awq, "u2")
        version = (await commit(store, "u2", engines=["torchrelay", "vllm"]))[-1].version
        assert (version.engine, version.dtype, version.shape.kv_dtype_bytes) == ("vllm", "I4", 2)


async def test_upload_after_refusal_reuses_unchanged_files(tmp_path: Path, folder: Path) -> None:
    good = (folder / "config.json").read_bytes()
    (folder / "config.json").write_text('{"architectures": ["Other"]}')
    async with running_store(tmp_path) as store:
        await send(store, folder, "u1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await commit(store, "u1")
        assert isinstance(refusal(caught), UploadRefused)
        assert (await store.report()).num_running_uploads == 0  # it has ended
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await commit(store, "u1")
        assert isinstance(refusal(caught), Conflict)
    (folder / "config.json").write_bytes(good)
    async with running_store(tmp_path) as store:  # restarted meanwhile
        others = await begin(store, folder, "u2", tenant_id="ten-2")
        assert not any(file.complete or file.num_bytes_received for file in others.files)
        state = await begin(store, folder, "u3")
        assert [file.path for file in state.files if not file.complete] == ["config.json"]
        assert not (tmp_path / "data/uploads/u1").exists()
        assert (await put(store, "u3", "config.json", good)).complete
        assert (await commit(store, "u3"))[-1].version.version_id


async def test_published_upload_protects_version_until_confirmed(tmp_path: Path, folder: Path) -> None:
    """Its gateway may have died before SQL named the version, even if the store was restarted since."""
    async with running_store(tmp_path) as store:
        await send(store, folder, "u1")
        version_id = (await commit(store, "u1"))[-1].version.version_id
    async with running_store(tmp_path, upload_expiry_s=0.01) as store:
        state = await store.stub.DescribeUpload(pb.DescribeUploadRequest(upload_id="u1"))
        assert state.version_id == version_id
        (listed,) = [stored async for stored in store.stub.ListVersions(pb.ListVersionsRequest())]
        assert (listed.version_id, list(listed.upload_ids)) == (version_id, ["u1"])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await store.stub.DeleteVersion(pb.DeleteVersionRequest(version_id=version_id))
        assert isinstance(refusal(caught), Conflict)
        await store.stub.AbortUpload(pb.AbortUploadRequest(upload_id="u1"))
        (listed,) = [stored async for stored in store.stub.ListVersions(pb.ListVersionsRequest())]
        assert list(listed.upload_ids) == []
        deletion = pb.DeleteVersionRequest(version_id=version_id, published_unix_us=listed.published_unix_us)
        await store.stub.DeleteVersion(deletion)
        assert [stored async for stored in store.stub.ListVersions(pb.ListVersionsRequest())] == []


async def test_open_uploads_are_bounded(tmp_path: Path, folder: Path) -> None:
    async with running_store(tmp_path, max_open_uploads=1) as store:
        await begin(store, folder, "u1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await begin(store, folder, "u2")
        assert isinstance(refusal(caught), Overloaded)
        await begin(store, folder, "u1")  # again
        await store.stub.AbortUpload(pb.AbortUploadRequest(upload_id="u1"))
        await begin(store, folder, "u2")


def num_bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def test_file_sent_in_parts_digested_once(tmp_path: Path) -> None:
    part, num_parts = os.urandom(1 << 20), 24
    files = (DeclaredFile("model.safetensors", num_parts << 20, sha256_of(part * num_parts)),)
    upload = StagedUpload.begin(tmp_path / "u1", UploadRecord("u1", "ten-1", files), {})
    before = num_bytes_read()
    for index in range(num_parts):
        writer = upload.open_file("model.safetensors", index << 20)
        assert writer is not None and not writer.must_resume
        writer.write(part)
        writer.finish()
        writer.close()
    assert num_bytes_read() - before < 4 << 20
    assert upload.file_progress("model.safetensors").complete


def test_complete_file_may_be_sent_again_during_a_commit(tmp_path: Path) -> None:
    files = (DeclaredFile("config.json", 2, sha256_of(b"{}")),)
    upload = StagedUpload.begin(tmp_path / "u1", UploadRecord("u1", "ten-1", files), {})
    writer = upload.open_file("config.json", 0)
    assert writer is not None
    writer.write(b"{}")
    writer.finish()
    writer.close()
    upload.begin_commit()
    assert upload.open_file("config.json", 0) is None
    with pytest.raises(Conflict, match="being committed"):
        upload.open_file("config.json", 2)


def test_received_bytes_digested_again_after_restart(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    files = (DeclaredFile("model.safetensors", len(data), sha256_of(data)),)
    upload = StagedUpload.begin(tmp_path / "u1", UploadRecord("u1", "ten-1", files), {})
    for begin_at in range(0, len(data), 1 << 20):
        upload = StagedUpload.load(tmp_path / "u1")
        writer = upload.open_file("model.safetensors", begin_at)
        assert writer is not None and writer.must_resume == bool(begin_at)
        writer.resume()
        assert not writer.must_resume
        writer.write(data[begin_at : begin_at + (1 << 20)])
        writer.finish()
        writer.close()
    assert upload.file_progress("model.safetensors").complete


async def test_rehashing_leaves_threads_to_other_calls(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, names = (folder / "model.safetensors").read_bytes(), ("u1", "u2", "u3")
    async with running_store(tmp_path) as store:
        for upload_id in names:
            await begin(store, folder, upload_id)
            await put(store, upload_id, "model.safetensors", data[:5000])
    going_on, opened = threading.Event(), list[str]()
    resume, open_file = FileWriter.resume, StagedUpload.open_file

    def slow(writer: FileWriter) -> None:
        assert going_on.wait(HANG_S)
        resume(writer)

    def counted(upload: StagedUpload, path: str, offset: int) -> FileWriter | None:
        opened.append(path)
        return open_file(upload, path, offset)

    monkeypatch.setattr(FileWriter, "resume", slow)
    monkeypatch.setattr(StagedUpload, "open_file", counted)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    async with running_store(tmp_path) as store:  # restarted: what it has must be digested once more
        rest = [asyncio.ensure_future(put(store, name, "model.safetensors", data[5000:], 5000)) for name in names]
        try:
            async with asyncio.timeout(HANG_S):
                await eventually(lambda: len(opened) == len(names), "the opening of each file")
                await begin(store, folder, "u4")
                assert (await put(store, "u4", "model.safetensors", data)).complete
        finally:
            going_on.set()
        assert all([(await ended).complete for ended in rest])


async def test_repeated_commit_returns_same_version(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "model")
    async with running_store(tmp_path) as store:
        await send(store, folder, "u1")
        progress = await commit(store, "u1")
        assert [line.stage for line in progress] == ["validate", "pack", "publish"]
        assert all(line.num_bytes_done == line.num_bytes_total > 0 for line in progress)
        assert (await commit(store, "u1"))[-1].version == progress[-1].version
        assert (await store.report()).num_running_uploads == 0
        assert not (tmp_path / "data/uploads/u1/files").exists()


async def test_cancelled_commit_can_be_repeated(tmp_path: Path, folder: Path) -> None:
    async with running_store(tmp_path) as store:
        await send(store, folder, "u1")
        call = store.stub.Commit(pb.CommitRequest(upload_id="u1"))
        await anext(aiter(call))
        call.cancel()
        await until_committed(store, "u1")


async def test_hung_remote_leaves_threads_to_other_calls(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, both_began = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    began: list[Versions] = []
    asked: list[str] = []
    publish, acquire = Versions.publish, CommitQueue.acquire

    def slow(versions: Versions, *args: Any) -> Version:
        began.append(versions)
        if len(began) == 2:
            loop.call_soon_threadsafe(both_began.set)
        assert published.wait(HANG_S)
        return publish(versions, *args)

    async def noted(queue: CommitQueue, turn: Turn) -> None:
        asked.append(turn.tenant_id)
        await acquire(queue, turn)

    monkeypatch.setattr(Versions, "publish", slow)
    monkeypatch.setattr(CommitQueue, "acquire", noted)
    # As many threads as a machine of few cores has for everything.
    loop.set_default_executor(ThreadPoolExecutor(2))
    async with running_store(tmp_path, num_packers=2) as store:
        commits = []
        for tenant in ("ten-1", "ten-1", "ten-2"):
            upload_id = new_id("upl")
            state = await begin(store, folder, upload_id, tenant_id=tenant)
            for file in state.files:
                if not file.complete:
                    await put(store, upload_id, file.path, (folder / file.path).read_bytes())
            commits.append(asyncio.ensure_future(commit(store, upload_id)))
            # A commit asks for its turn twice: to pack, then to publish.
            await eventually(lambda: len(asked) == 2 * len(commits), "the commit's wait for its turn to publish")
        assert asked == ["ten-1"] * 4 + ["ten-2"] * 2
        try:
            async with asyncio.timeout(HANG_S):
                await both_began.wait()
                await begin(store, folder, "u1", tenant_id="ten-3")
                for name, data in contents(folder).items():
                    assert (await put(store, "u1", name, data)).complete
            assert len(began) == 2  # one of each tenant
        finally:
            published.set()
        assert all([(await ended)[-1].version.version_id for ended in commits])
        assert len(began) == 3


async def test_commit_does_not_wait_for_hung_publication(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, publish = threading.Event(), Versions.publish

    def hung(versions: Versions, *args: Any) -> Version:
        assert answers.wait(HANG_S)
        return publish(versions, *args)

    monkeypatch.setattr(Versions, "publish", hung)
    monkeypatch.setattr(upload_rpcs, "_REPEAT_S", 0.1)
    async with running_store(tmp_path, commit_stall_s=5.0) as store:
        try:
            await send(store, folder, "u1")
            assert all(file.complete for file in (await begin(store, folder, "u2")).files)  # taken over
            async with asyncio.timeout(HANG_S):
                refused = await asyncio.gather(commit(store, "u1"), commit(store, "u2"), return_exceptions=True)
            with monkeypatch.context() as patched:  # who comes later does not even pack
                patched.setattr(upload_rpcs, "run_packer", None)
                with pytest.raises(grpc.aio.AioRpcError, match=r"an earlier commit waits for .* the remote store"):
                    await commit(store, "u2")
        finally:
            answers.set()
        said = [error_from_rpc(error) for error in refused if isinstance(error, grpc.aio.AioRpcError)]
        assert [type(error) for error in said] == [Unavailable, Unavailable]
        assert all("remote store" in error.message and "commit again" in error.message for error in said)
        for upload_id in ("u1", "u2"):
            await until_committed(store, upload_id)


async def until_committed(store: RunningStore, upload_id: str) -> None:
    """A commit that was given up may still be ending."""
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                assert (await commit(store, upload_id))[-1].version.version_id
                return
            except grpc.aio.AioRpcError as error:
                message = error_from_rpc(error).message
                assert "being committed" in message or "an earlier commit waits" in message


async def test_file_released_when_call_ends_during_open(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, going_on = threading.Event(), threading.Event()
    open_file = StagedUpload.open_file

    def slow(upload: StagedUpload, path: str, offset: int) -> FileWriter | None:
        opening.set()
        going_on.wait(HANG_S)
        return open_file(upload, path, offset)

    async with running_store(tmp_path) as store:
        await begin(store, folder, "u1")
        monkeypatch.setattr(StagedUpload, "open_file", slow)
        call = store.stub.PutFile()
        await call.write(pb.PutFileRequest(open=pb.PutFileRequest.Open(upload_id="u1", path="model.safetensors")))
        assert await asyncio.to_thread(opening.wait, HANG_S)
        call.cancel()
        await store.report()  # by now the store has received the cancellation
        going_on.set()
        monkeypatch.undo()
        await until_accepted(store, "u1", (folder / "model.safetensors").read_bytes(), 0)
