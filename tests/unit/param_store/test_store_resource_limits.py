"""Exhausted resources of a host: an arena with everything pinned, full disks, truncated files."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import grpc
import pytest

from tests.support.disk_limits import files_end_at
from tests.unit.param_store.holders import bytes_in, held
from tests.unit.param_store.model_folders import LARGER, write_folder
from tests.unit.param_store.running_store import REMOTE, RunningStore, begin, commit, publish, put, running_store, send
from torchrelay.common.errors import Overloaded, Unavailable
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.control.v1 import param_store_pb2 as pb


async def test_relay_into_pinned_arena_works_after_release(tmp_path: Path) -> None:
    async with running_store(tmp_path) as store:
        first, second = [
            (await publish(store, write_folder(tmp_path / str(seed), LARGER, seed=seed))).pack_id for seed in range(2)
        ]
    remote = tmp_path / "remote/packs"
    async with running_store(tmp_path, arena_bytes=(remote / first).stat().st_size + (2 << 20)) as store:
        await store.relay(first, REMOTE)
        await store.until_complete(first)
        async with held(store, first) as replies:
            await anext(replies)
            refusals = await asyncio.gather(*(store.relay(second, REMOTE) for _ in range(4)), return_exceptions=True)
            for refusal in refusals:
                assert isinstance(refusal, grpc.aio.AioRpcError)
                error = error_from_rpc(refusal)
                assert isinstance(error, Overloaded)
                assert (error.code, error.field) == ("arena_full", "arena_bytes")
            assert await bytes_in(store, first) == (remote / first).read_bytes()
            copy = await store.copy(second)
            assert copy is not None and "are pinned" in copy.error
        await store.until(lambda report: all(copy.num_pins == 0 for copy in report.copies))
        assert await store.relay(second, REMOTE) is False
        await store.until_complete(second)
        assert await bytes_in(store, second) == (remote / second).read_bytes()
        assert [copy.pack_id for copy in (await store.report()).copies] == [second]


async def test_pack_larger_than_arena_evicts_nothing(tmp_path: Path) -> None:
    async with running_store(tmp_path) as store:
        small = (await publish(store, write_folder(tmp_path / "small"))).pack_id
        large = (await publish(store, write_folder(tmp_path / "large", LARGER))).pack_id
    async with running_store(tmp_path, arena_bytes=4 << 20) as store:
        await store.relay(small, REMOTE)
        await store.until_complete(small)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await store.relay(large, REMOTE)
        assert error_from_rpc(caught.value).code == "arena_full"
        assert await bytes_in(store, small) == (tmp_path / "remote/packs" / small).read_bytes()


async def test_truncated_pack_completed_by_peer(tmp_path: Path, published: tuple[Path, pb.VersionDescription]) -> None:
    pack, version = published
    whole = pack.read_bytes()
    async with running_store(tmp_path) as good, running_store(tmp_path) as store:
        await good.relay(pack.name, REMOTE)
        await good.until_complete(pack.name)
        os.truncate(pack, version.pack_bytes // 2)
        await store.relay(pack.name, REMOTE)
        report = await store.until(lambda report: bool(report.copies) and report.copies[0].error != "")
        assert f"packs/{pack.name} of the remote store ends at byte {version.pack_bytes // 2}" in report.copies[0].error
        await store.relay(pack.name, REMOTE, good.source(pack.name, store))
        assert (await store.until_complete(pack.name)).source == good.store_id
        assert await bytes_in(store, pack.name) == whole


async def refused_with(store: RunningStore, upload_id: str, path: str, data: bytes) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await put(store, upload_id, path, data)
    error = error_from_rpc(caught.value)
    assert isinstance(error, Unavailable)
    return error.message


async def test_upload_resumes_after_full_disk(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", LARGER)
    data = (folder / "model.safetensors").read_bytes()
    async with running_store(tmp_path) as store:
        await begin(store, folder, "u1")
        with files_end_at(3 << 20):
            assert "model.safetensors: cannot be written: the disk of" in await refused_with(
                store, "u1", "model.safetensors", data
            )
        state = await store.stub.DescribeUpload(pb.DescribeUploadRequest(upload_id="u1"))
        received = {file.path: file.num_bytes_received for file in state.files}["model.safetensors"]
        assert 0 < received <= 3 << 20
        assert (await put(store, "u1", "model.safetensors", data[received:], offset=received)).complete
        for path in folder.iterdir():
            if path.name != "model.safetensors":
                await put(store, "u1", path.name, path.read_bytes())
        assert (await commit(store, "u1"))[-1].version.pack_bytes > 0


async def test_commit_on_full_disk_can_be_retried(tmp_path: Path) -> None:
    async with running_store(tmp_path) as store:
        await send(store, write_folder(tmp_path / "model", LARGER), "u1")
        with files_end_at(3 << 20), pytest.raises(grpc.aio.AioRpcError) as caught:
            await commit(store, "u1")  # the packer inherits the limit
        assert isinstance(error_from_rpc(caught.value), Unavailable)
        assert not any(path.is_file() for path in (tmp_path / "remote").rglob("*"))
        assert (await commit(store, "u1"))[-1].version.pack_bytes > 0
