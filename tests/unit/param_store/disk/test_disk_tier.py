"""Packs of an object store cached on the host's disk: read from it and repaired from the remote store."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.support.disk_limits import files_end_at
from tests.support.s3_server import Fault
from tests.support.wait import eventually
from tests.unit.param_store.holders import RemoteScene, damage
from tests.unit.param_store.model_folders import LARGER, write_folder
from tests.unit.param_store.running_store import REMOTE, RunningStore, publish
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.param_store.background_tasks import fill_disk_cache
from torchrelay.transfer.manifest import MIN_CHUNK_BYTES


class Scene:
    """The pack in the bucket, and stores of one host that keep it on disk."""

    def __init__(self, remote: RemoteScene) -> None:
        self.remote, self.proxy, self.folder = remote, remote.proxy, remote.folder / "host"
        self.pack_id, self.data = remote.pack.pack_id, remote.pack.data
        self.kept = self.folder / "data/packs" / self.pack_id

    def store(self, **changes: Any) -> AbstractAsyncContextManager[RunningStore]:
        return self.remote.store(fill_disk_cache, **changes)

    async def fill(self, store: RunningStore) -> None:
        """The pack comes from the remote tiers and is what it should be."""
        await store.fetch(self.pack_id)
        assert await store.bytes_in(self.pack_id) == self.data

    async def fill_and_keep(self) -> None:
        async with self.store() as store:
            await self.fill(store)
            await eventually(self.kept.exists)
        self.proxy.asked.clear()


@pytest.fixture
def scene(remote: RemoteScene) -> Scene:
    return Scene(remote)


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
        assert (
            1 <= sum(asked.for_pack for asked in scene.proxy.asked) <= 28 - 20 + 4
        )  # with four readers, some are ahead of the damage
        await eventually(lambda: scene.kept.exists() and scene.kept.read_bytes() == scene.data)


async def test_damaged_copy_never_served_without_remote(scene: Scene) -> None:
    await scene.fill_and_keep()
    damage(scene.kept, 100)
    scene.proxy.decide = lambda asked: Fault(status=500)
    async with scene.store() as store:
        await store.relay(scene.pack_id, REMOTE)
        assert "the remote store does not serve packs/" in await store.until_failed()
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
        assert await store.drop(scene.pack_id)
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
        assert store.settings.disk_cache_limit_bytes() == 0 and not (await store.report()).HasField("disk")
        await publish(store, write_folder(scene.folder / "model", LARGER))
        await scene.fill(store)
    assert not scene.kept.parent.exists()
    async with scene.store(remote_url=remote_url, disk_cache_bytes=1 << 30) as store:
        await scene.fill(store)
        await eventually(scene.kept.exists)
