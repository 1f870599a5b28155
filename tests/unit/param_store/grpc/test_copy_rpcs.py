"""Copies in the arena over gRPC: hold, drop, eviction, failure, epochs, restart, and the scheduler's guard."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.guard import shared_memory_path
from tests.support.wait import HANG_S
from tests.unit.param_store.holders import slow_holder
from tests.unit.param_store.model_folders import StoredPack, config_of, put_pack
from tests.unit.param_store.running_store import REMOTE, RunningStore, refusal, running_store
from torchrelay.common.errors import InvalidRequest, NotFound, Overloaded, StaleEpoch, Unavailable
from torchrelay.common.ids import new_id
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.param_store.grpc import copy_rpcs
from torchrelay.param_store.store import Store
from torchrelay.transfer.arena.arena import Arena
from torchrelay.transfer.arena.mapped_slab import MappedSlab
from torchrelay.transfer.arena.slab import Slab
from torchrelay.transfer.errors import ArenaFull


async def test_hold_reports_complete_segments_and_pins(tmp_path: Path, pack: StoredPack) -> None:
    async with running_store(tmp_path) as store:
        with slow_holder(pack) as source:
            await store.relay(pack.pack_id, source.source(store))
            async with store.held(pack.pack_id) as replies:
                ends = [source.manifest.chunks_of(segment).stop for segment in range(len(source.manifest.segments))]
                assert (await anext(replies)).num_segments_ready == 0
                for begin, end in pairwise([0, *sorted(set(ends))]):
                    for index in range(begin, end):
                        source.show(index)
                    assert (await anext(replies)).num_segments_ready == sum(each <= end for each in ends)
                assert (await store.report()).copies[0].num_pins == 1
                assert await store.drop(pack.pack_id) is False
            await store.until(lambda report: report.copies[0].num_pins == 0)
            assert await store.drop(pack.pack_id) is True


async def test_failed_relay_reported_to_holders_and_retried(tmp_path: Path, pack: StoredPack) -> None:
    async with running_store(tmp_path) as store:
        with slow_holder(pack) as source:
            await store.relay(pack.pack_id, source.source(store))
            async with store.held(pack.pack_id) as replies:
                assert (await anext(replies)).num_segments_ready == 0
                for index in source.manifest.chunks_of(0):
                    source.show(index)
                assert (ready := (await anext(replies)).num_segments_ready) > 0
                source.buffer.fail("the test says so")
                reply = await anext(replies)
                assert (reply.num_segments_ready, "the test says so" in reply.error) == (ready, True)
                assert "the test says so" in (await store.report()).copies[0].error
            await store.until(lambda report: report.copies[0].num_chunks_verified == 0)
        error = await store.refusal_of_hold(pack.pack_id, waits_for_relay=True)
        assert isinstance(error, Unavailable) and "the test says so" in error.message
        assert (await store.fetch(pack.pack_id)).error == ""
        assert await store.bytes_in(pack.pack_id) == pack.data


async def test_hold_waits_for_concurrent_relay(
    tmp_path: Path, pack: StoredPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may be told to load a pack that its host had, and has just let go."""
    async with running_store(tmp_path) as store, store.held(pack.pack_id, waits_for_relay=True) as replies:
        first = asyncio.ensure_future(anext(replies))
        await store.report()  # the store has served another call meanwhile
        assert not first.done()
        await store.relay(pack.pack_id, REMOTE)
        assert (await first).slab_bytes >= pack.num_bytes
    async with running_store(tmp_path / "other") as store:
        monkeypatch.setattr(copy_rpcs, "_RELAY_WAIT_S", 3600.0)
        assert isinstance(await store.refusal_of_hold(pack.pack_id), NotFound), "it does not wait"
        monkeypatch.setattr(copy_rpcs, "_RELAY_WAIT_S", 0.0)
        assert isinstance(await store.refusal_of_hold(pack.pack_id, waits_for_relay=True), NotFound)


