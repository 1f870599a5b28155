"""Releases the packs of an earlier process's arena that no other process maps any more."""

from __future__ import annotations

from torchrelay.transfer.arena.arena import RECOVERED, Arena


def release_unmapped(arena: Arena) -> bool:
    """Unpins the recovered packs that no other process maps. True: some are still mapped."""
    # A worker outlives its store and keeps computing on the mapped bytes, so its pack must stay in place until the
    # worker holds it again, unmaps it or ends.
    any_mapped = False
    for slab in arena.slabs():
        if RECOVERED not in arena.owners(slab.pack_id):
            continue
        if arena.is_mapped(slab):
            any_mapped = True
        else:
            arena.unpin(slab.pack_id, RECOVERED)
    return any_mapped
