"""The writing of a pack to the disk tier: whole and durable, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.disk_limits import files_end_at
from tests.unit.param_store.model_folders import LARGER, write_folder
from torchrelay.common.ids import new_id
from torchrelay.param_store.disk.cache_writer import write_to_cache
from torchrelay.param_store.disk.disk_cache import DiskCache
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.transfer.arena.arena import Arena
from torchrelay.transfer.arena.slab import Slab


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(Path("/dev/shm") / new_id("torchrelay-test"), 16 << 20)
    yield made
    made.close(unlink=True)


@pytest.fixture
def slab(tmp_path: Path, arena: Arena) -> Slab:
    """A whole pack of 28 chunks."""
    pack(write_folder(tmp_path / "model", LARGER), tmp_path / "a.pack", 0)
    slab = arena.reserve((tmp_path / "a.manifest").read_bytes())
    slab.data[:] = (tmp_path / "a.pack").read_bytes()
    for index in range(slab.num_chunks):
        slab.accept(index)
    return slab


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_cache_writer_stores_pack_and_unpins(tmp_path: Path, arena: Arena, slab: Slab) -> None:
    cache = DiskCache(tmp_path / "packs", 1 << 30)
    assert write_to_cache(cache, slab, threading.Event())
    assert files_in(tmp_path / "packs") == [slab.pack_id, f"{slab.pack_id}.manifest"]
    assert (tmp_path / "packs" / slab.pack_id).read_bytes() == bytes(slab.data)
    assert cache.manifest(slab.pack_id) == slab.head
    assert arena.owners(slab.pack_id) == frozenset()


@pytest.mark.parametrize("limit_bytes", [0, 1 << 20])
def test_pack_beyond_limit_not_cached(tmp_path: Path, slab: Slab, limit_bytes: int) -> None:
    assert not write_to_cache(DiskCache(tmp_path / "packs", limit_bytes), slab, threading.Event())
    assert files_in(tmp_path / "packs") == []


@pytest.mark.parametrize("end_bytes", [1 << 20, 6 << 20])
def test_full_disk_leaves_no_files(tmp_path: Path, arena: Arena, slab: Slab, end_bytes: int) -> None:
    cache = DiskCache(tmp_path / "packs", 1 << 30)
    with files_end_at(end_bytes):
        assert not write_to_cache(cache, slab, threading.Event())
    assert files_in(tmp_path / "packs") == []
    assert arena.owners(slab.pack_id) == frozenset()
    assert write_to_cache(cache, slab, threading.Event())


def test_dropped_pack_not_cached(tmp_path: Path, arena: Arena, slab: Slab) -> None:
    assert arena.drop(slab.pack_id)
    assert not write_to_cache(DiskCache(tmp_path / "packs", 1 << 30), slab, threading.Event())
    assert files_in(tmp_path / "packs") == []


def test_stop_ends_cache_write(tmp_path: Path, slab: Slab) -> None:
    stop = threading.Event()
    stop.set()
    assert not write_to_cache(DiskCache(tmp_path / "packs", 1 << 30), slab, stop)
    assert files_in(tmp_path / "packs") == []


def test_missing_cache_folder_is_no_error(tmp_path: Path, slab: Slab) -> None:
    cache = DiskCache(tmp_path / "packs", 1 << 30)
    cache.drafts.rmdir()
    assert not write_to_cache(cache, slab, threading.Event())
