"""Relays over gRPC and the data plane: remote store, chain, next source, damage, TLS."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import Authority
from tests.support.wait import HANG_S, eventually
from tests.unit.param_store.holders import damage, slow_holder
from tests.unit.param_store.model_folders import StoredPack
from tests.unit.param_store.running_store import REMOTE, refusal, running_store
from torchrelay.common.errors import InvalidRequest, NotFound, Unavailable
from torchrelay.common.identity.callers import Caller
from torchrelay.param_store.copies.pack_download import PackDownload
from torchrelay.transfer.arena.slab import Slab
from torchrelay.transfer.manifest import decode_manifest


async def test_concurrent_remote_relays_download_once(
    tmp_path: Path, pack: StoredPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, answered = Slab.accept, threading.Event()

    def late(slab: Slab, index: int) -> None:
        assert answered.wait(HANG_S)
        accept(slab, index)

    monkeypatch.setattr(Slab, "accept", late)
    async with running_store(tmp_path) as store:
        answers = await asyncio.gather(*(store.relay(pack.pack_id, REMOTE) for _ in range(4)))
        assert answers == [False] * 4
        answered.set()
        await store.until_complete(pack.pack_id)
        ended = await store.until(lambda report: report.copies[0].relay_end_unix_us > 0)  # soon after the last chunk
        (copy,) = ended.copies
        assert copy.source == "remote"
        assert 0 < copy.relay_begin_unix_us <= copy.relay_first_unix_us <= copy.relay_end_unix_us
        assert await store.relay(pack.pack_id, REMOTE) is True
        report = await store.report()
        assert report.bytes_received == pack.num_bytes
        assert report.arena_free_bytes < report.arena_target_bytes - pack.num_bytes
        assert await store.bytes_in(pack.pack_id) == pack.data


async def test_chain_forwards_while_receiving(tmp_path: Path, pack: StoredPack) -> None:
    async with running_store(tmp_path / "1") as first, running_store(tmp_path / "2") as second:
        with slow_holder(pack) as source:
            await first.relay(pack.pack_id, source.source(first))
            await second.relay(pack.pack_id, first.source(pack.pack_id, second))
            for index in range(source.manifest.num_chunks):
                arrived = await second.until(lambda r, n=index: r.copies[0].num_chunks_verified == n)  # type: ignore[misc]
                assert arrived.copies[0].relay_end_unix_us == 0
                source.show(index)
            copy = await second.until_complete(pack.pack_id)
        assert copy.source == first.store_id
        assert await second.bytes_in(pack.pack_id) == pack.data
        assert (await first.report()).bytes_sent == pack.num_bytes


async def test_source_added_during_download_used(tmp_path: Path, pack: StoredPack) -> None:
    async with running_store(tmp_path) as full, running_store(tmp_path / "2") as store:
        await full.fetch(pack.pack_id)
        with slow_holder(pack) as source:
            source.show(0)
            await store.relay(pack.pack_id, source.source(store))
            await store.until(lambda report: report.copies[0].num_chunks_verified == 1)
            assert await store.relay(pack.pack_id, full.source(pack.pack_id, store)) is False
            assert (await store.until_complete(pack.pack_id)).source == full.store_id
        assert (await store.report()).bytes_received == pack.num_bytes


async def test_next_source_delivers_missing_chunks(tmp_path: Path, pack: StoredPack) -> None:
    async with running_store(tmp_path) as store:
        with slow_holder(pack) as source:
            source.show(0)
            await store.relay(pack.pack_id, source.source(store), REMOTE)
            await store.until(lambda report: report.copies[0].num_chunks_verified == 1)
            source.buffer.fail("it died")
            assert (await store.until_complete(pack.pack_id)).source == "remote"
        assert (await store.report()).bytes_received == pack.num_bytes


async def test_failed_copy_freed_after_followers_end(tmp_path: Path, pack: StoredPack) -> None:
    async with running_store(tmp_path / "1") as first, running_store(tmp_path / "2") as second:
        free_bytes = (await first.report()).arena_free_bytes
        with slow_holder(pack) as source:
            source.show(0)
            await first.relay(pack.pack_id, source.source(first))
            await second.relay(pack.pack_id, first.source(pack.pack_id, second))
            for store in (first, second):
                await store.until(lambda report: report.copies[0].num_chunks_verified == 1)
            source.buffer.fail("its disk broke")

            async def are_free() -> bool:
                return all([(await store.report()).arena_free_bytes == free_bytes for store in (first, second)])

            await eventually(are_free, "the end of the last reader, which is not reported")
            for store in (first, second):
                assert "its disk broke" in (await store.report()).copies[0].error


async def test_relay_after_failed_download_starts_new_one(
    tmp_path: Path, pack: StoredPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, told = PackDownload.trace, threading.Event()

    def late(download: PackDownload, *, complete: bool) -> None:
        assert told.wait(HANG_S)
        trace(download, complete=complete)

    async with running_store(tmp_path) as good, running_store(tmp_path / "2") as store:
        await good.fetch(pack.pack_id)
        monkeypatch.setattr(PackDownload, "trace", late)
        await refusal(store.relay(pack.pack_id, REMOTE))
        again = asyncio.ensure_future(store.relay(pack.pack_id, good.source(pack.pack_id, store)))
        await store.report()  # the store has served another call meanwhile
        told.set()
        assert not await again
        await store.until_complete(pack.pack_id)


@pytest.mark.parametrize("truncated", [False, True])
async def test_damage_in_remote_store_repaired_by_peer(tmp_path: Path, pack: StoredPack, truncated: bool) -> None:
    half = pack.num_bytes // 2
    async with running_store(tmp_path) as good, running_store(tmp_path) as store:
        await good.fetch(pack.pack_id)
        if truncated:
            os.truncate(pack.path, half)
        else:
            damage(pack.path, half)
        await store.relay(pack.pack_id, REMOTE)
        expected = f"packs/{pack.pack_id} of the remote store ends at byte {half}"
        assert (expected if truncated else "damaged in the remote store: 1 chunk (") in await store.until_failed()
        copy = await store.fetch(pack.pack_id, REMOTE, good.source(pack.pack_id, store))
        brought = {share.holder_id: share.num_bytes for share in copy.shares}
        assert copy.source == max(brought, key=brought.__getitem__)
        assert await store.bytes_in(pack.pack_id) == pack.data
        assert 0 < brought[good.store_id] == (await good.report()).bytes_sent
        assert sum(brought.values()) == pack.num_bytes
        if not truncated:
            chunk_bytes = decode_manifest(pack.path.with_suffix(".manifest").read_bytes()).chunk_bytes
            assert brought[good.store_id] <= chunk_bytes


async def test_damage_in_peer_arena_is_never_accepted(tmp_path: Path, pack: StoredPack) -> None:
    async with running_store(tmp_path) as bad, running_store(tmp_path) as store:
        await bad.fetch(pack.pack_id)
        async with bad.held(pack.pack_id) as replies:
            reply = await anext(replies)
        end = reply.slab_offset + reply.slab_bytes
        damage(Path(reply.arena_path), end - pack.num_bytes // 2)
        await store.fetch(pack.pack_id, bad.source(pack.pack_id, store), REMOTE)
        assert await store.bytes_in(pack.pack_id) == pack.data


async def test_bad_relays_are_refused_at_once(tmp_path: Path, pack: StoredPack) -> None:
    async with running_store(tmp_path) as store:
        error = await refusal(store.relay("f" * 64, REMOTE))
        assert isinstance(error, NotFound) and "remote: the remote store has no packs/" in error.message
        assert isinstance(await refusal(store.relay("no digest", REMOTE)), InvalidRequest)
        assert (await refusal(store.relay(pack.pack_id, store.source(pack.pack_id, store)))).field == "sources"
        damage(pack.path.with_suffix(".manifest"), 100)
        assert "remote: its manifest is damaged" in (await refusal(store.relay(pack.pack_id, REMOTE))).message


async def test_relay_between_tls_stores(tmp_path: Path, pack: StoredPack) -> None:
    """A store without TLS gets nothing."""
    authority = Authority(tmp_path / "authority")
    first, other = (dict[str, Any](authority.node(name, *Caller).as_settings()) for name in ("one", "other"))
    async with (
        running_store(tmp_path, **first) as source,
        running_store(tmp_path / "2", **other) as target,
        running_store(tmp_path / "3") as plain,
    ):
        await source.fetch(pack.pack_id)
        assert (await target.fetch(pack.pack_id, source.source(pack.pack_id, target))).source == source.store_id
        assert await target.bytes_in(pack.pack_id) == pack.data
        assert isinstance(await refusal(plain.relay(pack.pack_id, source.source(pack.pack_id, plain))), Unavailable)
        assert (await source.report()).bytes_sent == pack.num_bytes
