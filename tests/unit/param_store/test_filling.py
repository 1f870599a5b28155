"""The filling of one pack, without the service around it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.param_store.folders import LARGER, write_folder
from tests.unit.transfer.relay_parts import (
    FixedBuffer,
    eventually,
    make_pack,
    meddling_door,
    receiver,
    serving,
    source_at,
)
from torchrelay.common.errors import NotFound, Unavailable
from torchrelay.common.ids import new_id
from torchrelay.param_store.filling import CopyRecord, Filling, Plan
from torchrelay.param_store.folder_store import FolderStore
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.param_store.relays import Relays
from torchrelay.param_store.remote import RangeReader
from torchrelay.transfer.arena import Arena
from torchrelay.transfer.follow import Receiver, SourceAddress
from torchrelay.transfer.manifest import pack_id_of
from torchrelay.transfer.sources import Offers
from torchrelay.transfer.tcp import TcpConnection
from torchrelay.transfer.tickets import Ticket
from torchrelay.transfer.transport import TransferClass


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(Path("/dev/shm") / new_id("torchrelay-test"), 16 << 20)
    yield made
    made.close(unlink=True)


@pytest.fixture
def filling(tmp_path: Path, arena: Arena) -> Filling:
    remote = FolderStore(tmp_path / "remote")
    pack_id = pack(write_folder(tmp_path / "model", LARGER), tmp_path / "a.pack", 0)["pack_id"]
    remote.put_file(f"packs/{pack_id}", tmp_path / "a.pack")
    remote.put_file(f"packs/{pack_id}.manifest", tmp_path / "a.manifest")
    plan = Plan(pack_id, (None,), Receiver("sto-1", bytes(32)), 2)
    return Filling(plan, arena, remote, CopyRecord(pack_id), lambda num_bytes: None, lambda: None)


def test_a_filling_ends_complete_and_unpinned(arena: Arena, filling: Filling) -> None:
    filling.run()
    slab = arena.get(filling.plan.pack_id)
    assert slab is not None
    assert slab.complete
    assert filling.reserved.result() is False
    assert filling.record.error == ""
    assert arena.owners(slab.pack_id) == frozenset()
    arena.check_integrity()


def test_a_stop_that_comes_after_the_last_chunk_is_no_failure(arena: Arena, filling: Filling) -> None:
    filling.run()
    again = Filling(
        filling.plan, arena, filling.remote, CopyRecord("p"), lambda num_bytes: None, lambda: None, filling.stop
    )
    again.stop.set()
    again.run()
    assert again.reserved.result() is True
    assert again.record.error == ""


def test_a_stop_before_it_fails_and_keeps_what_is_there(arena: Arena, filling: Filling) -> None:
    filling.stop.set()
    filling.run()
    slab = arena.get(filling.plan.pack_id)
    assert slab is not None
    assert "stopped" in filling.record.error
    assert "stopped" in slab.error


def test_a_relay_that_comes_while_the_filling_is_being_stopped_is_not_lost(
    tmp_path: Path, arena: Arena, filling: Filling
) -> None:
    pack_id = filling.plan.pack_id
    stuck, going_on = threading.Event(), threading.Event()

    class SlowRemote(FolderStore):
        def open_range(self, key: str) -> RangeReader:
            stuck.set()
            going_on.wait(10)
            return super().open_range(key)

    relays = Relays(arena, SlowRemote(tmp_path / "remote"), filling.plan.receiver, lambda: None)
    assert relays.relay(pack_id, [None]).result(10) is False
    assert stuck.wait(10)
    dropping = threading.Thread(target=relays.drop, args=(pack_id,))
    dropping.start()
    assert eventually(lambda: relays._fillings[pack_id][0].stop.is_set())
    again = relays.relay(pack_id, [None])
    assert not again.done()
    going_on.set()
    dropping.join()
    assert again.result(10) is False
    assert eventually(lambda: [copy.num_chunks_verified for copy in relays.copies()] == [28])
    relays.close()


def test_an_urgent_relay_hastens_the_idle_one_that_runs(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, manifest = make_pack(1 << 20, chunk_bytes=32768)
    pack_id = pack_id_of(manifest.encode())
    sent = FixedBuffer(pack_id, data, manifest, published=1)
    classes: list[TransferClass] = []
    monkeypatch.setattr(TcpConnection, "set_class", lambda _, transfer_class: classes.append(transfer_class))
    relays = Relays(arena, FolderStore(tmp_path / "remote"), receiver(), lambda: None)
    with serving(sent) as holder:
        source = source_at(holder.address, pack_id)
        relays.relay(pack_id, [source], transfer_class=TransferClass.IDLE).result(10)
        assert eventually(lambda: relays.copies()[0].num_chunks_verified == 1)
        relays.relay(pack_id, [source]).result(10)
        assert eventually(lambda: classes[-1] == TransferClass.URGENT)
        for index in range(manifest.num_chunks):
            sent.publish(index, sent.pieces[index])
        assert eventually(lambda: relays.copies()[0].num_chunks_verified == manifest.num_chunks)
    assert classes[-2:] == [TransferClass.IDLE, TransferClass.URGENT]  # before them its manifest came
    assert relays.copies()[0].record.tally.num_repairs == 0
    relays.close()


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
    offers = Offers()

    def lose_its_source() -> None:
        assert eventually(lambda: holder.bytes_sent >= (num_held - 2) * 32768)
        held.fail("its own source is gone")

    with serving(held) as holder, ThreadPoolExecutor(1) as beside:
        sources = [source_at(holder.address, pack_id)]

        def name_peers(num_bytes: int) -> None:
            offers.add([sources.pop()] if sources else [])

        plan = Plan(pack_id, (None,), receiver(), 2)
        again = Filling(plan, arena, remote, CopyRecord(pack_id), name_peers, lambda: None, offers=offers)
        losing = beside.submit(lose_its_source)
        again.run()
        losing.result()
    assert again.record.error == ""
    slab = arena.get(pack_id)
    assert slab is not None and slab.complete
    brought = {share.holder_id: share.num_bytes // 32768 for share in again.record.tally.shares()}
    assert sum(brought.values()) == 32
    assert brought["host-h"] >= num_held - 2  # two reads were under way


def test_a_failed_copy_that_is_still_read_goes_with_its_last_reader_unless_it_is_filled_again(
    tmp_path: Path, arena: Arena, filling: Filling
) -> None:
    pack_id, remote = filling.plan.pack_id, filling.remote
    whole = tmp_path / "remote/packs" / pack_id
    data = whole.read_bytes()
    whole.write_bytes(data[: len(data) // 2])
    relays = Relays(arena, remote, filling.plan.receiver, lambda: None)

    def fail_while_read(reader: str) -> None:
        relays.relay(pack_id, [None]).result(10)
        arena.pin(pack_id, reader)
        assert eventually(lambda: not relays._fillings and relays.failure(pack_id) != "")

    fail_while_read("stream-1")
    arena.unpin(pack_id, "stream-1")
    assert arena.slabs() == []
    fail_while_read("stream-2")
    whole.write_bytes(data)
    assert relays.relay(pack_id, [None]).result(10) is False
    assert eventually(lambda: not relays._fillings)
    arena.unpin(pack_id, "stream-2")
    assert [slab.complete for slab in arena.slabs()] == [True]
    relays.close()


def test_an_unexpected_error_is_told_and_not_swallowed(filling: Filling) -> None:
    def broken(num_bytes: int) -> None:
        raise ZeroDivisionError

    filling.on_bytes = broken
    filling.run()
    assert filling.record.error == "internal error: ZeroDivisionError()"


def test_neighbouring_peers_are_alternates_of_one_another() -> None:
    a, b, c = (SourceAddress(name, "127.0.0.1:1", Ticket()) for name in "abc")
    plan = Plan("p", (a, b, None, c), Receiver("sto-1", bytes(32)), 1)
    assert list(plan.groups()) == [(a, b), (), (c,)]


def test_without_a_manifest_nothing_is_reserved(arena: Arena, filling: Filling) -> None:
    filling.remote.delete(f"packs/{filling.plan.pack_id}.manifest")
    filling.run()
    with pytest.raises(NotFound, match="no source gave the manifest"):  # the remote store says that it was deleted
        filling.reserved.result()
    assert arena.slabs() == []


def test_a_remote_store_that_is_away_does_not_say_that_a_pack_was_deleted(
    tmp_path: Path, arena: Arena, filling: Filling
) -> None:
    class Away(FolderStore):
        def get_bytes(self, key: str) -> bytes:
            raise Unavailable("it does not answer")

    filling.remote = Away(tmp_path / "remote")
    filling.run()
    with pytest.raises(Unavailable, match="it does not answer"):
        filling.reserved.result()


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
        meddling_door(host1.address, fall_silent) as door,
    ):
        sources = source_at(door, pack_id, "host-1"), source_at(host2.address, pack_id, "host-2")
        plan = Plan(pack_id, sources, receiver(), 2)
        filling = Filling(plan, arena, FolderStore(tmp_path), CopyRecord(pack_id), told.append, lambda: None)
        running = threading.Thread(target=filling.run)
        running.start()
        try:
            assert eventually(lambda: len(told) >= half, 3.0)
        finally:
            silent.set()
            for index in range(half, manifest.num_chunks):
                growing.publish(index, growing.pieces[index])
            running.join()
    assert filling.record.error == ""
    assert sum(told) == len(data)
