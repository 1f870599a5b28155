"""The arena: growth, allocation, pins, eviction, retained packs, what outlives its process, and what it refuses."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.wait import wait_until
from tests.unit.transfer.arena.arena_packs import CAPACITY, PAGE, fill, pack, release_recovered, reserve
from tests.unit.transfer.loopback_holders import make_pack, receiver, serving, source_at
from torchrelay.common.errors import Conflict, InvalidRequest, NotFound, Overloaded
from torchrelay.transfer.arena.arena import Arena
from torchrelay.transfer.arena.slab import Slab
from torchrelay.transfer.arena.slab_table import TABLE_BYTES, SlabTable
from torchrelay.transfer.errors import ArenaCorrupted, ArenaFull, BufferLost, ProtocolViolation, UnknownBuffer
from torchrelay.transfer.fetch.follow import follow
from torchrelay.transfer.manifest import pack_id_of


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


def test_pack_stays_until_its_last_owner_unpins(arena: Arena) -> None:
    slab = reserve(arena, 40, seed=1, owner="filler")
    arena.pin(slab.pack_id, "worker-1")
    arena.pin(slab.pack_id, "worker-1")
    assert arena.owners(slab.pack_id) == {"filler", "worker-1"}
    with pytest.raises(ArenaFull, match="are pinned"):
        reserve(arena, 40, seed=2)
    assert not arena.drop(slab.pack_id, when_unpinned=True)
    for owner in ("worker-1", "nobody"):
        arena.unpin(slab.pack_id, owner)
        assert arena.get(slab.pack_id) is slab
    arena.unpin(slab.pack_id, "filler")
    assert arena.get(slab.pack_id) is None
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


def test_slab_table_is_bounded(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("arena", "slab_table"):
        monkeypatch.setattr(f"torchrelay.transfer.arena.{module}.MAX_SLABS", 8)
    for seed in range(8):
        reserve(arena, 2, seed, owner="filler")
    with pytest.raises(ArenaFull, match="holds 8 packs"):
        reserve(arena, 2, seed=8)


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


def three(arena: Arena) -> list[str]:
    """Packs of 20 of the 64 pages each, in the order of their use."""
    return [reserve(arena, 20, seed).pack_id for seed in (1, 2, 3)]


def one_more(arena: Arena, seed: int, num_pages: int = 20, keep_retained: bool = False) -> Slab:
    return arena.reserve(pack(num_pages, seed)[1].encode(), keep_retained=keep_retained)


def left_after(arena: Arena, seed: int, keep_retained: bool = False) -> set[str]:
    """Which earlier packs are still there after one more."""
    come = one_more(arena, seed, keep_retained=keep_retained)
    return there(arena) - {come.pack_id}


def there(arena: Arena) -> set[str]:
    return {slab.pack_id for slab in arena.slabs()}


def test_retained_packs_are_evicted_last(arena: Arena) -> None:
    first, second, _ = three(arena)
    arena.retention.renew([first, second], 60)
    fourth = one_more(arena, 4).pack_id
    assert there(arena) == {first, second, fourth}, "the third, though used last, was not retained"


def test_retained_packs_are_evicted_in_their_own_order(arena: Arena) -> None:
    first, second, third = three(arena)
    arena.retention.renew([second, third, first], 60)
    fourth = one_more(arena, 4).pack_id
    assert there(arena) == {first, third, fourth}
    arena.retention.renew([third, first, fourth], 60)
    assert left_after(arena, 5) == {first, fourth}


def test_relay_keeping_retained_packs_gets_full_arena(arena: Arena) -> None:
    packs = three(arena)
    arena.retention.renew(packs, 60)
    with pytest.raises(ArenaFull, match="pinned or retained") as refused:
        one_more(arena, 4, keep_retained=True)
    assert isinstance(refused.value, Overloaded) and refused.value.retry_after_s > 0
    assert there(arena) == set(packs)
    assert one_more(arena, 4, num_pages=4, keep_retained=True).num_slab_bytes


def test_pack_no_longer_retained_evicted(arena: Arena) -> None:
    first, second, third = three(arena)
    arena.retention.renew([first, second, third], 60)
    arena.retention.renew([first, third], 60)
    assert left_after(arena, 4, keep_retained=True) == {first, third}


def test_retention_ends_with_its_lease(arena: Arena) -> None:
    packs = three(arena)
    arena.retention.renew(packs, 0)
    assert not arena.retention.ranks
    one_more(arena, 4, keep_retained=True)
    assert packs[0] not in there(arena)


def test_pack_named_before_arrival_is_retained(arena: Arena) -> None:
    coming = reserve(arena, 20, 9).pack_id
    arena.retention.renew([coming], 60)
    assert arena.drop(coming), "the scheduler's own word goes before its guard"
    packs = [reserve(arena, 20, seed).pack_id for seed in (9, 1, 2)]
    assert packs[0] == coming
    assert left_after(arena, 3) == {packs[0], packs[2]}


def test_pinned_packs_are_never_evicted_retained_or_not(arena: Arena) -> None:
    packs = three(arena)
    for pack_id in packs:
        arena.pin(pack_id, "worker")
    arena.retention.renew(packs[:1], 60)
    for keep in (False, True):
        with pytest.raises(ArenaFull, match="are pinned"):
            one_more(arena, 4, keep_retained=keep)
    assert there(arena) == set(packs)
    arena.unpin(packs[0], "worker")
    with pytest.raises(ArenaFull):
        one_more(arena, 4, keep_retained=True)
    assert left_after(arena, 4) == set(packs[1:])


def test_new_process_recovers_complete_and_partial_slabs(path: Path) -> None:
    (data, manifest), (part_data, part_manifest) = pack(9, seed=1), pack(5, seed=2)
    old = Arena.create(path, CAPACITY)
    fill(old.reserve(manifest.encode()), data)
    fill(old.reserve(part_manifest.encode()), part_data, count=2)
    dropped = reserve(old, 3, seed=3)
    old.drop(dropped.pack_id)
    faulted = old.faulted_bytes
    old.close()

    arena = Arena.create(path, CAPACITY)
    whole, part = arena.slabs()
    assert arena.faulted_bytes == faulted
    assert (whole.pack_id, part.pack_id) == (pack_id_of(manifest.encode()), pack_id_of(part_manifest.encode()))
    assert whole.num_verified == 0, "nothing is believed before it was hashed again"
    assert whole.missing() == []
    assert whole.complete
    assert part.missing() == [2, 3]
    assert part.num_verified == 2
    assert bytes(whole.data) == data
    arena.check_integrity()
    arena.close(unlink=True)


def test_order_of_use_survives_restart(path: Path) -> None:
    old = Arena.create(path, CAPACITY)
    slabs = [reserve(old, 32, seed=seed) for seed in (1, 2)]
    old.get(slabs[0].pack_id)
    old.close()
    arena = Arena.create(path, CAPACITY)
    release_recovered(arena)
    reserve(arena, 20, seed=3)
    assert arena.get(slabs[0].pack_id) is not None
    assert arena.get(slabs[1].pack_id) is None
    arena.close(unlink=True)


def test_damage_between_two_processes_is_found_at_first_use(path: Path) -> None:
    data, manifest = pack(9)
    old = Arena.create(path, CAPACITY)
    slab = fill(old.reserve(manifest.encode()), data)
    place = slab.offset + slab.format.data_offset + 3 * PAGE + 17
    old.close()
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([data[3 * PAGE + 17] ^ 1]))
    arena = Arena.create(path, CAPACITY)
    (slab,) = arena.slabs()
    assert slab.wait_any([3], 0.0) == []
    assert slab.recheck() == slab.num_chunks - 1
    assert slab.missing() == [3]
    arena.close(unlink=True)


def test_slab_with_damaged_manifest_dropped(path: Path) -> None:
    old = Arena.create(path, CAPACITY)
    kept, damaged = reserve(old, 5, seed=1), reserve(old, 5, seed=2)
    old.close()
    with path.open("r+b") as file:
        file.seek(damaged.offset + damaged.format.manifest.start + 5)
        file.write(b"!")
    arena = Arena.create(path, CAPACITY)
    assert [slab.pack_id for slab in arena.slabs()] == [kept.pack_id]
    arena.check_integrity()
    arena.close(unlink=True)


def test_single_process_owns_arena(path: Path) -> None:
    arena = Arena.create(path, CAPACITY)
    with pytest.raises(Conflict, match="belongs to another running process"):
        Arena.create(path, CAPACITY)
    arena.close(unlink=True)


@pytest.mark.parametrize("content", [b"not an arena", bytes(CAPACITY), b"TRARENA1" + bytes(CAPACITY - 8)])
def test_file_of_another_kind_replaced(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    before = path.stat().st_ino
    with path.open("rb") as mapped_by_a_worker:
        arena = Arena.create(path, CAPACITY)
        assert path.stat().st_ino != before
        assert mapped_by_a_worker.read() == content
    assert arena.slabs() == []
    arena.close(unlink=True)


def test_arena_with_damaged_table_replaced(path: Path) -> None:
    old = Arena.create(path, CAPACITY)
    reserve(old, 5, seed=1)
    old.close()
    with path.open("r+b") as file:
        file.seek(64)  # the state of the first entry
        file.write(b"\x07")
    arena = Arena.create(path, CAPACITY)
    assert arena.slabs() == []
    arena.check_integrity()
    arena.close(unlink=True)
