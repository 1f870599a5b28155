"""Packs of a crashed store stay in place while a process maps them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.unit.param_store.model_folders import write_folder
from torchrelay.common.ids import new_id
from torchrelay.param_store.copies.recovery import mapped_ranges, release_unmapped
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.transfer.arena.arena import RECOVERED, Arena
from torchrelay.transfer.arena.slab import Slab

MAPPER = """
import sys
from torchrelay.transfer.arena.mapped_slab import MappedSlab
slab = MappedSlab(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
print("mapped", flush=True)
sys.stdin.read()
"""


@contextmanager
def mapping(arena: Arena, slab: Slab) -> Iterator[None]:
    """A worker that maps one slab."""
    command = [sys.executable, "-c", MAPPER, str(arena.path), str(slab.offset), str(slab.num_slab_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"mapped\n"
            yield
        finally:
            worker.kill()


def test_recovered_packs_pinned_while_mapped(tmp_path: Path) -> None:
    path = Path("/dev/shm") / new_id("torchrelay-test")
    manifests = []
    for seed in range(2):
        pack(write_folder(tmp_path / "model", seed=seed), tmp_path / "a.pack", 0)
        manifests.append((tmp_path / "a.manifest").read_bytes())
    arena = Arena.create(path, 8 << 20)
    try:
        for manifest in manifests:
            arena.reserve(manifest)
        arena.close()
        arena = Arena.create(path, 8 << 20)
        first, second = arena.slabs()
        assert mapped_ranges(path) == []
        with mapping(arena, first):
            assert mapped_ranges(path) == [(first.offset, first.offset + first.num_slab_bytes)]
            assert release_unmapped(arena) is True
            assert arena.owners(first.pack_id) == {RECOVERED}
            assert arena.owners(second.pack_id) == frozenset()
            assert arena.drop(first.pack_id) is False
        assert release_unmapped(arena) is False
        assert arena.drop(first.pack_id) is True
    finally:
        arena.close(unlink=True)
