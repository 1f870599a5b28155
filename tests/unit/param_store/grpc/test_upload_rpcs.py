"""Uploads over gRPC: resuming, digests, quota, expiry, commits that fail, hang or are repeated."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.disk_limits import files_end_at
from tests.support.int8_checkpoints import int8_checkpoint
from tests.support.wait import HANG_S, eventually
from tests.unit.param_store.model_folders import LARGER, config_of, sha256_of, tensors_of, write_folder, write_shards
from tests.unit.param_store.running_store import RunningStore, contents, refusal, running_store
from torchrelay.common.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuotaExceeded,
    Unavailable,
    UploadRefused,
)
from torchrelay.common.ids import new_id
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.common.net.rpc.options import ACCEPTED
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.param_store.grpc import upload_rpcs
from torchrelay.param_store.remote.versions import Version, Versions
from torchrelay.param_store.uploads.file_writer import FileWriter
from torchrelay.param_store.uploads.packer_process import CommitQueue, PackJob, PackProgress, Turn, run_packer
from torchrelay.param_store.uploads.staged_upload import StagedUpload

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


@pytest.fixture
def data(folder: Path) -> bytes:
    """The weights of the model."""
    return (folder / WEIGHTS).read_bytes()


async def num_received(store: RunningStore, path: str = WEIGHTS) -> int:
    return {file.path: file.num_bytes_received for file in (await store.upload_state("u1")).files}[path]


async def until_accepted(store: RunningStore, data: bytes, offset: int) -> None:
    """The store notices the broken call in its own time; until then it refuses another."""
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                assert (await store.put("u1", WEIGHTS, data[offset:], offset)).complete
                return
            except grpc.aio.AioRpcError as error:
                assert "another call is sending" in error_from_rpc(error).message


async def test_interrupted_file_resumes_after_restart(tmp_path: Path, folder: Path, data: bytes) -> None:
    async with running_store(tmp_path) as store:
        state = await store.begin(folder, "u1")
        assert {file.path for file in state.files} == set(contents(folder))
        assert not any(file.complete or file.num_bytes_received for file in state.files)
        state_of = await store.put("u1", WEIGHTS, data[:100_000], part_bytes=30_000)
        assert (state_of.num_bytes_received, state_of.complete) == (100_000, False)
        error = await refusal(store.put("u1", WEIGHTS, data))
        assert isinstance(error, Conflict) and f"{WEIGHTS} continues at offset 100000, not 0" in error.message
        error = await refusal(store.commit("u1"))
        assert "chat_template.jinja: the file is not complete: 0 of 14 bytes" in error.message
        assert isinstance(error, Conflict)  # it can still be sent
    async with running_store(tmp_path) as store:
        again = await store.begin(folder, "u1")
        assert {file.path: file.num_bytes_received for file in again.files}[WEIGHTS] == 100_000
        state_of = await store.put("u1", WEIGHTS, data[100_000:], 100_000)
        assert (state_of.num_bytes_received, state_of.complete) == (len(data), True)
        assert (await store.put("u1", WEIGHTS, b"", len(data))).complete
        assert (await store.put("u1", WEIGHTS, data)).complete  # sent again, as plain clients do
        assert "more bytes were sent" in (await refusal(store.put("u1", WEIGHTS, data + b"x"))).message
        assert (await store.upload_state("u1")).files == (await store.begin(folder, "u1")).files


async def test_broken_connection_keeps_received_bytes(tmp_path: Path, folder: Path, data: bytes) -> None:
    async with running_store(tmp_path) as store:
        await store.begin(folder, "u1")
        call = store.stub.PutFile()
        await call.write(pb.PutFileRequest(open=pb.PutFileRequest.Open(upload_id="u1", path=WEIGHTS)))
        await call.write(pb.PutFileRequest(data=data[:5000]))

        async def is_received() -> bool:
            return await num_received(store) == 5000

        await eventually(is_received, "the first bytes in the store")
        error = await refusal(store.put("u1", WEIGHTS, data, 5000))
        assert "another call is sending this file" in error.message
        call.cancel()
        await until_accepted(store, data, 5000)


async def test_file_released_when_call_ends_during_open(
    tmp_path: Path, folder: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, going_on = threading.Event(), threading.Event()
    open_file = StagedUpload.open_file

    def slow(upload: StagedUpload, path: str, offset: int) -> FileWriter | None:
        opening.set()
        going_on.wait(HANG_S)
        return open_file(upload, path, offset)

    async with running_store(tmp_path) as store:
        await store.begin(folder, "u1")
        monkeypatch.setattr(StagedUpload, "open_file", slow)
        call = store.stub.PutFile()
        await call.write(pb.PutFileRequest(open=pb.PutFileRequest.Open(upload_id="u1", path=WEIGHTS)))
        assert await asyncio.to_thread(opening.wait, HANG_S)
        call.cancel()
        await store.report()  # by now the store has received the cancellation
        going_on.set()
        monkeypatch.undo()
        await until_accepted(store, data, 0)


async def test_faulty_files_and_messages_are_refused(tmp_path: Path, folder: Path) -> None:
    good = (folder / "tokenizer.json").read_bytes()
    async with running_store(tmp_path) as store:
        await store.begin(folder, "u1")
        error = await refusal(store.put("u1", "tokenizer.json", good[:-1] + b" "))
        assert isinstance(error, UploadRefused) and error.field == "tokenizer.json"
        assert f"{sha256_of(good)} was declared" in error.message
        assert "more bytes were sent" in (await refusal(store.put("u1", "tokenizer.json", good + b"x"))).message
        assert (await store.put("u1", "tokenizer.json", good)).complete
        opening = pb.PutFileRequest.Open(upload_id="u1", path="config.json", num_bytes=1 << 20)
        # announced, so that no byte is stored
        error = await refusal(store.put_requests(pb.PutFileRequest(open=opening), pb.PutFileRequest(data=b"{")))
        assert isinstance(error, UploadRefused) and error.field == "config.json"
        assert await num_received(store, "config.json") == 0
        assert isinstance(await refusal(store.put("u1", "vocab.json", b"")), NotFound)
        assert isinstance(await refusal(store.put("u2", "tokenizer.json", b"")), NotFound)
        assert (await refusal(store.put_requests(pb.PutFileRequest(data=b"x")))).field == "open"


async def test_announced_excess_is_refused_before_received_bytes_are_digested(
    tmp_path: Path, folder: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = list[FileWriter]()
    async with running_store(tmp_path) as store:
        await store.begin(folder, "u1")
        await store.put("u1", WEIGHTS, data[:5000])
    monkeypatch.setattr(FileWriter, "resume", resumed.append)
    async with running_store(tmp_path) as store:  # restarted: what it has must be digested once more
        opening = pb.PutFileRequest.Open(upload_id="u1", path=WEIGHTS, offset=5000, num_bytes=len(data) - 4999)
        error = await refusal(store.put_requests(pb.PutFileRequest(open=opening)))
        assert isinstance(error, UploadRefused) and not resumed
        opening.num_bytes = 0
        call = store.stub.PutFile()
        await call.write(pb.PutFileRequest(open=opening))
        assert ACCEPTED in tuple(await call.initial_metadata())
        call.cancel()


async def test_begin_checks_quota_id_sameness_and_number(tmp_path: Path, folder: Path) -> None:
    async with running_store(tmp_path, max_open_uploads=1) as store:
        assert isinstance(await refusal(store.begin(folder, "u1", quota_bytes=1000)), QuotaExceeded)
        assert (await refusal(store.begin(folder, "../u1"))).field == "upload_id"
        await store.begin(folder, "u1", quota_bytes=1 << 30)
        assert isinstance(await refusal(store.begin(folder, "u2")), Overloaded)
        await store.begin(folder, "u1")  # again
        (folder / "config.json").write_text("{}")
        assert isinstance(await refusal(store.begin(folder, "u1")), Conflict)
        assert (await store.report()).num_running_uploads == 1
        await store.abort("u1")
        assert list((tmp_path / "data/uploads").iterdir()) == []
        await store.abort("u1")
        await store.begin(folder, "u2")


def write_awq(folder: Path) -> Path:
    """A checkpoint whose projections have numbers of 4 bits, groups of 32, scales of 1."""
    quantization = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True}
    config = config_of(quantization_config=quantization)
    tensors = tensors_of(config, "F16")
    for name in [name for name in tensors.by_name if "_proj." in name]:
        _, (num_out, num_in), _ = tensors.by_name.pop(name)
        layer, num_groups = name.removesuffix("weight"), num_in // 32
        tensors.by_name |= {
            f"{layer}qweight": ("I32", (num_in, num_out // 8), bytes(num_in * num_out // 2)),
            f"{layer}qzeros": ("I32", (num_groups, num_out // 8), bytes(num_groups * num_out // 2)),
            f"{layer}scales": ("F16", (num_groups, num_out), b"\x00\x3c" * (num_groups * num_out)),
        }
    tensors.write(write_folder(folder, config, "F16") / WEIGHTS)
    return folder


async def test_limits_and_engines_reach_packer_and_notes_come_back(tmp_path: Path) -> None:
    awq = write_awq(tmp_path / "awq")
    plain, tensors = write_folder(tmp_path / "plain"), tensors_of(config_of())
    tensors.by_name["score.weight"] = ("F32", (2,), bytes(8))
    tensors.write(plain / WEIGHTS)
    async with running_store(tmp_path) as store:
        await store.send(awq, "u1")
        error = await refusal(store.commit("u1", engines=["torchrelay"]))
        assert error.field == "config.json"
        assert "only the engine vllm computes weights that are quantized so" in error.message
        await store.send(awq, "u2")
        version = (await store.commit("u2", engines=["torchrelay", "vllm"]))[-1].version
        assert (version.engine, version.dtype, version.shape.kv_dtype_bytes) == ("vllm", "I4", 2)
        await store.send(plain, "u3")
        error = await refusal(store.commit("u3", largest_slot_bytes=200_000))
        assert "the weights need 307,200 bytes and the largest slot has 200,000" in error.message
        assert all(file.complete for file in (await store.begin(plain, "u4")).files)  # nothing to be sent again
        *before, last = await store.commit("u4", largest_slot_bytes=307_200)
        note = "tensors that LlamaForCausalLM does not use were left out: 'score.weight'"
        assert (list(last.notes), [list(each.notes) for each in before if each.notes]) == ([note], [])
        assert last.version.pack_bytes == 307_200


async def test_refused_commit_publishes_nothing_and_unchanged_files_are_reused(tmp_path: Path, folder: Path) -> None:
    good = (folder / "config.json").read_bytes()
    (folder / "config.json").write_text('{"architectures": ["Other"]}')
    async with running_store(tmp_path) as store:
        await store.send(folder, "u1")
        error = await refusal(store.commit("u1"))
        assert isinstance(error, UploadRefused) and error.field == "config.json"
        assert "config.json: architectures: architecture 'Other' is not supported" in error.message
        assert [path for path in (tmp_path / "remote").rglob("*") if path.is_file()] == []
        assert (await store.report()).num_running_uploads == 0  # it has ended
        assert isinstance(await refusal(store.commit("u1")), Conflict)
    (folder / "config.json").write_bytes(good)
    async with running_store(tmp_path) as store:  # restarted meanwhile
        others = await store.begin(folder, "u2", tenant_id="ten-2")
        assert not any(file.complete or file.num_bytes_received for file in others.files)
        state = await store.begin(folder, "u3")
        assert [file.path for file in state.files if not file.complete] == ["config.json"]
        assert not (tmp_path / "data/uploads/u1").exists()
        assert (await store.put("u3", "config.json", good)).complete
        assert (await store.commit("u3"))[-1].version.version_id


async def test_upload_and_commit_continue_after_full_disk(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", LARGER)
    data = (folder / WEIGHTS).read_bytes()
    async with running_store(tmp_path) as store:
        await store.begin(folder, "u1")
        with files_end_at(3 << 20):
            error = await refusal(store.put("u1", WEIGHTS, data))
        assert isinstance(error, Unavailable) and f"{WEIGHTS}: cannot be written: the disk of" in error.message
        received = await num_received(store)
        assert 0 < received <= 3 << 20
        assert (await store.put("u1", WEIGHTS, data[received:], offset=received)).complete
        await store.send(folder, "u1")
        with files_end_at(3 << 20):
            assert isinstance(await refusal(store.commit("u1")), Unavailable)  # the packer inherits the limit
        assert not any(path.is_file() for path in (tmp_path / "remote").rglob("*"))
        assert (await store.commit("u1"))[-1].version.pack_bytes > 0


async def until_committed(store: RunningStore, upload_id: str) -> list[pb.CommitProgress]:
    """The progress of the first commit that succeeds; a commit that was given up may still be ending."""
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                return await store.commit(upload_id)
            except grpc.aio.AioRpcError as error:
                message = error_from_rpc(error).message
                assert "being committed" in message or "commit again" in message


async def test_repeated_commit_returns_same_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, num_turns, acquire = write_shards(tmp_path / "model"), 0, CommitQueue.acquire

    async def acquire_unless_packed(queue: CommitQueue, turn: Turn) -> None:
        nonlocal num_turns
        num_turns += 1
        if num_turns == 2:  # to publish
            await asyncio.Event().wait()
        await acquire(queue, turn)

    monkeypatch.setattr(CommitQueue, "acquire", acquire_unless_packed)
    async with running_store(tmp_path) as store:
        await store.send(folder, "u1")
        call = store.stub.Commit(pb.CommitRequest(upload_id="u1"))
        await anext(aiter(call))
        await eventually(lambda: num_turns == 2, "the end of the packer")
        call.cancel()
        progress = await until_committed(store, "u1")
        assert [line.stage for line in progress] == ["validate", "pack", "publish"]
        assert all(line.num_bytes_done == line.num_bytes_total > 0 for line in progress)
        assert (await store.commit("u1"))[-1].version == progress[-1].version
        assert (await store.report()).num_running_uploads == 0
        assert not (tmp_path / "data/uploads/u1/files").exists()


async def test_quantized_commit_publishes_the_version_of_the_int8_folder(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", dtype="bfloat16")
    async with running_store(tmp_path) as store:
        await store.send(int8_checkpoint(folder), "int8")
        expected = (await store.commit("int8"))[-1].version
        await store.send(folder, "u1")
        progress = await store.commit("u1", quantize="int8")
        version = progress[-1].version
        assert [line.stage for line in progress] == ["validate", "pack", "publish"]
        assert (version.version_id, version.pack_id) == (expected.version_id, expected.pack_id)
        assert (version.engine, version.dtype) == ("torchrelay", expected.dtype)
        assert (await store.commit("u1", quantize="int8"))[-1].version == version
    async with running_store(tmp_path) as store:  # restarted meanwhile
        error = await refusal(store.commit("u1"))
        assert isinstance(error, InvalidRequest) and error.field == "quantize"
        assert error.message == "this upload was committed with another quantize: abort it, and upload again"
        assert (await store.commit("u1", quantize="int8"))[-1].version == version


async def test_upload_that_cannot_be_quantized_stays_open(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", dtype="bfloat16")
    async with running_store(tmp_path) as store:
        await store.send(int8_checkpoint(folder), "int8")
        await store.send(folder, "u1")
        for upload_id, quantize, engines, said in (
            ("int8", "int8", [], "quantization_config: the weights are quantized already"),
            ("u1", "int4", [], "quantize must be int8 or missing, not 'int4'"),
            ("u1", "int8", ["vllm"], "only the engine torchrelay computes weights that are quantized so"),
        ):
            error = await refusal(store.commit(upload_id, engines=engines, quantize=quantize))
            assert isinstance(error, InvalidRequest) and error.field == "quantize"
            assert error.message.startswith(said)
        adapter = tmp_path / "adapter"
        adapter.mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (adapter / name).write_text("{}")
        await store.send(adapter, "adapter")
        commit = pb.CommitRequest(upload_id="adapter", base_version_id="base", quantize="int8")
        error = await refusal(anext(aiter(store.stub.Commit(commit))))
        assert (error.field, error.message) == ("quantize", "an adapter keeps its dtype")
        plain = (await store.commit("u1"))[-1].version
        assert (plain.engine, plain.dtype) == ("", "BF16")
        assert (await store.commit("int8"))[-1].version.pack_id != plain.pack_id


async def test_published_upload_protects_version_until_confirmed(tmp_path: Path, folder: Path) -> None:
    """Its gateway may have died before SQL named the version, even if the store was restarted since."""
    async with running_store(tmp_path) as store:
        await store.send(folder, "u1")
        version_id = (await store.commit("u1"))[-1].version.version_id
    async with running_store(tmp_path, upload_expiry_s=0.01) as store:
        state = await store.upload_state("u1")
        assert state.version_id == version_id
        (listed,) = [stored async for stored in store.stub.ListVersions(pb.ListVersionsRequest())]
        assert (listed.version_id, list(listed.upload_ids)) == (version_id, ["u1"])
        assert isinstance(
            await refusal(store.stub.DeleteVersion(pb.DeleteVersionRequest(version_id=version_id))), Conflict
        )
        await store.abort("u1")
        (listed,) = [stored async for stored in store.stub.ListVersions(pb.ListVersionsRequest())]
        assert list(listed.upload_ids) == []
        deletion = pb.DeleteVersionRequest(version_id=version_id, published_unix_us=listed.published_unix_us)
        await store.stub.DeleteVersion(deletion)
        assert [stored async for stored in store.stub.ListVersions(pb.ListVersionsRequest())] == []


async def test_rehashing_leaves_threads_to_other_calls(
    tmp_path: Path, folder: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("u1", "u2", "u3")
    async with running_store(tmp_path) as store:
        for upload_id in names:
            await store.begin(folder, upload_id)
            await store.put(upload_id, WEIGHTS, data[:5000])
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
        rest = [asyncio.ensure_future(store.put(name, WEIGHTS, data[5000:], 5000)) for name in names]
        try:
            async with asyncio.timeout(HANG_S):
                await eventually(lambda: len(opened) == len(names), "the opening of each file")
                await store.begin(folder, "u4")
                assert (await store.put("u4", WEIGHTS, data)).complete
        finally:
            going_on.set()
        assert all([(await ended).complete for ended in rest])


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
            await store.send(folder, upload_id, tenant)
            commits.append(asyncio.ensure_future(store.commit(upload_id)))
            # A commit asks for its turn twice: to pack, then to publish.
            await eventually(lambda: len(asked) == 2 * len(commits), "the commit's wait for its turn to publish")
        assert asked == ["ten-1"] * 4 + ["ten-2"] * 2
        try:
            async with asyncio.timeout(HANG_S):
                await both_began.wait()
                await store.send(folder, "u1", "ten-3")
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

    def packed(job: PackJob, stall_s: float, turn: Turn) -> AsyncGenerator[PackProgress, None]:
        return run_packer(job, HANG_S, turn)

    monkeypatch.setattr(Versions, "publish", hung)
    monkeypatch.setattr(upload_rpcs, "run_packer", packed)  # the packer itself has time
    monkeypatch.setattr(upload_rpcs, "_REPEAT_S", 0.1)
    async with running_store(tmp_path, commit_stall_s=0.1) as store:
        try:
            await store.send(folder, "u1")
            assert all(file.complete for file in (await store.begin(folder, "u2")).files)  # taken over
            for error in await asyncio.gather(refusal(store.commit("u1")), refusal(store.commit("u2"))):
                assert isinstance(error, Unavailable)
                assert "remote store" in error.message and "commit again" in error.message
            with monkeypatch.context() as patched:  # a later commit does not even pack
                patched.setattr(upload_rpcs, "run_packer", None)
                message = (await refusal(store.commit("u2"))).message
                assert message.startswith("an earlier commit waits for") and "the remote store" in message
        finally:
            answers.set()
        for upload_id in ("u1", "u2"):
            await until_committed(store, upload_id)
