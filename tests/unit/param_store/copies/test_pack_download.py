"""The download of one pack, without the service around it, from peers and from the remote store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from tests.support.guard import shared_memory_path
from tests.support.wait import HANG_S, wait_until
from tests.unit.param_store.model_folders import StoredPack
from tests.unit.transfer.loopback_holders import SamplePack, receiver, serving, tampering_proxy
from torchrelay.common.errors import DataCorrupted, NotFound, Unavailable
from torchrelay.common.ids import new_id
from torchrelay.param_store.copies.arena_copies import ArenaCopies
from torchrelay.param_store.copies.copy_record import CopyRecord
from torchrelay.param_store.copies.pack_download import DownloadContext, DownloadPlan, PackDownload
from torchrelay.param_store.copies.remote_download import download_from_remote
from torchrelay.param_store.copies.transfer_counts import PEER, TransferCounts
from torchrelay.param_store.remote.file_reader import FileReader, ReadBuffers
from torchrelay.param_store.remote.folder_store import FolderStore
from torchrelay.param_store.remote.remote_store import RangeReader
from torchrelay.transfer.arena.arena import Arena
from torchrelay.transfer.buffers import MemoryBuffer
from torchrelay.transfer.fetch.follow import SourceAddress
from torchrelay.transfer.fetch.sources import SourceUpdates
from torchrelay.transfer.protocol.tickets import Ticket
from torchrelay.transfer.transport.interface import TransferClass
from torchrelay.transfer.transport.tcp import TcpConnection


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(shared_memory_path(new_id("arena")), 16 << 20)
    yield made
    made.close(unlink=True)


@pytest.fixture
def download(tmp_path: Path, arena: Arena, pack: StoredPack) -> PackDownload:
    context = context_of(arena, FolderStore(tmp_path / "remote"))
    return PackDownload(context, DownloadPlan(pack.pack_id, (None,)), CopyRecord(pack.pack_id))


def context_of(arena: Arena, remote: FolderStore, counts: TransferCounts | None = None) -> DownloadContext:
    return DownloadContext(arena, remote, receiver(), lambda: None, counts=counts or TransferCounts())


def test_download_ends_complete_and_unpinned(arena: Arena, download: PackDownload) -> None:
    download.run()
    slab = arena.get(download.plan.pack_id)
    assert slab is not None and slab.complete
    assert (download.reserved.result(), download.record.error) == (False, "")
    assert arena.owners(slab.pack_id) == frozenset()
    arena.check_integrity()
    again = PackDownload(download.context, download.plan, CopyRecord("p"), download.stop)
    again.stop.set()
    again.run()
    assert (again.reserved.result(), again.record.error) == (True, ""), "a stop after the last chunk is no failure"


def test_stop_before_download_fails_slab(arena: Arena, download: PackDownload) -> None:
    download.stop.set()
    download.run()
    slab = arena.get(download.plan.pack_id)
    assert slab is not None and "stopped" in slab.error and "stopped" in download.record.error


def test_relay_during_stop_starts_new_download(tmp_path: Path, arena: Arena, download: PackDownload) -> None:
    pack_id = download.plan.pack_id
    reading, stopping, resumed = threading.Event(), threading.Event(), threading.Event()

    class SlowReader(FileReader):
        def read_into(self, offset: int, view: memoryview, stop: threading.Event) -> None:
            reading.set()
            if not resumed.is_set():
                assert stop.wait(HANG_S)
                stopping.set()
                assert resumed.wait(HANG_S)
            super().read_into(offset, view, stop)

    class SlowRemote(FolderStore):
        def open_range(self, key: str) -> RangeReader:
            return SlowReader(tmp_path / "remote" / key, key, ReadBuffers())

    arena_copies = ArenaCopies(context_of(arena, SlowRemote(tmp_path / "remote")))
    assert arena_copies.relay(download.plan).result(HANG_S) is False
    assert reading.wait(HANG_S)
    dropping = threading.Thread(target=arena_copies.drop, args=(pack_id,))
    dropping.start()
    assert stopping.wait(HANG_S)
    again = arena_copies.relay(download.plan)
    assert not again.done()
    resumed.set()
    dropping.join()
    assert again.result(HANG_S) is False
    wait_until(lambda: [copy.num_chunks_verified for copy in arena_copies.copies()] == [28])
    arena_copies.close()


def test_running_relay_takes_latest_urgency(tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = SamplePack(1 << 20, chunk_bytes=32768)
    sent = pack.buffer(1)
    classes: list[TransferClass] = []
    monkeypatch.setattr(TcpConnection, "set_class", lambda _, transfer_class: classes.append(transfer_class))
    arena_copies = ArenaCopies(context_of(arena, FolderStore(tmp_path / "remote")))
    with serving(sent) as holder:
        sources = (pack.source(holder.address),)
        idle_plan = DownloadPlan(pack.pack_id, sources, transfer_class=TransferClass.IDLE)
        arena_copies.relay(idle_plan).result(HANG_S)
        wait_until(lambda: arena_copies.copies()[0].num_chunks_verified == 1)
        arena_copies.relay(DownloadPlan(pack.pack_id, sources)).result(HANG_S)
        wait_until(lambda: classes[-1] == TransferClass.URGENT)
        arena_copies.relay(idle_plan).result(HANG_S)  # something is more urgent
        wait_until(lambda: classes[-1] == TransferClass.IDLE)
        sent.show(*pack.chunks)
        wait_until(lambda: arena_copies.copies()[0].num_chunks_verified == len(pack.chunks))
    idle = TransferClass.IDLE
    assert classes[-3:] == [idle, TransferClass.URGENT, idle]  # before them its manifest came
    assert arena_copies.copies()[0].record.stats.num_repairs == 0
    arena_copies.close()


@pytest.mark.parametrize("num_held", [32, 8])
def test_peers_added_during_remote_read_take_over(tmp_path: Path, arena: Arena, num_held: int) -> None:
    """Chunks that the peers lack still come from the remote store."""
    pack = SamplePack(1 << 20, chunk_bytes=32768)
    pack_id, remote = pack.pack_id, FolderStore(tmp_path / "remote")
    remote.put_bytes(f"packs/{pack_id}", pack.data)
    remote.put_bytes(f"packs/{pack_id}.manifest", pack.head)
    held = pack.buffer(0)
    held.show(*range(32 - num_held, 32))
    updates = SourceUpdates()

    def lose_its_source() -> None:
        wait_until(lambda: holder.bytes_sent >= (num_held - 2) * 32768)
        held.fail("its own source is gone")

    with serving(held) as holder, ThreadPoolExecutor(1) as beside:
        sources = [pack.source(holder.address)]

        class NamesPeers(TransferCounts):
            def count_received(self, source: str, num_bytes: int) -> None:
                updates.add([sources.pop()] if sources else [])

        context = DownloadContext(arena, remote, receiver(), lambda: None, num_remote_readers=2, counts=NamesPeers())
        again = PackDownload(context, DownloadPlan(pack_id, (None,)), CopyRecord(pack_id), updates=updates)
        losing = beside.submit(lose_its_source)
        again.run()
        losing.result()
    assert again.record.error == ""
    slab = arena.get(pack_id)
    assert slab is not None and slab.complete
    brought = {share.holder_id: share.num_bytes // 32768 for share in again.record.stats.by_source()}
    assert sum(brought.values()) == 32
    assert brought["host-h"] >= num_held - 2  # two reads were under way


def test_failed_copy_dropped_with_last_reader(tmp_path: Path, arena: Arena, download: PackDownload) -> None:
    pack_id = download.plan.pack_id
    whole = tmp_path / "remote/packs" / pack_id
    data = whole.read_bytes()
    whole.write_bytes(data[: len(data) // 2])
    arena_copies = ArenaCopies(download.context)

    def fail_while_read(reader: str) -> None:
        arena_copies.relay(download.plan).result(HANG_S)
        arena.pin(pack_id, reader)
        wait_until(lambda: not arena_copies.is_downloading(pack_id) and arena_copies.failed_download(pack_id))

    fail_while_read("stream-1")
    arena.unpin(pack_id, "stream-1")
    assert arena.slabs() == []
    fail_while_read("stream-2")
    whole.write_bytes(data)
    assert arena_copies.relay(download.plan).result(HANG_S) is False
    wait_until(lambda: not arena_copies.is_downloading(pack_id))
    arena.unpin(pack_id, "stream-2")
    assert [slab.complete for slab in arena.slabs()] == [True]
    arena_copies.close()


def test_unexpected_error_recorded(download: PackDownload) -> None:
    class Broken(TransferCounts):
        def count_received(self, source: str, num_bytes: int) -> None:
            raise ZeroDivisionError

    download.context = replace(download.context, counts=Broken())
    download.run()
    assert download.record.error == "internal error: ZeroDivisionError()"


def test_consecutive_peers_form_group() -> None:
    a, b, c = (SourceAddress(name, "127.0.0.1:1", Ticket()) for name in "abc")
    plan = DownloadPlan("p", (a, b, None, c))
    assert list(plan.groups()) == [(a, b), (), (c,)]


def test_missing_manifest_reserves_nothing(tmp_path: Path, arena: Arena, download: PackDownload) -> None:
    class Away(FolderStore):
        def get_bytes(self, key: str) -> bytes:
            raise Unavailable("it does not answer")

    away = replace(download.context, remote=Away(tmp_path / "remote"))
    unreachable = PackDownload(away, download.plan, CopyRecord("p"))
    unreachable.run()
    with pytest.raises(Unavailable, match="it does not answer"):
        unreachable.reserved.result()
    download.context.remote.delete(f"packs/{download.plan.pack_id}.manifest")
    download.run()
    with pytest.raises(NotFound, match="no source has the manifest"):  # the remote store says that it was deleted
        download.reserved.result()
    assert arena.slabs() == []


def test_alternate_chunks_announced_during_silence(tmp_path: Path, arena: Arena) -> None:
    pack = SamplePack(4 << 20, chunk_bytes=32768)
    half = len(pack.chunks) // 2
    silent, counts = threading.Event(), TransferCounts()

    def fall_silent(passing: bytes, offset: int) -> bytes:
        if offset > 400_000:
            silent.wait(HANG_S)
        return passing

    growing = pack.buffer(half)
    with (
        serving(pack.buffer(), holder_id="host-1") as host1,
        serving(growing, holder_id="host-2") as host2,
        tampering_proxy(host1.address, fall_silent) as proxy,
    ):
        plan = DownloadPlan(pack.pack_id, (pack.source(proxy, "host-1"), pack.source(host2.address, "host-2")))
        context = context_of(arena, FolderStore(tmp_path), counts)
        download = PackDownload(context, plan, CopyRecord(pack.pack_id))
        running = threading.Thread(target=download.run)
        running.start()
        try:
            wait_until(lambda: counts.num_bytes_received[PEER] >= half * 32768)
        finally:
            silent.set()
            growing.show(*pack.chunks[half:])
            running.join()
    assert download.record.error == ""
    assert counts.num_bytes_received == {PEER: len(pack.data), "remote": 0, "disk": 0}


CHUNK_BYTES = 100
DATA = bytes(range(256)) * 4


class Bytes(RangeReader):
    """Reads from ``again`` after damaged bytes."""

    def __init__(self, data: bytes, again: bytes | None = None) -> None:
        self.data, self.again = data, again

    def read_into(self, offset: int, view: memoryview, stop: threading.Event) -> None:
        if offset + len(view) > len(self.data):
            raise DataCorrupted("too short")
        view[:] = self.data[offset : offset + len(view)]

    def read_again(self, offset: int, view: memoryview, stop: threading.Event) -> bool:
        if self.again is not None:
            view[:] = self.again[offset : offset + len(view)]
        return self.again is not None

    def close(self) -> None: ...


class Expecting(MemoryBuffer):
    """A sink that knows the digests of DATA."""

    def __init__(self) -> None:
        super().__init__("p", [min(CHUNK_BYTES, len(DATA) - begin) for begin in range(0, len(DATA), CHUNK_BYTES)])

    def digest(self, index: int) -> bytes:
        return blake3(DATA[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]).digest()

    def accept(self, index: int) -> None:
        self.publish(index)

    def published(self) -> set[int]:
        return {index for index in range(self.num_chunks) if self.ready_flags()[index]}


def fill(data: bytes, wanted: list[int], stop_after: int = 1000, again: bytes | None = None) -> Expecting:
    sink, stop, seen = Expecting(), threading.Event(), list[int]()

    def on_chunk(index: int) -> None:
        seen.append(index)
        if len(seen) >= stop_after:
            stop.set()

    try:
        download_from_remote("p", Bytes(data, again), CHUNK_BYTES, sink, wanted, stop, on_chunk, lambda: None, 3)
    finally:
        assert set(seen) == sink.published()
    return sink


def test_only_wanted_chunks_downloaded() -> None:
    assert fill(DATA, [7, 2, 10]).published() == {7, 2, 10}
    sink = fill(DATA, list(range(11)))
    assert b"".join(bytes(sink.chunk(i)) for i in range(sink.num_chunks)) == DATA


def test_damaged_chunks_skipped_and_named() -> None:
    damaged = bytearray(DATA)
    damaged[350] ^= 1
    damaged[1000] ^= 1
    with pytest.raises(DataCorrupted, match=r"pack p is damaged in the remote store: 2 chunks \(3, 10\)"):
        fill(bytes(damaged), list(range(11)))


def test_damaged_chunk_read_again() -> None:
    damaged = bytearray(DATA)
    damaged[350] ^= 1
    assert fill(bytes(damaged), list(range(11)), again=DATA).published() == set(range(11))
    with pytest.raises(DataCorrupted, match=r"pack p is damaged in the remote store: 1 chunk \(3\)"):
        fill(bytes(damaged), list(range(11)), again=bytes(damaged))


def test_interrupted_reader_is_no_failure() -> None:
    stop = threading.Event()

    class Interrupted(Bytes):
        def read_into(self, offset: int, view: memoryview, stop: threading.Event) -> None:
            stop.set()
            raise Unavailable("stopped")

    download_from_remote(
        "p", Interrupted(DATA), CHUNK_BYTES, Expecting(), range(11), stop, lambda index: None, lambda: None, 3
    )
    assert stop.is_set()


def test_store_error_ends_download() -> None:
    with pytest.raises(DataCorrupted, match="too short"):
        fill(DATA[:500], list(range(11)))


def test_stop_ends_download_early() -> None:
    assert len(fill(DATA, list(range(11)), stop_after=1).published()) <= 3
