"""Small packs for the tests of the arena, in whole pages."""

from __future__ import annotations

from tests.unit.transfer.loopback_holders import make_pack
from torchrelay.transfer.arena.arena import RECOVERED, Arena
from torchrelay.transfer.arena.slab import Slab
from torchrelay.transfer.arena.slab_table import TABLE_BYTES
from torchrelay.transfer.manifest import Manifest

PAGE = 4096
CAPACITY = TABLE_BYTES + 64 * PAGE


def pack(num_pages: int, seed: int = 0) -> tuple[bytes, Manifest]:
    """A pack that takes ``num_pages`` in the arena, one of them for the slab's header and manifest."""
    return make_pack((num_pages - 1) * PAGE, seed=seed)


def fill(slab: Slab, data: bytes, count: int | None = None) -> Slab:
    for index in range(slab.num_chunks if count is None else count):
        span = slab.manifest.chunk_range(index)
        slab.chunk(index)[:] = data[span.begin : span.end]
        slab.accept(index)
    return slab


def reserve(arena: Arena, num_pages: int, seed: int, owner: str | None = None) -> Slab:
    return arena.reserve(pack(num_pages, seed)[1].encode(), owner)


def release_recovered(arena: Arena) -> None:
    """Releases what an earlier process left, as if nobody mapped it."""
    for slab in arena.slabs():
        arena.unpin(slab.pack_id, RECOVERED)
