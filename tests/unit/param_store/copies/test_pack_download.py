"""The download of one pack, without the service around it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.param_store.model_folders import LARGER, write_folder
from tests.unit.transfer.loopback_holders import (
    FixedBuffer,
    eventually,
    make_pack,
    receiver,
    serving,
    source_at,
    tampering_proxy,
)
from torchrelay.common.errors import NotFound, Unavailable
from torchrelay.common.ids import new_id
from torchrelay.param_store.copies.arena_copies import ArenaCopies
from torchrelay.param_store.copies.copy_record import CopyRecord
from torchrelay.param_store.copies.pack_download import DownloadPlan, PackDownload
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.param_store.remote.folder_store import FolderStore
from torchrelay.param_store.remote.remote_store import RangeReader
from torchrelay.transfer.arena.arena import Arena
from torchrelay.transfer.fetch.follow import Receiver, SourceAddress
from torchrelay.transfer.fetch.sources import SourceUpdates
from torchrelay.transfer.manifest import pack_id_of
from torchrelay.transfer.protocol.tickets import Ticket
from torchrelay.transfer.transport.interface import TransferClass
from torchrelay.transfer.transport.tcp import TcpConnection


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(Path("/dev/shm") / new_id("torchrelay-test"), 16 << 20)
    yield made
    made.close(unlink=True)


@pytest.fixture
def download(tmp_path: Path, arena: Arena) -> PackDownload:
    remote = FolderStore(tmp_path / "remote")
    pack_id = pack(write_folder(tmp_path / "model", LARGER), tmp_path / "a.pack", 0)["pack_id"]
    remote.put_file(f"packs/{pack_id}", tmp_path / "a.pack")
    remote.put_file(f"packs/{pack_id}.manifest", tmp_path / "a.manifest")
    plan = DownloadPlan(pack_id, (None,), Receiver("sto-1", bytes(32)), 2)
    return PackDownload(plan, arena, remote, CopyRecord(pack_id), lambda num_bytes: None, lambda: None)


def test_a_download_ends_complete_and_unpinned(arena: Arena, download: PackDownload) -> None:
    download.run()
    slab = arena.get(download.plan.pack_id)
    assert slab is not None
    assert slab.complete
    assert download.reserved.result() is False
    assert download.record.error == ""
    assert arena.owners(slab.pack_id) == frozenset()
    arena.check_integrity()


def test_a_stop_that_comes_after_the_last_chunk_is_no_failure(arena: Arena, download: PackDownload) -> None:
    download.run()
    again = PackDownload(
        download.plan, arena, download.remote, CopyRecord("p"), lambda num_bytes: None, lambda: None, download.stop
    )
    again.stop.set()
    again.run()
    assert again.reserved.result() is True
    assert again.record.error == ""


def test_a_stop_before_it_fails_and_keeps_what_is_there(arena: Arena, download: PackDownload) -> None:
    download.stop.set()
    download.run()
    slab = arena.get(download.plan.pack_id)
    assert slab is not None
    assert "stopped" in download.record.error
    assert "stopped" in slab.error


def test_a_relay_that_comes_while_the_download_is_being_stopped_is_not_lost(
    tmp_path: Path, arena: Arena, download: PackDownload
) -> None:
    pack_id = download.plan.pack_id
    stuck, going_on = threading.Event(), threading.Event()

    class SlowRemote(FolderStore):
        def open_range(self, key: str) -> RangeReader:
            stuck.set()
            going_on.wait(10)
            return super().open_range(key)

    arena_copies = ArenaCopies(arena, SlowRemote(tmp_path / "remote"), download.plan.receiver, lambda: None)
    assert arena_copies.relay(pack_id, [None]).result(10) is False
    assert stuck.wait(10)
    dropping = threading.Thread(target=arena_copies.drop, args=(pack_id,))
    dropping.start()
    assert eventually(lambda: arena_copies.downloads()[0].stop.is_set())
    again = arena_copies.relay(pack_id, [None])
    assert not again.done()
    going_on.set()
    dropping.join()
    assert again.result(10) is False
    assert eventually(lambda: [copy.num_chunks_verified for copy in arena_copies.copies()] == [28])
    arena_copies.close()


def test_a_running_relay_is_as_urgent_as_it_was_last_asked_for(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, manifest = make_pack(1 << 20, chunk_bytes=32768)
    pack_id = pack_id_of(manifest.encode())
    sent = FixedBuffer(pack_id, data, manifest, published=1)
    classes: list[TransferClass] = []
    monkeypatch.setattr(TcpConnection, "set_class", lambda _, transfer_class: classes.append(transfer_class))
    arena_copies = ArenaCopies(arena, FolderStore(tmp_path / "remote"), receiver(), lambda: None)
    with serving(sent) as holder:
        source = source_at(holder.address, pack_id)
        arena_copies.relay(pack_id, [source], transfer_class=TransferClass.IDLE).result(10)
        assert eventually(lambda: arena_copies.copies()[0].num_chunks_verified == 1)
        arena_copies.relay(pack_id, [source]).result(10)
        assert eventually(lambda: classes[-1] == TransferClass.URGENT)
        arena_copies.relay(pack_id, [source], transfer_class=TransferClass.IDLE).result(10)  # something is more urgent
        assert eventually(lambda: classes[-1] == TransferClass.IDLE)
        for index in range(manifest.num_chunks):
            sent.publish(index, sent.pieces[index])
        assert eventually(lambda: arena_copies.copies()[0].num_chunks_verified == manifest.num_chunks)
    idle = TransferClass.IDLE
    assert classes[-3:] == [idle, TransferClass.URGENT, idle]  # before them its manifest came
    assert arena_copies.copies()[0].record.stats.num_repairs == 0
    arena_copies.close()


@pytest.mark.parametrize("num_held", [32, 8])
def test_peers_named_while_it_reads_from_the_remote_store_take_over(
    tmp_path: Path, arena: Arena, num_held: int
) -> None:
    """What they lack comes from the remote store after all."""
    data, manifest = make_pack(1 << 20, chunk_bytes=32768)
    pack_id = pack_id_of(manifest.encode())
    remote = FolderStore(tmp_path / "remote")
    (tmp_path / "pack").write_bytes(data)
    (tmp_path / "manifest").write_bytes(manifest.encode())
    remote.put_file(f"packs/{pack_id}", tmp_path / "pack")
    remote.put_file(f"packs/{pack_id}.manifest", tmp_path / "manifest")
    held = FixedBuffer(pack_id, data, manifest, published=0)
    for index in range(32 - num_held, 32):
        held.publish(index, held.pieces[index])
    updates = SourceUpdates()

    def lose_its_source() -> None:
        assert eventually(lambda: holder.bytes_sent >= (num_held - 2) * 32768)
        held.fail("its own source is gone")

    with serving(held) as holder, ThreadPoolExecutor(1) as beside:
        sources = [source_at(holder.address, pack_id)]

        def name_peers(num_bytes: int) -> None:
            updates.add([sources.pop()] if sources else [])

        plan = DownloadPlan(pack_id, (None,), receiver(), 2)
        again = PackDownload(plan, arena, remote, CopyRecord(pack_id), name_peers, lambda: None, updates=updates)
        losing = beside.submit(lose_its_source)
        again.run()
        losing.result()
    assert again.record.error == ""
    slab = arena.get(pack_id)
    assert slab is not None and slab.complete
    brought = {share.holder_id: share.num_bytes // 32768 for share in again.record.stats.by_source()}
    assert sum(brought.values()) == 32
    assert brought["host-h"] >= num_held - 2  # two reads were under way


def test_a_failed_copy_that_is_still_read_goes_with_its_last_reader_unless_it_is_filled_again(
    tmp_path: Path, arena: Arena, download: PackDownload
) -> None:
    pack_id, remote = download.plan.pack_id, download.remote
    whole = tmp_path / "remote/packs" / pack_id
    data = whole.read_bytes()
    whole.write_bytes(data[: len(data) // 2])
    arena_copies = ArenaCopies(arena, remote, download.plan.receiver, lambda: None)

    def fail_while_read(reader: str) -> None:
        arena_copies.relay(pack_id, [None]).result(10)
        arena.pin(pack_id, reader)
        assert eventually(lambda: not arena_copies.downloads() and arena_copies.failed_download(pack_id) is not None)

    fail_while_read("stream-1")
    arena.unpin(pack_id, "stream-1")
    assert arena.slabs() == []
    fail_while_read("stream-2")
    whole.write_bytes(data)
    assert arena_copies.relay(pack_id, [None]).result(10) is False
    assert eventually(lambda: not arena_copies.downloads())
    arena.unpin(pack_id, "stream-2")
    assert [slab.complete for slab in arena.slabs()] == [True]
    arena_copies.close()


def test_an_unexpected_error_is_told_and_not_swallowed(download: PackDownload) -> None:
    def broken(num_bytes: int) -> None:
        raise ZeroDivisionError

    download.on_bytes = broken
    download.run()
    assert download.record.error == "internal error: ZeroDivisionError()"


def test_neighbouring_peers_are_alternates_of_one_another() -> None:
    a, b, c = (SourceAddress(name, "127.0.0.1:1", Ticket()) for name in "abc")
    plan = DownloadPlan("p", (a, b, None, c), Receiver("sto-1", bytes(32)), 1)
    assert list(plan.groups()) == [(a, b), (), (c,)]


def test_without_a_manifest_nothing_is_reserved(arena: Arena, download: PackDownload) -> None:
    download.remote.delete(f"packs/{download.plan.pack_id}.manifest")
    download.run()
    with pytest.raises(NotFound, match="no source has the manifest"):  # the remote store says that it was deleted
        download.reserved.result()
    assert arena.slabs() == []


def test_a_remote_store_that_is_away_does_not_say_that_a_pack_was_deleted(
    tmp_path: Path, arena: Arena, download: PackDownload
) -> None:
    class Away(FolderStore):
        def get_bytes(self, key: str) -> bytes:
            raise Unavailable("it does not answer")

    download.remote = Away(tmp_path / "remote")
    download.run()
    with pytest.raises(Unavailable, match="it does not answer"):
        download.reserved.result()


def test_what_an_alternate_brings_is_told_while_the_first_source_is_silent(tmp_path: Path, arena: Arena) -> None:
    data, manifest = make_pack(4 << 20, chunk_bytes=32768)
    pack_id = pack_id_of(manifest.encode())
    half = manifest.num_chunks // 2
    silent, told = threading.Event(), list[int]()

    def fall_silent(passing: bytes, offset: int) -> bytes:
        if offset > 400_000:
            silent.wait(10)
        return passing

    growing = FixedBuffer(pack_id, data, manifest, published=half)
    with (
        serving(FixedBuffer(pack_id, data, manifest), holder_id="host-1") as host1,
        serving(growing, holder_id="host-2") as host2,
        tampering_proxy(host1.address, fall_silent) as door,
    ):
        sources = source_at(door, pack_id, "host-1"), source_at(host2.address, pack_id, "host-2")
        plan = DownloadPlan(pack_id, sources, receiver(), 2)
        download = PackDownload(plan, arena, FolderStore(tmp_path), CopyRecord(pack_id), told.append, lambda: None)
        running = threading.Thread(target=download.run)
        running.start()
        try:
            assert eventually(lambda: len(told) >= half, 3.0)
        finally:
            silent.set()
            for index in range(half, manifest.num_chunks):
                growing.publish(index, growing.pieces[index])
            running.join()
    assert download.record.error == ""
    assert sum(told) == len(data)
