"""Copies in the arena over gRPC: hold, drop, eviction, failure, epochs, restart."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from tests.unit.param_store.holders import bytes_in, drop, held, slow_holder
from tests.unit.param_store.model_folders import LARGER, write_folder
from tests.unit.param_store.running_store import REMOTE, peer, publish, running_store
from torchrelay.common.errors import NotFound, StaleEpoch, Unavailable
from torchrelay.common.ids import new_id
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.transfer.arena.arena import Arena
from torchrelay.transfer.errors import ArenaFull


async def test_hold_reports_complete_segments_and_pins(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription]
) -> None:
    pack, _ = published
    async with running_store(tmp_path) as store:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with held(store, pack.name) as replies:
                await anext(replies)
        assert isinstance(error_from_rpc(caught.value), NotFound)
        with slow_holder(pack) as source:
            await store.relay(pack.name, peer("slow", source.server.address, pack.name, store))
            async with held(store, pack.name) as replies:
                ends = [source.manifest.chunks_of(segment).stop for segment in range(len(source.manifest.segments))]
                assert (await anext(replies)).num_segments_ready == 0
                for begin, end in pairwise([0, *sorted(set(ends))]):
                    for index in range(begin, end):
                        source.show(index)
                    assert (await anext(replies)).num_segments_ready == sum(each <= end for each in ends)
                assert (await store.report()).copies[0].num_pins == 1
                assert await drop(store, pack.name) is False
            await store.until(lambda report: report.copies[0].num_pins == 0)
            assert await drop(store, pack.name) is True


async def test_failed_relay_reported_to_holders_and_retried(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription]
) -> None:
    pack, _ = published
    async with running_store(tmp_path) as store:
        with slow_holder(pack) as source:
            await store.relay(pack.name, peer("slow", source.server.address, pack.name, store))
            async with held(store, pack.name) as replies:
                assert (await anext(replies)).num_segments_ready == 0
                for index in source.manifest.chunks_of(0):
                    source.show(index)
                assert (ready := (await anext(replies)).num_segments_ready) > 0
                source.buffer.fail("the test says so")
                reply = await anext(replies)
                assert (reply.num_segments_ready, "the test says so" in reply.error) == (ready, True)
                copy = await store.copy(pack.name)
                assert copy is not None
                assert "the test says so" in copy.error
            await store.until(lambda report: report.copies[0].num_chunks_verified == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with held(store, pack.name, waits_for_relay=True) as replies:
                await anext(replies)
        assert isinstance(error_from_rpc(caught.value), Unavailable)
        assert "the test says so" in error_from_rpc(caught.value).message
        assert await store.relay(pack.name, REMOTE) is False
        assert (await store.until_complete(pack.name)).error == ""
        assert await bytes_in(store, pack.name) == pack.read_bytes()


async def test_commands_of_old_epoch_are_refused(tmp_path: Path, published: tuple[Path, pb.VersionDescription]) -> None:
    pack, _ = published
    async with running_store(tmp_path) as store:
        await store.relay(pack.name, REMOTE, epoch=7)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await store.relay(pack.name, REMOTE, epoch=6)
        assert isinstance(error_from_rpc(caught.value), StaleEpoch)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drop(store, pack.name, epoch=6)
        assert isinstance(error_from_rpc(caught.value), StaleEpoch)
        assert (await store.report()).epoch == 7


async def test_dropped_download_stops(tmp_path: Path, published: tuple[Path, pb.VersionDescription]) -> None:
    pack, _ = published
    async with running_store(tmp_path) as store:
        with slow_holder(pack) as source:
            source.show(0)
            await store.relay(pack.name, peer("slow", source.server.address, pack.name, store))
            await store.until(lambda report: report.copies[0].num_chunks_verified == 1)
            assert await drop(store, pack.name) is True
            assert (await store.report()).copies == []
            assert await drop(store, pack.name) is False


async def test_only_unpinned_packs_evicted(tmp_path: Path) -> None:
    async with running_store(tmp_path) as store:
        ids = [
            (await publish(store, write_folder(tmp_path / str(seed), LARGER, seed=seed))).pack_id for seed in range(3)
        ]
    pack_bytes = (tmp_path / "remote/packs" / ids[0]).stat().st_size
    async with running_store(tmp_path, arena_bytes=2 * pack_bytes + (2 << 20)) as store:
        for pack_id in ids[:2]:
            await store.relay(pack_id, REMOTE)
            await store.until_complete(pack_id)
        async with held(store, ids[0]) as first:
            await anext(first)
            await store.relay(ids[2], REMOTE)
            await store.until_complete(ids[2])
            assert {copy.pack_id for copy in (await store.report()).copies} == {ids[0], ids[2]}
            async with held(store, ids[2]) as third:
                await anext(third)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await store.relay(ids[1], REMOTE)
                assert error_from_rpc(caught.value).code == "arena_full"


async def test_arena_outlives_its_store(tmp_path: Path, published: tuple[Path, pb.VersionDescription]) -> None:
    pack, _ = published
    arena = Path("/dev/shm") / new_id("torchrelay-test")
    try:
        async with running_store(tmp_path, arena_path=arena, keep_arena=True) as store:
            await store.relay(pack.name, REMOTE)
            await store.until_complete(pack.name)
        async with running_store(tmp_path, arena_path=arena) as store:
            await store.until_complete(pack.name)
            assert await store.relay(pack.name, REMOTE) is True
            assert (await store.report()).bytes_received == 0
            assert await bytes_in(store, pack.name) == pack.read_bytes()
        assert not arena.exists()
    finally:
        arena.unlink(missing_ok=True)


async def test_partial_pack_of_earlier_process_completed(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription]
) -> None:
    pack, version = published
    arena = Path("/dev/shm") / new_id("torchrelay-test")
    try:
        with slow_holder(pack) as source:
            source.show(0)
            async with running_store(tmp_path, arena_path=arena, keep_arena=True) as store:
                await store.relay(pack.name, peer("slow", source.server.address, pack.name, store))
                await store.until(lambda report: report.copies[0].num_chunks_verified == 1)
        async with running_store(tmp_path, arena_path=arena) as store:
            await store.until(lambda report: bool(report.copies) and "restarted" in report.copies[0].error)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async with held(store, pack.name) as replies:
                    await anext(replies)
            assert "the store restarted" in error_from_rpc(caught.value).message
            await store.relay(pack.name, REMOTE)
            await store.until_complete(pack.name)
            assert 0 < (await store.report()).bytes_received < version.pack_bytes
    finally:
        arena.unlink(missing_ok=True)


async def test_recovered_packs_hashed_although_arena_cannot_grow(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, _ = published
    arena = Path("/dev/shm") / new_id("torchrelay-test")

    def full(arena: Arena, num_bytes: int) -> int:
        raise ArenaFull("no space left on device")

    try:
        async with running_store(tmp_path, arena_path=arena, keep_arena=True) as store:
            await store.relay(pack.name, REMOTE)
            await store.until_complete(pack.name)
        monkeypatch.setattr(Arena, "grow", full)
        async with running_store(tmp_path, arena_path=arena) as store:
            await store.until_complete(pack.name)
            assert (await store.report()).bytes_received == 0  # nothing was fetched anew
    finally:
        arena.unlink(missing_ok=True)
