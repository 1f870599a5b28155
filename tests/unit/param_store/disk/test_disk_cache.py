"""The disk tier's folder: which packs leave for a new one, what becomes of drafts, and the writing of a pack."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tests.support.disk_limits import files_end_at
from tests.support.guard import shared_memory_path
from tests.unit.param_store.model_folders import LARGER, write_folder
from torchrelay.common.ids import new_id
from torchrelay.param_store.disk import disk_cache
from torchrelay.param_store.disk.cache_writer import write_to_cache
from torchrelay.param_store.disk.disk_cache import CachedPack, DiskCache, default_limit_bytes, select_evictions
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.transfer.arena.arena import Arena
from torchrelay.transfer.arena.slab import Slab

MANY = 1 << 60


def pack_id(name: str) -> str:
    return blake3(name.encode()).hexdigest()


def faulty(*_: object) -> None:
    raise OSError(errno.EMFILE, "too many open files")


def kept(cache: DiskCache, name: str, data: bytes, used: float) -> str:
    cached = pack_id(name)
    draft, manifest = cache.drafts / "d", cache.drafts / "m"
    draft.write_bytes(data)
    manifest.write_bytes(name.encode())
    os.utime(draft, (used, used))
    cache.publish(cached, draft, manifest)
    return cached


@given(st.lists(st.integers(1, 100), max_size=8), st.integers(1, 120), st.integers(0, 400), st.integers(0, 400))
def test_evictions_oldest_first_and_minimal(
    sizes: list[int], num_bytes: int, limit_bytes: int, free_bytes: int
) -> None:
    packs = [CachedPack(str(number), size, float(number)) for number, size in enumerate(sizes)]
    gone = select_evictions(packs[::-1], num_bytes, limit_bytes, free_bytes, {})

    def fits(leaving_first: int) -> bool:
        freed = sum(sizes[:leaving_first])
        return sum(sizes) - freed + num_bytes <= limit_bytes and num_bytes <= free_bytes + freed

    if gone is None:
        assert not any(fits(count) for count in range(len(sizes) + 1))
    else:
        assert gone == packs[: len(gone)]
        assert fits(len(gone))
        assert not any(fits(count) for count in range(len(gone)))


def test_reopened_cache_evicts_least_recently_used(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "packs", 250)
    first, second = kept(cache, "a", b"a" * 100, used=1000), kept(cache, "b", b"b" * 100, used=2000)
    (cache.drafts / "left").write_bytes(b"half")
    cache = DiskCache(tmp_path / "packs", 250)
    assert list(cache.drafts.iterdir()) == []
    assert {pack.pack_id: pack.num_bytes for pack in cache.packs()} == {first: 100, second: 100}
    reader = cache.open(first)
    assert reader is not None
    memory = memoryview(bytearray(100))
    cache.free_space(100)
    assert (cache.has(first), cache.has(second)) == (True, False)
    cache.discard(first)
    reader.read_into(0, memory, threading.Event())  # whoever reads goes on
    reader.close()
    assert bytes(memory) == b"a" * 100
    assert cache.open(first) is None
    assert [path.name for path in (tmp_path / "packs").iterdir()] == ["drafts"]


def test_ranked_packs_evicted_last_in_order(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "packs", 350)
    first, second, third = (kept(cache, name, b"x" * 100, used=at) for at, name in enumerate("abc"))
    cache.eviction_order.renew([second, first], lease_s=60)
    left = []
    for num_bytes in (100, 200, 300):
        cache.free_space(num_bytes)
        left.append({pack.pack_id for pack in cache.packs()})
    assert left == [{first, second}, {first}, set()]
    assert third not in left[0], "nobody ranked it, though it was used last"


def test_expired_ranks_evict_least_recently_used(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "packs", 250)
    first, second = (kept(cache, name, b"x" * 100, used=at) for at, name in enumerate("ab"))
    cache.eviction_order.renew([second, first], lease_s=0)
    cache.free_space(100)
    assert [pack.pack_id for pack in cache.packs()] == [second]
    assert not cache.has(first)


def test_pack_ids_known_without_disk_access(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "packs", MANY)
    first, second = kept(cache, "a", b"a", used=2000), kept(cache, "b", b"b", used=1000)
    assert cache.pack_ids() == DiskCache(tmp_path / "packs", MANY).pack_ids() == {first, second}
    cache.discard(second)
    assert cache.pack_ids() == {first}
    (tmp_path / "packs" / first).unlink()
    assert cache.pack_ids() == {first}
    assert cache.open(first) is None and cache.pack_ids() == set()


def test_most_recent_packs_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_MAX_REPORTED_PACKS", 2)
    cache = DiskCache(tmp_path / "packs", MANY)
    first, second, third = (kept(cache, name, b"x", used=3000 - at) for at, name in enumerate("abc"))
    assert cache.pack_ids() == {second, third}
    reader = cache.open(first)
    assert reader is not None and cache.pack_ids() == {first, third}
    reader.close()
    assert DiskCache(tmp_path / "packs", MANY).pack_ids() == {first, second}, "by their last use, after a restart"


def test_unreadable_pack_still_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(tmp_path / "packs", MANY)
    cached = kept(cache, "a", b"a", used=1000)
    with monkeypatch.context() as context:
        context.setattr(disk_cache, "FileReader", faulty)
        assert cache.open(cached) is None
    assert cache.pack_ids() == {cached}


def test_pack_ids_do_not_wait_for_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(tmp_path / "packs", MANY)
    cached = kept(cache, "a", b"a", used=1000)
    asked = list[frozenset[str]]()

    def unlink(path: Path, missing_ok: bool) -> None:
        asked.append(cache.pack_ids())

    monkeypatch.setattr(Path, "unlink", unlink)
    cache.discard(cached)
    assert asked == [frozenset()] * 2


def test_cached_manifest_verified(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "packs", MANY)
    cached = kept(cache, "manifest", b"data", used=1000)
    assert cache.manifest(cached) == b"manifest"
    (tmp_path / "packs" / f"{cached}.manifest").write_bytes(b"manifesT")
    assert cache.manifest(cached) is None
    assert cache.manifest(pack_id("other")) is None


def test_pack_that_never_fits_evicts_nothing(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "packs", 250)
    cached = kept(cache, "a", b"a" * 100, used=1000)
    with pytest.raises(OSError, match="the disk cache has no space for 251 bytes"):
        cache.free_space(251)
    assert cache.has(cached)


def test_default_limit_is_half_of_free_space(tmp_path: Path) -> None:
    free_bytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert 0 < default_limit_bytes(tmp_path / "not/made/yet") <= 0.51 * free_bytes


def test_default_limit_holds_the_largest_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger pack would be read from the object store at each cold start."""
    free_bytes = 2 * 10**12
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_bytes))
    limit_bytes = default_limit_bytes(tmp_path)
    assert select_evictions([], 141 * 10**9, limit_bytes, free_bytes, {}) == []


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(shared_memory_path(new_id("arena")), 16 << 20)
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
