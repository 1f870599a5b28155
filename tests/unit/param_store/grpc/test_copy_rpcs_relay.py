"""Relays over gRPC and the data plane: remote store, chain, next source, damage."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.wait import HANG_S
from tests.unit.param_store.holders import bytes_in, damage, drop, held, slow_holder
from tests.unit.param_store.running_store import REMOTE, RunningStore, peer, running_store
from torchrelay.common.errors import InvalidRequest, NotFound, TorchrelayError, Unavailable
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.param_store.copies.pack_download import PackDownload
from torchrelay.param_store.grpc import copy_rpcs
from torchrelay.transfer.arena.arena import Arena
from torchrelay.transfer.arena.slab import Slab
from torchrelay.transfer.manifest import decode_manifest


async def test_concurrent_remote_relays_download_once(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, version = published
    accept, answered = Slab.accept, threading.Event()

    def late(slab: Slab, index: int) -> None:
        assert answered.wait(HANG_S)
        accept(slab, index)

    monkeypatch.setattr(Slab, "accept", late)
    async with running_store(tmp_path) as store:
        answers = await asyncio.gather(*(store.relay(version.pack_id, REMOTE) for _ in range(4)))
        assert answers == [False] * 4
        answered.set()
        await store.until_complete(version.pack_id)
        ended = await store.until(lambda report: report.copies[0].relay_end_unix_us > 0)  # soon after the last chunk
        (copy,) = ended.copies
        assert copy.source == "remote"
        assert 0 < copy.relay_begin_unix_us <= copy.relay_first_unix_us <= copy.relay_end_unix_us
        assert await store.relay(version.pack_id, REMOTE) is True
        report = await store.report()
        assert report.bytes_received == version.pack_bytes
        assert report.arena_free_bytes < report.arena_target_bytes - version.pack_bytes
        assert await bytes_in(store, version.pack_id) == pack.read_bytes()
        await store.until(lambda report: report.copies[0].num_pins == 0)
        assert await drop(store, version.pack_id) is True
        assert (await store.report()).copies == []


async def test_hold_waits_for_concurrent_relay(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may be told to load a pack that its host had, and has just let go."""
    _, version = published
    async with running_store(tmp_path) as store, held(store, version.pack_id, waits_for_relay=True) as replies:
        first = asyncio.ensure_future(anext(replies))
        await store.report()  # the store has served another call meanwhile
        assert not first.done()
        await store.relay(version.pack_id, REMOTE)
        assert (await first).slab_bytes >= version.pack_bytes
    monkeypatch.setattr(copy_rpcs, "_RELAY_WAIT_S", 0.0)
    async with running_store(tmp_path / "other") as store:
        assert isinstance(await refusal_of_hold(store, version.pack_id, waits_for_relay=True), NotFound)


async def refusal_of_hold(store: RunningStore, pack_id: str, waits_for_relay: bool = False) -> TorchrelayError:
    async with held(store, pack_id, waits_for_relay) as replies:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(replies)
        return error_from_rpc(refused.value)


async def test_later_hold_of_missing_pack_fails_immediately(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_rpcs, "_RELAY_WAIT_S", 3600.0)
    async with running_store(tmp_path) as store:
        assert isinstance(await refusal_of_hold(store, published[1].pack_id), NotFound)


