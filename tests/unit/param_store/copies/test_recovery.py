"""Packs of a crashed store stay in place while a process maps them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.guard import shared_memory_path
from tests.support.wait import HANG_S
from tests.unit.param_store.model_folders import write_folder
from torchrelay.common.ids import new_id
from torchrelay.param_store.copies.recovery import release_unmapped
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.transfer.arena.arena import RECOVERED, Arena
from torchrelay.transfer.arena.slab import Slab
from torchrelay.transfer.arena.slab_table import TABLE_BYTES

ARENA_BYTES = 8 << 20
# A process with a process id namespace and /proc of its own, as in a container.
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
MAPPER = """
import sys
from torchrelay.transfer.arena.mapped_slab import MappedSlab
slab = MappedSlab(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
print("mapped", flush=True)
sys.stdin.read()
"""
STORE = """
import sys
from pathlib import Path
from torchrelay.param_store.copies.recovery import release_unmapped
from torchrelay.transfer.arena.arena import Arena
arena = Arena.create(sys.argv[1], int(sys.argv[2]))
release_unmapped(arena)
for path in sys.argv[3:]:
    slab = arena.reserve(Path(path).read_bytes())
    print(slab.pack_id, slab.offset)
"""


@pytest.fixture
def path() -> Iterator[Path]:
    path = shared_memory_path(new_id("arena"))
    yield path
    path.unlink(missing_ok=True)


@contextmanager
def mapping(path: Path, slab: Slab, container: Sequence[str] = ()) -> Iterator[None]:
    """A worker that maps one slab."""
    program = [*container, sys.executable, "-c", MAPPER, str(path), str(slab.offset), str(slab.num_slab_bytes)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"mapped\n"
            yield
        finally:
            worker.kill()


def manifests(folder: Path, num_packs: int) -> list[Path]:
    """Manifests of packs of one size."""
    paths = []
    for seed in range(num_packs):
        pack(write_folder(folder / "model", seed=seed), folder / f"{seed}.pack", 0)
        paths.append(folder / f"{seed}.manifest")
    return paths


def test_recovered_packs_pinned_while_mapped(tmp_path: Path, path: Path) -> None:
    arena = Arena.create(path, ARENA_BYTES)
    try:
        for manifest in manifests(tmp_path, 2):
            arena.reserve(manifest.read_bytes())
        arena.close()
        arena = Arena.create(path, ARENA_BYTES)
        first, second = arena.slabs()
        assert not arena.is_mapped(first)
        with mapping(path, first):
            assert arena.is_mapped(first) and not arena.is_mapped(second)
            assert release_unmapped(arena) is True
            assert arena.owners(first.pack_id) == {RECOVERED}
            assert arena.owners(second.pack_id) == frozenset()
            assert arena.drop(first.pack_id) is False
        assert release_unmapped(arena) is False
        assert arena.drop(first.pack_id) is True
    finally:
        arena.close(unlink=True)


@pytest.mark.lab
def test_store_in_a_container_reuses_no_byte_that_a_worker_in_another_maps(tmp_path: Path, path: Path) -> None:
    first, *others = manifests(tmp_path, 4)
    arena_bytes = TABLE_BYTES + 700_000  # room for two packs
    arena = Arena.create(path, arena_bytes)
    slab = arena.reserve(first.read_bytes())
    assert (arena_bytes - slab.offset) // slab.num_slab_bytes == 2
    arena.close()
    store = [*CONTAINER, sys.executable, "-c", STORE, str(path), str(arena_bytes), *map(str, others)]
    with mapping(path, slab, CONTAINER):
        ran = subprocess.run(store, capture_output=True, text=True, timeout=HANG_S, check=True)
        offsets = [int(line.split()[1]) for line in ran.stdout.splitlines()]
        assert len(offsets) == len(others) and slab.offset not in offsets
    ran = subprocess.run(store, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert str(slab.offset) in ran.stdout.split(), "once nothing maps it, its range is used again"
