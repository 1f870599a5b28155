"""Packs outlive the process that owned the arena, which another process may then own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.transfer.arena.arena_packs import CAPACITY, PAGE, fill, pack, release_recovered, reserve
from torchrelay.common.errors import Conflict
from torchrelay.transfer.arena.arena import RECOVERED, Arena
from torchrelay.transfer.errors import ArenaFull
from torchrelay.transfer.manifest import pack_id_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena"


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


def test_recovered_slabs_not_evicted_until_released(path: Path) -> None:
    old = Arena.create(path, CAPACITY)
    slab = reserve(old, 40, seed=1)
    old.close()
    arena = Arena.create(path, CAPACITY)
    assert arena.owners(slab.pack_id) == {RECOVERED}
    with pytest.raises(ArenaFull):
        reserve(arena, 40, seed=2)
    arena.pin(slab.pack_id, "worker-1")
    release_recovered(arena)
    assert arena.owners(slab.pack_id) == {"worker-1"}
    arena.unpin(slab.pack_id, "worker-1")
    reserve(arena, 40, seed=2)
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


def test_arena_with_damaged_table_replaced(tmp_path: Path) -> None:
    path = tmp_path / "arena"
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
