"""The arena: growth, allocation, pins, eviction, what survives its process, and what it refuses."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.wait import wait_until
from tests.unit.transfer.arena.arena_packs import CAPACITY, PAGE, fill, pack, reserve
from tests.unit.transfer.loopback_holders import make_pack, receiver, serving, source_at
from torchrelay.common.errors import InvalidRequest, NotFound
from torchrelay.transfer.arena.arena import Arena
from torchrelay.transfer.arena.slab_table import MAX_SLABS, TABLE_BYTES, SlabTable
from torchrelay.transfer.errors import ArenaCorrupted, ArenaFull, BufferLost, ProtocolViolation, UnknownBuffer
from torchrelay.transfer.fetch.follow import follow


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena"


@pytest.fixture
def arena(path: Path) -> Iterator[Arena]:
    arena = Arena.create(path, CAPACITY)
    yield arena
    arena.check_integrity()
    arena.close(unlink=True)
    assert not path.exists()


def test_new_arena_sparse_and_grows_in_steps(arena: Arena, path: Path) -> None:
    assert arena.capacity_bytes == CAPACITY == path.stat().st_size
    assert arena.faulted_bytes == TABLE_BYTES
    assert arena.free_bytes == 64 * PAGE
    assert path.stat().st_blocks * 512 <= TABLE_BYTES + PAGE
    assert arena.grow(10 * PAGE + 1) == TABLE_BYTES + 11 * PAGE
    assert path.stat().st_blocks * 512 >= TABLE_BYTES + 11 * PAGE
    assert arena.grow(1 << 40) == CAPACITY == arena.grow(1)


def test_reserve_grows_when_it_must(arena: Arena) -> None:
    slab = reserve(arena, 9, seed=1)
    assert arena.faulted_bytes == TABLE_BYTES + 9 * PAGE
    assert slab.offset == TABLE_BYTES
    assert slab.num_slab_bytes == 9 * PAGE
    assert arena.free_bytes == 55 * PAGE
    assert arena.reserve(pack(9, seed=1)[1].encode()) is slab
    assert arena.slabs() == [slab]


def test_data_begins_on_page_and_is_filled_in_place(arena: Arena, path: Path) -> None:
    data, manifest = make_pack(10_000)
    slab = fill(arena.reserve(manifest.encode()), data)
    assert slab.complete
    assert bytes(slab.data) == data
    begin = slab.offset + slab.format.data_offset
    assert begin % PAGE == 0
    assert path.read_bytes()[begin : begin + len(data)] == data


def test_least_recently_used_pack_evicted_and_range_reused(arena: Arena) -> None:
    first, second = reserve(arena, 32, seed=1), reserve(arena, 32, seed=2)
    assert arena.get(first.pack_id) is first  # used since: the other is evicted
    third = reserve(arena, 20, seed=3)
    assert third.offset == second.offset
    assert arena.get(second.pack_id) is None
    assert second.error
    with pytest.raises(BufferLost):
        second.wait_any([0], 10.0)
    with pytest.raises(BufferLost):
        second.accept(0)


def test_pins_of_any_owner_keep_pack(arena: Arena) -> None:
    slab = reserve(arena, 40, seed=1, owner="filler")
    arena.pin(slab.pack_id, "worker-1")
    arena.pin(slab.pack_id, "worker-1")
    assert arena.owners(slab.pack_id) == {"filler", "worker-1"}
    with pytest.raises(ArenaFull, match="are pinned"):
        reserve(arena, 40, seed=2)
    arena.unpin(slab.pack_id, "worker-1")
    assert not arena.drop(slab.pack_id)
    arena.unpin(slab.pack_id, "filler")
    arena.unpin(slab.pack_id, "nobody")
    assert reserve(arena, 40, seed=2).offset == slab.offset
    with pytest.raises(UnknownBuffer):
        arena.pin(slab.pack_id, "worker-1")


def test_pack_larger_than_arena_refused(arena: Arena) -> None:
    with pytest.raises(ArenaFull, match="contiguous"):
        reserve(arena, 65, seed=1)
    assert reserve(arena, 64, seed=2).num_slab_bytes == 64 * PAGE


def test_drop_frees_range_and_refuses_readers(arena: Arena) -> None:
    slab = reserve(arena, 4, seed=1)
    assert arena.drop(slab.pack_id)
    assert not arena.drop(slab.pack_id)
    assert arena.free_bytes == 64 * PAGE
    again = reserve(arena, 4, seed=1)
    assert again is not slab
    with pytest.raises(UnknownBuffer):
        slab.acquire("stream-1")
    again.acquire("stream-1")
    assert not arena.drop(slab.pack_id)
    again.release("stream-1")
    assert arena.drop(slab.pack_id)


def test_pack_being_read_not_evicted(arena: Arena) -> None:
    data, manifest = pack(40)
    slab = fill(arena.reserve(manifest.encode()), data, count=1)
    other = Arena.create(arena.path.with_name("other"), CAPACITY)
    with serving(slab) as holder:
        sink = other.reserve(manifest.encode())
        stream = follow(slab.pack_id, sink.missing(), [source_at(holder.address, slab.pack_id)], sink, receiver())
        assert next(stream) == 0
        with pytest.raises(ArenaFull):
            reserve(arena, 40, seed=2)
        fill(slab, data)
        assert list(stream) == list(range(1, slab.num_chunks))
        wait_until(lambda: not arena.owners(slab.pack_id))
    assert bytes(sink.data) == data
    reserve(arena, 40, seed=2)
    other.close(unlink=True)


def test_slab_table_is_bounded(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "wide", TABLE_BYTES + (MAX_SLABS + 2) * PAGE)
    arena.grow(1 << 40)
    for seed in range(MAX_SLABS):
        arena.reserve(make_pack(0, seed=seed)[1].encode(), owner="filler")
    with pytest.raises(ArenaFull, match=f"holds {MAX_SLABS} packs"):
        arena.reserve(make_pack(0, seed=MAX_SLABS)[1].encode())
    arena.check_integrity()
    arena.close(unlink=True)


def test_places_and_sizes_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Arena.create(tmp_path / "arena", TABLE_BYTES)
    assert refused.value.field == "arena_bytes"
    with pytest.raises(NotFound):
        Arena.create(tmp_path / "nowhere" / "arena", CAPACITY)


def test_packs_evicted_when_system_memory_runs_out(path: Path) -> None:
    arena = Arena.create(path, CAPACITY)
    first = reserve(arena, 10, seed=1)
    file, arena._file = arena._file, os.open("/dev/full", os.O_RDWR)  # a file in which nothing can be allocated
    with pytest.raises(ArenaFull, match="cannot grow"):
        arena.grow(PAGE)
    with pytest.raises(ArenaFull, match="contiguous"):
        reserve(arena, 11, seed=2)
    assert reserve(arena, 10, seed=3).offset == first.offset
    os.close(arena._file)
    arena._file = file
    assert reserve(arena, 11, seed=2, owner="filler").offset == TABLE_BYTES + 10 * PAGE
    arena.close(unlink=True)


@pytest.mark.parametrize("manifest", [b"", b"{}", b"[]", b'{"architecture": "\xff"}'])
def test_manifests_that_cannot_be_read_are_refused(arena: Arena, manifest: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        arena.reserve(manifest)


def test_closing_wakes_waiters_and_refuses_new_packs(path: Path) -> None:
    arena = Arena.create(path, CAPACITY)
    slab = reserve(arena, 5, seed=1)
    lost: list[str] = []

    def wait() -> None:
        try:
            slab.wait_any([0], 10.0)
        except BufferLost as error:
            lost.append(error.message)

    waiting = threading.Thread(target=wait)
    waiting.start()
    view = slab.data
    arena.close(unlink=True)
    arena.close(unlink=True)
    waiting.join()
    assert lost
    assert view[0] == 0, "memory stays while somebody looks"
    with pytest.raises(ArenaFull, match="closed"):
        reserve(arena, 5, seed=2)


def test_growing_stops_after_a_slice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena.create(path, CAPACITY, grow_slice_bytes=PAGE)
    monkeypatch.setattr("torchrelay.transfer.arena.arena.prefault", lambda *_: arena.stop_growing())
    with pytest.raises(ArenaFull, match="about to be closed"):
        arena.grow(CAPACITY)
    assert arena.faulted_bytes == TABLE_BYTES + PAGE
    arena.close(unlink=True)


def test_integrity_notices_overlaps_and_foreign_writes(arena: Arena) -> None:
    first, second = reserve(arena, 5, seed=1), reserve(arena, 5, seed=2)
    with arena.path.open("r+b") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0))
    table = SlabTable(memory)
    (entry,) = (entry for entry in table.entries() if entry.pack_id == second.pack_id)
    table.remove(entry)
    with pytest.raises(ArenaCorrupted, match="differs"):
        arena.check_integrity()
    arena._entries[second.pack_id] = table.add(second.pack_id, first.offset, entry.num_bytes, 9)
    with pytest.raises(ArenaCorrupted, match="overlaps"):
        arena.check_integrity()
    table.remove(arena._entries[second.pack_id])
    arena._entries[second.pack_id] = table.add(second.pack_id, entry.begin, entry.num_bytes, 9)
    arena.check_integrity()
    memory[second.offset] ^= 1
    with pytest.raises(ArenaCorrupted, match="does not describe"):
        arena.check_integrity()
    memory[second.offset] ^= 1
