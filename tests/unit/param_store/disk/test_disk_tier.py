"""Packs of an object store cached on the host's disk: read from it and repaired from the remote store."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.disk_limits import files_end_at
from tests.support.s3_server import Fault, FaultyProxy
from tests.support.wait import eventually
from tests.unit.param_store.holders import bytes_in, damage, drop
from tests.unit.param_store.model_folders import LARGER, write_folder
from tests.unit.param_store.running_store import REMOTE, RunningStore, publish, running_store
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.param_store.background_tasks import fill_disk_cache
from torchrelay.param_store.remote.remote_store import RemoteOptions, open_remote
from torchrelay.transfer.manifest import MIN_CHUNK_BYTES

WORK = (fill_disk_cache,)


@dataclass
class Scene:
    """The version in the shared bucket, and stores of one host that read it by way of the proxy."""

    folder: Path
    proxy: FaultyProxy
    pack_id: str
    data: bytes
    settings: dict[str, Any]  # of every store

    @property
    def kept(self) -> Path:
        return self.folder / "data/packs" / self.pack_id

    @property
    def num_reads(self) -> int:
        return sum(asked.for_pack for asked in self.proxy.asked)

    def store(self, **changes: Any) -> AbstractAsyncContextManager[RunningStore]:
        return running_store(self.folder, WORK, **{**self.settings, **changes})

    async def fill(self, store: RunningStore) -> None:
        """The pack comes from the remote tiers and is what it should be."""
        await store.relay(self.pack_id, REMOTE)
        await store.until_complete(self.pack_id)
        assert await bytes_in(store, self.pack_id) == self.data

    async def fill_and_keep(self) -> None:
        async with self.store() as store:
            await self.fill(store)
            await eventually(self.kept.exists)
        self.proxy.asked.clear()


@pytest.fixture
def scene(tmp_path: Path, s3_version: tuple[str, str], proxy: FaultyProxy, credentials: None) -> Scene:
    url, pack_id = s3_version
    data = open_remote(url, RemoteOptions(proxy.endpoint)).get_bytes(f"packs/{pack_id}")
    proxy.asked.clear()
    settings: dict[str, Any] = {"remote_url": url, "remote_endpoint": proxy.endpoint, "remote_give_up_s": 0.5}
    return Scene(tmp_path, proxy, pack_id, data, settings)


async def test_cached_pack_fills_arena_without_remote(scene: Scene) -> None:
    await scene.fill_and_keep()
    assert scene.kept.read_bytes() == scene.data
    assert list((scene.kept.parent / "drafts").iterdir()) == []
    scene.proxy.decide = lambda asked: Fault(status=500)
    async with scene.store() as store:
        await scene.fill(store)
    assert scene.proxy.asked == []


@pytest.mark.parametrize("how", ["damaged", "truncated"])
async def test_damaged_copy_replaced_by_remote(scene: Scene, how: str) -> None:
    await scene.fill_and_keep()
    if how == "damaged":
        damage(scene.kept, 20 * MIN_CHUNK_BYTES + 5)
    else:
        with scene.kept.open("r+b") as file:
            file.truncate(20 * MIN_CHUNK_BYTES + 5)
    async with scene.store() as store:
        await scene.fill(store)
        assert 1 <= scene.num_reads <= 28 - 20 + 4  # with four readers, some are ahead of the damage
        await eventually(lambda: scene.kept.exists() and scene.kept.read_bytes() == scene.data)


async def test_damaged_copy_never_served_without_remote(scene: Scene) -> None:
    await scene.fill_and_keep()
    damage(scene.kept, 100)
    scene.proxy.decide = lambda asked: Fault(status=500)
    async with scene.store() as store:
        await store.relay(scene.pack_id, REMOTE)
        report = await store.until(lambda report: bool(report.copies) and report.copies[0].error != "")
        assert "the remote store does not serve packs/" in report.copies[0].error
        scene.proxy.decide = lambda asked: None
        await scene.fill(store)


async def test_report_lists_disk_packs_on_change(scene: Scene) -> None:
    async with scene.store() as store:
        assert (await store.report()).HasField("disk") and not (await store.report()).disk.pack_ids
        filled = asyncio.create_task(store.until(lambda report: scene.pack_id in report.disk.pack_ids))
        await scene.fill(store)
        await filled
        watching = store.stub.WatchCopies(pb.WatchCopiesRequest())
        reports = aiter(watching)
        assert list((await anext(reports)).disk.pack_ids) == [scene.pack_id]
        await store.stub.Retain(pb.RetainRequest(pack_ids=[scene.pack_id], lease_s=60))
        async for report in reports:
            assert not report.HasField("disk"), "as told before"
            if report.copies[0].retained:
                break
        watching.cancel()
    async with scene.store() as store:
        assert list((await store.report()).disk.pack_ids) == [scene.pack_id]


async def test_full_disk_fails_no_download(scene: Scene) -> None:
    async with scene.store() as store:
        with files_end_at(1 << 20):
            await scene.fill(store)
        await store.until(lambda report: report.copies[0].num_pins == 0)
        assert await drop(store, scene.pack_id)
        await scene.fill(store)
        await eventually(scene.kept.exists)


async def test_deleted_version_removed_from_disk(scene: Scene, bucket_url: str) -> None:
    async with scene.store(remote_url=bucket_url) as store:
        version = await publish(store, write_folder(scene.folder / "model", LARGER))
        await scene.fill(store)
        await eventually(scene.kept.exists)
        await store.stub.DeleteVersion(pb.DeleteVersionRequest(version_id=version.version_id))
        assert not scene.kept.exists()


async def test_folder_remote_has_disk_tier_only_by_setting(scene: Scene) -> None:
    remote_url = (scene.folder / "remote").as_uri()
    async with scene.store(remote_url=remote_url) as store:
        assert store.settings.disk_cache_limit_bytes() == 0
        await publish(store, write_folder(scene.folder / "model", LARGER))
        await scene.fill(store)
    assert not scene.kept.parent.exists()
    async with scene.store(remote_url=remote_url, disk_cache_bytes=1 << 30) as store:
        await scene.fill(store)
        await eventually(scene.kept.exists)
