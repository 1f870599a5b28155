"""Copies in the arena over gRPC and the data plane: relay, chain, repair, hold, drop, restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest

from tests.unit.param_store.folders import config_of, write_folder
from tests.unit.param_store.stores import CLUSTER_KEY, REMOTE, RunningStore, peer, publish, running_store
from torchrelay.common.errors import InvalidRequest, NotFound, StaleEpoch, Unavailable
from torchrelay.common.ids import new_id
from torchrelay.common.rpc import error_from_rpc
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.transfer.buffers import MemoryBuffer
from torchrelay.transfer.holder import HolderServer
from torchrelay.transfer.manifest import decode_manifest
from torchrelay.transfer.slabs import MappedSlab
from torchrelay.transfer.tickets import derive_node_key

CONFIG = config_of(hidden_size=128, intermediate_size=1024, num_hidden_layers=4)


@pytest.fixture
async def published(tmp_path: Path) -> tuple[Path, pb.VersionDescription]:
    """A version in the remote store of ``tmp_path``, and the file of its pack."""
    async with running_store(tmp_path) as store:
        version = await publish(store, write_folder(tmp_path / "model", CONFIG))
    return tmp_path / "remote/packs" / version.pack_id, version


@asynccontextmanager
async def held(store: RunningStore, pack_id: str) -> AsyncIterator[AsyncIterator[pb.HoldReply]]:
    call = store.stub.Hold(pb.HoldRequest(pack_id=pack_id, owner_id="wrk-1"))
    try:
        yield aiter(call)
    finally:
        call.cancel()


async def drop(store: RunningStore, pack_id: str, epoch: int = 0) -> bool:
    return (await store.stub.Drop(pb.DropRequest(pack_id=pack_id, epoch=epoch))).dropped


async def bytes_in(store: RunningStore, pack_id: str) -> bytes:
    """The pack as a worker of the store's host sees it."""
    async with held(store, pack_id) as replies:
        reply = await anext(replies)
        slab = MappedSlab(Path(reply.arena_path), reply.slab_offset, reply.slab_bytes)
        try:
            assert slab.num_verified == slab.manifest.num_chunks == reply.num_chunks_verified
            return bytes(slab.data)
        finally:
            slab.close()


class SlowHolder:
    """A holder whose chunks appear when the test says so."""

    def __init__(self, pack: Path) -> None:
        self._data = pack.read_bytes()
        encoded = pack.with_suffix(".manifest").read_bytes()
        self.manifest = decode_manifest(encoded)
        spans = [self.manifest.chunk_range(i) for i in range(self.manifest.num_chunks)]
        self.buffer = MemoryBuffer(pack.name, [span.end - span.begin for span in spans])
        self.buffer.head = encoded
        key = derive_node_key(CLUSTER_KEY, "slow")
        self.server = HolderServer("slow", key, {pack.name: self.buffer}.get, "127.0.0.1")

    def show(self, index: int) -> None:
        span = self.manifest.chunk_range(index)
        self.buffer.publish(index, self._data[span.begin : span.end])


@contextmanager
def slow_holder(pack: Path) -> Iterator[SlowHolder]:
    holder = SlowHolder(pack)
    holder.server.start()
    try:
        yield holder
    finally:
        holder.server.close()


async def test_a_relay_from_the_remote_store_fills_the_arena_once(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription]
) -> None:
    pack, version = published
    async with running_store(tmp_path) as store:
        answers = await asyncio.gather(*(store.relay(version.pack_id, REMOTE) for _ in range(4)))
        assert answers == [False] * 4
        copy = await store.until_complete(version.pack_id)
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


async def test_a_chain_forwards_while_it_receives(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription]
) -> None:
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


async def test_hold_tells_of_every_verified_chunk_and_pins(
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
                for index in range(source.manifest.num_chunks):
                    assert (await anext(replies)).num_chunks_verified == index
                    source.show(index)
                assert (await anext(replies)).num_chunks_verified == source.manifest.num_chunks
                assert (await store.report()).copies[0].num_pins == 1
                assert await drop(store, pack.name) is False
            await store.until(lambda report: report.copies[0].num_pins == 0)
            assert await drop(store, pack.name) is True


async def test_a_failed_relay_tells_its_holders_and_a_later_one_tries_anew(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription]
) -> None:
    pack, _ = published
    async with running_store(tmp_path) as store:
        with slow_holder(pack) as source:
            await store.relay(pack.name, peer("slow", source.server.address, pack.name, store))
            async with held(store, pack.name) as replies:
                assert (await anext(replies)).num_chunks_verified == 0
                source.show(0)
                assert (await anext(replies)).num_chunks_verified == 1
                source.buffer.fail("the test says so")
                reply = await anext(replies)
                assert (reply.num_chunks_verified, "the test says so" in reply.error) == (1, True)
                copy = await store.copy(pack.name)
                assert copy is not None
                assert "the test says so" in copy.error
            await store.until(lambda report: report.copies[0].num_chunks_verified == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with held(store, pack.name) as replies:
                await anext(replies)
        assert isinstance(error_from_rpc(caught.value), Unavailable)
        assert "the test says so" in error_from_rpc(caught.value).message
        assert await store.relay(pack.name, REMOTE) is False
        assert (await store.until_complete(pack.name)).error == ""
        assert await bytes_in(store, pack.name) == pack.read_bytes()


async def test_the_next_source_takes_over_for_what_is_missing(
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


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


async def test_damage_in_the_remote_store_is_mended_by_a_peer(
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
            assert "1 chunks of pack" in report.copies[0].error
            assert "damaged in the remote store" in report.copies[0].error
            await store.relay(pack.name, REMOTE, good.source(pack.name, store))
            assert (await store.until_complete(pack.name)).source == good.store_id
            assert await bytes_in(store, pack.name) == whole
        chunk_bytes = decode_manifest(pack.with_suffix(".manifest").read_bytes()).chunk_bytes
        assert 0 < (await good.report()).bytes_sent <= chunk_bytes


async def test_damage_in_a_peers_arena_is_never_accepted(
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
        assert "remote: the remote store has no packs/" in error_from_rpc(caught.value).message
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


async def test_commands_of_an_old_epoch_are_refused(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription]
) -> None:
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


async def test_dropping_a_filling_stops_it(tmp_path: Path, published: tuple[Path, pb.VersionDescription]) -> None:
    pack, _ = published
    async with running_store(tmp_path) as store:
        with slow_holder(pack) as source:
            source.show(0)
            await store.relay(pack.name, peer("slow", source.server.address, pack.name, store))
            await store.until(lambda report: report.copies[0].num_chunks_verified == 1)
            assert await drop(store, pack.name) is True
            assert (await store.report()).copies == []
            assert await drop(store, pack.name) is False


async def test_unpinned_packs_make_room_for_others_and_pinned_ones_do_not(tmp_path: Path) -> None:
    async with running_store(tmp_path) as store:
        ids = [
            (await publish(store, write_folder(tmp_path / str(seed), CONFIG, seed=seed))).pack_id for seed in range(3)
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


async def test_the_arena_outlives_its_store(tmp_path: Path, published: tuple[Path, pb.VersionDescription]) -> None:
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


async def test_a_half_filled_pack_of_an_earlier_process_is_completed(
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
            await store.relay(pack.name, REMOTE)
            await store.until_complete(pack.name)
            assert 0 < (await store.report()).bytes_received < version.pack_bytes
    finally:
        arena.unlink(missing_ok=True)