async def test_hold_waits_until_relay_reserves_range(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arena may have to be faulted in first."""
    _, version = published
    reserve, reserving, may_reserve = Arena.reserve, threading.Event(), threading.Event()

    def late(arena: Arena, *arguments: Any) -> Slab:
        reserving.set()
        assert may_reserve.wait(HANG_S)
        return reserve(arena, *arguments)

    monkeypatch.setattr(Arena, "reserve", late)
    monkeypatch.setattr(copy_rpcs, "_RELAY_WAIT_S", 0.0)
    async with running_store(tmp_path) as store:
        relay = asyncio.ensure_future(store.relay(version.pack_id, REMOTE))
        assert await asyncio.to_thread(reserving.wait, HANG_S)
        async with held(store, version.pack_id, waits_for_relay=True) as replies:
            first = asyncio.ensure_future(anext(replies))
            await asyncio.wait((first,), timeout=0.2)
            may_reserve.set()
            assert (await first).slab_bytes >= version.pack_bytes
        assert await relay is False


async def test_hold_fails_with_its_own_relay_only(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, version = published
    monkeypatch.setattr(copy_rpcs, "_RELAY_WAIT_S", 3600.0)
    nowhere = f"file://{tmp_path / 'empty'}"
    async with running_store(tmp_path) as good, running_store(tmp_path / "2", remote_url=nowhere) as store:
        await good.relay(version.pack_id, REMOTE)
        await good.until_complete(version.pack_id)
        with pytest.raises(grpc.aio.AioRpcError):
            await store.relay(version.pack_id, REMOTE)
        refusal = asyncio.ensure_future(refusal_of_hold(store, version.pack_id, waits_for_relay=True))
        await store.report()  # the store has served another call meanwhile
        assert not refusal.done()
        while not refusal.done():
            with pytest.raises(grpc.aio.AioRpcError):
                await store.relay(version.pack_id, REMOTE)
        error = await refusal
        assert isinstance(error, Unavailable) and "no source has the manifest" in error.message
        async with held(store, version.pack_id, waits_for_relay=True) as replies:
            first = asyncio.ensure_future(anext(replies))
            await store.report()
            await store.relay(version.pack_id, good.source(version.pack_id, store))
            assert (await first).slab_bytes >= version.pack_bytes


async def test_chain_forwards_while_receiving(tmp_path: Path, published: tuple[Path, pb.VersionDescription]) -> None:
    pack, version = published
    nowhere = f"file://{tmp_path / 'empty'}"
    async with (
        running_store(tmp_path / "1", remote_url=nowhere) as first,
        running_store(tmp_path / "2", remote_url=nowhere) as second,
    ):
        with slow_holder(pack) as source:
            address = source.server.address
            await first.relay(pack.name, peer("slow", address, pack.name, first))
            await second.relay(pack.name, first.source(pack.name, second))
            for index in range(source.manifest.num_chunks):
                arrived = await second.until(lambda r, n=index: r.copies[0].num_chunks_verified == n)  # type: ignore[misc]
                assert arrived.copies[0].relay_end_unix_us == 0
                source.show(index)
            copy = await second.until_complete(pack.name)
        assert copy.source == first.store_id
        assert await bytes_in(second, pack.name) == pack.read_bytes()
        assert (await first.report()).bytes_sent == version.pack_bytes


async def test_source_added_during_download_used(tmp_path: Path, published: tuple[Path, pb.VersionDescription]) -> None:
    pack, version = published
    async with (
        running_store(tmp_path) as full,
        running_store(tmp_path / "2", remote_url=f"file://{tmp_path / 'empty'}") as store,
    ):
        await full.relay(pack.name, REMOTE)
        await full.until_complete(pack.name)
        with slow_holder(pack) as source:
            source.show(0)
            await store.relay(pack.name, peer("slow", source.server.address, pack.name, store))
            await store.until(lambda report: report.copies[0].num_chunks_verified == 1)
            assert await store.relay(pack.name, full.source(pack.name, store)) is False
            assert (await store.until_complete(pack.name)).source == full.store_id
        assert (await store.report()).bytes_received == version.pack_bytes


async def test_next_source_delivers_missing_chunks(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription]
) -> None:
    pack, version = published
    async with running_store(tmp_path) as store:
        with slow_holder(pack) as source:
            source.show(0)
            await store.relay(pack.name, peer("slow", source.server.address, pack.name, store), REMOTE)
            await store.until(lambda report: report.copies[0].num_chunks_verified == 1)
            source.buffer.fail("it died")
            assert (await store.until_complete(pack.name)).source == "remote"
        assert (await store.report()).bytes_received == version.pack_bytes


async def test_failed_copy_freed_after_followers_end(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription]
) -> None:
    pack, _ = published
    nowhere = f"file://{tmp_path / 'empty'}"
    async with (
        running_store(tmp_path / "1", remote_url=nowhere) as first,
        running_store(tmp_path / "2", remote_url=nowhere) as second,
    ):
        free_bytes = (await first.report()).arena_free_bytes
        with slow_holder(pack) as source:
            source.show(0)
            await first.relay(pack.name, peer("slow", source.server.address, pack.name, first))
            await second.relay(pack.name, first.source(pack.name, second))
            for store in (first, second):
                await store.until(lambda report: report.copies[0].num_chunks_verified == 1)
            source.buffer.fail("its disk broke")
            for store in (first, second):
                async with asyncio.timeout(HANG_S):  # reports are asked for: the last reader goes without a word
                    while (report := await store.report()).arena_free_bytes != free_bytes:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                assert "its disk broke" in report.copies[0].error


async def test_relay_after_failed_download_starts_new_one(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, _ = published
    trace, told = PackDownload.trace, threading.Event()

    def late(download: PackDownload, *, complete: bool) -> None:
        assert told.wait(HANG_S)
        trace(download, complete=complete)

    async with (
        running_store(tmp_path) as good,
        running_store(tmp_path / "2", remote_url=f"file://{tmp_path / 'empty'}") as store,
    ):
        await good.relay(pack.name, REMOTE)
        await good.until_complete(pack.name)
        monkeypatch.setattr(PackDownload, "trace", late)
        with pytest.raises(grpc.aio.AioRpcError):
            await store.relay(pack.name, REMOTE)
        again = asyncio.ensure_future(store.relay(pack.name, good.source(pack.name, store)))
        await asyncio.wait((again,), timeout=0.2)
        told.set()
        assert not await again
        await store.until_complete(pack.name)


async def test_damage_in_remote_store_repaired_by_peer(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription]
) -> None:
    pack, version = published
    whole = pack.read_bytes()
    async with running_store(tmp_path) as good:
        await good.relay(pack.name, REMOTE)
        await good.until_complete(pack.name)
        damage(pack, version.pack_bytes // 2)
        async with running_store(tmp_path) as store:
            await store.relay(pack.name, REMOTE)
            report = await store.until(lambda report: bool(report.copies) and report.copies[0].error != "")
            assert "in the remote store: 1 chunk (" in report.copies[0].error
            assert "damaged in the remote store" in report.copies[0].error
            await store.relay(pack.name, REMOTE, good.source(pack.name, store))
            copy = await store.until_complete(pack.name)
            brought = {share.holder_id: share.num_bytes for share in copy.shares}
            assert copy.source == "remote"  # which has brought most
            assert await bytes_in(store, pack.name) == whole
        chunk_bytes = decode_manifest(pack.with_suffix(".manifest").read_bytes()).chunk_bytes
        assert 0 < brought[good.store_id] == (await good.report()).bytes_sent <= chunk_bytes
        assert sum(brought.values()) == version.pack_bytes


async def test_damage_in_peer_arena_is_never_accepted(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription]
) -> None:
    pack, version = published
    async with running_store(tmp_path) as bad, running_store(tmp_path) as store:
        await bad.relay(pack.name, REMOTE)
        await bad.until_complete(pack.name)
        async with held(bad, pack.name) as replies:
            reply = await anext(replies)
        end = reply.slab_offset + reply.slab_bytes
        damage(Path(reply.arena_path), end - version.pack_bytes // 2)
        await store.relay(pack.name, bad.source(pack.name, store), REMOTE)
        await store.until_complete(pack.name)
        assert await bytes_in(store, pack.name) == pack.read_bytes()


async def test_bad_relays_are_refused_at_once(tmp_path: Path, published: tuple[Path, pb.VersionDescription]) -> None:
    pack, _ = published
    async with running_store(tmp_path) as store:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await store.relay("f" * 64, REMOTE)
        error = error_from_rpc(caught.value)
        assert isinstance(error, NotFound) and "remote: the remote store has no packs/" in error.message
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await store.relay("no digest", REMOTE)
        assert isinstance(error_from_rpc(caught.value), InvalidRequest)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await store.relay(pack.name, store.source(pack.name, store))
        assert error_from_rpc(caught.value).field == "sources"
        damage(pack.with_suffix(".manifest"), 100)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await store.relay(pack.name, REMOTE)
        assert "remote: its manifest is damaged" in error_from_rpc(caught.value).message
