"""The scheduler's guard over packs, as a store takes it and tells of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from tests.unit.param_store.holders import drop, held
from tests.unit.param_store.model_folders import LARGER, write_folder
from tests.unit.param_store.running_store import REMOTE, RunningStore, publish, running_store
from torchrelay.common.errors import InvalidRequest, Overloaded, StaleEpoch, TorchrelayError
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.control.v1 import reports_pb2
from torchrelay.param_store.background_tasks import fill_disk_cache
from torchrelay.param_store.store import Store


async def retain(store: RunningStore, *pack_ids: str, lease_s: float = 60, epoch: int = 0) -> None:
    await store.stub.Retain(pb.RetainRequest(epoch=epoch, pack_ids=pack_ids, lease_s=lease_s))


async def refusal(store: RunningStore, lease_s: float = 60, epoch: int = 0) -> TorchrelayError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await retain(store, "f" * 64, lease_s=lease_s, epoch=epoch)
    return error_from_rpc(caught.value)


async def test_report_has_retained_packs_and_failure_domain(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription]
) -> None:
    pack_id = published[1].pack_id
    async with running_store(tmp_path, failure_domain="rack-7") as store:
        assert (await store.report()).failure_domain == "rack-7"
        await store.relay(pack_id, REMOTE)
        assert not (await store.until_complete(pack_id)).retained
        await retain(store, pack_id)
        await store.until(lambda report: report.copies[0].retained)
        await retain(store)
        await store.until(lambda report: not report.copies[0].retained)
    async with running_store(tmp_path, host_id="host-3") as store:
        assert (await store.report()).failure_domain == "host-3"


async def test_stream_reports_disk_packs_first_and_on_change(
    tmp_path: Path, published: tuple[Path, pb.VersionDescription]
) -> None:
    pack_id = published[1].pack_id
    on_disk: list[list[str]] = []

    def is_written(report: reports_pb2.StoreReport) -> bool:
        if report.HasField("disk"):
            on_disk.append(list(report.disk.pack_ids))
        return len(on_disk) == 2

    async with running_store(tmp_path, (fill_disk_cache,), disk_cache_bytes=1 << 30) as store:
        async with asyncio.TaskGroup() as tasks:
            told = tasks.create_task(store.until(is_written))
            await store.relay(pack_id, REMOTE)
        assert on_disk == [[], [pack_id]] and told.result().copies
    async with running_store(tmp_path, disk_cache_bytes=0) as store:
        assert not (await store.report()).HasField("disk")


async def test_disk_order_kept_without_new_order(tmp_path: Path) -> None:
    stores: list[Store] = []

    async def keep(store: Store) -> None:
        stores.append(store)

    async with running_store(tmp_path, (keep,), disk_cache_bytes=1 << 30) as store:
        await store.stub.Retain(pb.RetainRequest(disk_pack_ids=["f" * 64], lease_s=60))
        await retain(store, "e" * 64)
    disk = stores[0].disk
    assert disk is not None and disk.eviction_order.ranks == {"f" * 64: 0}


async def test_stale_epoch_and_endless_lease_refused(tmp_path: Path) -> None:
    async with running_store(tmp_path) as store:
        await retain(store, epoch=7)
        assert isinstance(await refusal(store, epoch=6), StaleEpoch)
        for lease_s in (-1.0, 1e9, float("nan"), float("inf")):
            refused = await refusal(store, lease_s, epoch=7)
            assert isinstance(refused, InvalidRequest) and refused.field == "lease_s"


async def test_relay_keeping_retained_packs_gets_arena_full(tmp_path: Path) -> None:
    async with running_store(tmp_path) as store:
        large = await publish(store, write_folder(tmp_path / "large", LARGER))
        small = await publish(store, write_folder(tmp_path / "small"))
    arena_bytes = large.pack_bytes + (192 << 10)  # for the table and the large one's front, not for the small one
    async with running_store(tmp_path, arena_bytes=arena_bytes) as store:
        await store.relay(large.pack_id, REMOTE)
        await store.until_complete(large.pack_id)
        await retain(store, large.pack_id)
        request = pb.RelayRequest(pack_id=small.pack_id, sources=[REMOTE], keep_retained=True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await store.stub.Relay(request)
        told = error_from_rpc(caught.value)
        assert isinstance(told, Overloaded) and "pinned or retained" in told.message
        async with held(store, large.pack_id) as replies:
            await anext(replies)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await store.relay(small.pack_id, REMOTE)  # it might evict the retained, but not the pinned
            assert isinstance(error_from_rpc(caught.value), Overloaded)
        await store.until(lambda report: all(copy.num_pins == 0 for copy in report.copies))
        await store.relay(small.pack_id, REMOTE)
        await store.until_complete(small.pack_id)
        assert await store.copy(large.pack_id) is None
        assert await drop(store, small.pack_id)