async def test_hold_waits_until_relay_reserves_range(
    tmp_path: Path, pack: StoredPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arena may have to be faulted in first."""
    reserve, reserving, may_reserve = Arena.reserve, threading.Event(), threading.Event()

    def late(arena: Arena, *arguments: Any) -> Slab:
        reserving.set()
        assert may_reserve.wait(HANG_S)
        return reserve(arena, *arguments)

    monkeypatch.setattr(Arena, "reserve", late)
    monkeypatch.setattr(copy_rpcs, "_RELAY_WAIT_S", 0.0)
    async with running_store(tmp_path) as store:
        relay = asyncio.ensure_future(store.relay(pack.pack_id, REMOTE))
        assert await asyncio.to_thread(reserving.wait, HANG_S)
        async with store.held(pack.pack_id, waits_for_relay=True) as replies:
            first = asyncio.ensure_future(anext(replies))
            await store.report()  # the store has served another call meanwhile
            assert not first.done()
            may_reserve.set()
            assert (await first).slab_bytes >= pack.num_bytes
        assert await relay is False


async def test_hold_fails_with_its_own_relay_only(
    tmp_path: Path, pack: StoredPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_rpcs, "_RELAY_WAIT_S", 3600.0)
    async with running_store(tmp_path) as good, running_store(tmp_path / "2") as store:
        await good.fetch(pack.pack_id)
        await refusal(store.relay(pack.pack_id, REMOTE))
        held = asyncio.ensure_future(store.refusal_of_hold(pack.pack_id, waits_for_relay=True))
        await store.report()  # the store has served another call meanwhile
        assert not held.done()
        while not held.done():
            await refusal(store.relay(pack.pack_id, REMOTE))
        error = await held
        assert isinstance(error, Unavailable) and "no source has the manifest" in error.message
        async with store.held(pack.pack_id, waits_for_relay=True) as replies:
            first = asyncio.ensure_future(anext(replies))
            await store.report()
            await store.relay(pack.pack_id, good.source(pack.pack_id, store))
            assert (await first).slab_bytes >= pack.num_bytes


async def test_dropped_download_stops(tmp_path: Path, pack: StoredPack) -> None:
    async with running_store(tmp_path) as store:
        with slow_holder(pack) as source:
            source.show(0)
            await store.relay(pack.pack_id, source.source(store))
            await store.until(lambda report: report.copies[0].num_chunks_verified == 1)
            assert await store.drop(pack.pack_id) is True
            assert (await store.report()).copies == []
            assert await store.drop(pack.pack_id) is False


async def test_only_unpinned_packs_evicted(tmp_path: Path) -> None:
    packs = [put_pack(tmp_path, seed) for seed in range(3)]
    ids = [pack.pack_id for pack in packs]
    async with running_store(tmp_path, arena_bytes=2 * packs[0].num_bytes + (2 << 20)) as store:
        for pack_id in ids[:2]:
            await store.fetch(pack_id)
        async with store.held(ids[0]) as first:
            await anext(first)
            await store.fetch(ids[2])
            assert {copy.pack_id for copy in (await store.report()).copies} == {ids[0], ids[2]}
            async with store.held(ids[2]) as third:
                await anext(third)
                relays = (refusal(store.relay(ids[1], REMOTE)) for _ in range(4))
                for error in await asyncio.gather(*relays):
                    assert isinstance(error, Overloaded)
                    assert (error.code, error.field) == ("arena_full", "arena_bytes")
                assert await store.bytes_in(ids[2]) == packs[2].data
                copy = await store.copy(ids[1])
                assert copy is not None and "are pinned" in copy.error
            await store.until(
                lambda report: all(copy.num_pins == 0 or copy.pack_id == ids[0] for copy in report.copies)
            )
            await store.fetch(ids[1])
            assert await store.bytes_in(ids[1]) == packs[1].data
            assert {copy.pack_id for copy in (await store.report()).copies} == {ids[0], ids[1]}


async def test_pack_larger_than_arena_evicts_nothing(tmp_path: Path, pack: StoredPack) -> None:
    small = put_pack(tmp_path, config=config_of())
    async with running_store(tmp_path, arena_bytes=4 << 20) as store:
        await store.fetch(small.pack_id)
        assert (await refusal(store.relay(pack.pack_id, REMOTE))).code == "arena_full"
        assert await store.bytes_in(small.pack_id) == small.data


@pytest.fixture
def arena_path() -> Iterator[Path]:
    path = shared_memory_path(new_id("arena"))
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("can_grow", [True, False])
async def test_arena_outlives_its_store(
    tmp_path: Path, pack: StoredPack, arena_path: Path, can_grow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(arena: Arena, num_bytes: int) -> int:
        raise ArenaFull("no space left on device")

    async with running_store(tmp_path, arena_path=arena_path, keep_arena=True) as store:
        await store.fetch(pack.pack_id)
    if not can_grow:
        monkeypatch.setattr(Arena, "grow", full)
    async with running_store(tmp_path, arena_path=arena_path) as store:
        await store.until_complete(pack.pack_id)
        assert await store.relay(pack.pack_id, REMOTE) is True
        assert (await store.report()).bytes_received == 0
        assert await store.bytes_in(pack.pack_id) == pack.data
    assert not list(arena_path.parent.glob(arena_path.name))


async def test_clean_stop_leaves_arena_that_worker_maps(tmp_path: Path, pack: StoredPack, arena_path: Path) -> None:
    async with running_store(tmp_path, arena_path=arena_path) as store:
        await store.fetch(pack.pack_id)
        async with store.held(pack.pack_id) as replies:
            place = await anext(replies)
            mapped = MappedSlab(place.arena_path, place.slab_offset, place.slab_bytes)
    async with running_store(tmp_path, arena_path=arena_path) as store, store.held(pack.pack_id) as replies:
        again = await anext(replies)
        assert (again.arena_path, again.slab_offset) == (place.arena_path, place.slab_offset)
        mapped.close()
    assert not list(arena_path.parent.glob(arena_path.name))


async def test_partial_pack_of_earlier_process_completed(tmp_path: Path, pack: StoredPack, arena_path: Path) -> None:
    with slow_holder(pack) as source:
        source.show(0)
        async with running_store(tmp_path, arena_path=arena_path, keep_arena=True) as store:
            await store.relay(pack.pack_id, source.source(store))
            await store.until(lambda report: report.copies[0].num_chunks_verified == 1)
    async with running_store(tmp_path, arena_path=arena_path) as store:
        await store.until(lambda report: bool(report.copies) and "restarted" in report.copies[0].error)
        assert "the store restarted" in (await store.refusal_of_hold(pack.pack_id)).message
        await store.fetch(pack.pack_id)
        assert 0 < (await store.report()).bytes_received < pack.num_bytes


async def retain(store: RunningStore, *pack_ids: str, lease_s: float = 60, epoch: int = 0) -> None:
    await store.stub.Retain(pb.RetainRequest(epoch=epoch, pack_ids=pack_ids, lease_s=lease_s))


async def test_report_has_retained_packs_and_failure_domain(tmp_path: Path, pack: StoredPack) -> None:
    async with running_store(tmp_path, failure_domain="rack-7") as store:
        assert (await store.report()).failure_domain == "rack-7"
        assert not (await store.fetch(pack.pack_id)).retained
        await retain(store, pack.pack_id)
        await store.until(lambda report: report.copies[0].retained)
        await retain(store)
        await store.until(lambda report: not report.copies[0].retained)
    async with running_store(tmp_path, host_id="host-3") as store:
        assert (await store.report()).failure_domain == "host-3"


async def test_disk_order_kept_without_new_order(tmp_path: Path) -> None:
    stores: list[Store] = []

    async def keep(store: Store) -> None:
        stores.append(store)

    async with running_store(tmp_path, (keep,), disk_cache_bytes=1 << 30) as store:
        await store.stub.Retain(pb.RetainRequest(disk_pack_ids=["f" * 64], lease_s=60))
        await retain(store, "e" * 64)
    disk = stores[0].disk
    assert disk is not None and disk.eviction_order.ranks == {"f" * 64: 0}


async def test_stale_epochs_and_endless_leases_refused(tmp_path: Path, pack: StoredPack) -> None:
    async with running_store(tmp_path) as store:
        await store.relay(pack.pack_id, REMOTE, epoch=7)
        for call in (
            store.relay(pack.pack_id, REMOTE, epoch=6),
            store.drop(pack.pack_id, epoch=6),
            retain(store, epoch=6),
        ):
            assert isinstance(await refusal(call), StaleEpoch)
        assert (await store.report()).epoch == 7
        for lease_s in (-1.0, 1e9, float("nan"), float("inf")):
            refused = await refusal(retain(store, lease_s=lease_s, epoch=7))
            assert isinstance(refused, InvalidRequest) and refused.field == "lease_s"


async def test_relay_keeping_retained_packs_gets_arena_full(tmp_path: Path, pack: StoredPack) -> None:
    small = put_pack(tmp_path, config=config_of())
    arena_bytes = pack.num_bytes + (192 << 10)  # for the table and the large one's front, not for the small one
    async with running_store(tmp_path, arena_bytes=arena_bytes) as store:
        await store.fetch(pack.pack_id)
        await retain(store, pack.pack_id)
        request = pb.RelayRequest(pack_id=small.pack_id, sources=[REMOTE], keep_retained=True)
        told = await refusal(store.stub.Relay(request))
        assert isinstance(told, Overloaded) and "pinned or retained" in told.message
        async with store.held(pack.pack_id) as replies:
            await anext(replies)
            # it might evict the retained, but not the pinned
            assert isinstance(await refusal(store.relay(small.pack_id, REMOTE)), Overloaded)
        await store.until(lambda report: all(copy.num_pins == 0 for copy in report.copies))
        await store.fetch(small.pack_id)
        assert await store.copy(pack.pack_id) is None
        assert await store.drop(small.pack_id)
