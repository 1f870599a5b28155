"""Releases the packs of an earlier process's arena that no other process maps any more."""

from __future__ import annotations

import os
from pathlib import Path

from torchrelay.transfer.arena.arena import RECOVERED, Arena


def release_unmapped(arena: Arena) -> bool:
    """Unpins the recovered packs that no other process maps. True: some are still mapped."""
    # A worker outlives its store and keeps computing on the mapped bytes, so its pack must stay in place until the
    # worker holds it again, unmaps it or ends.
    mapped = mapped_ranges(arena.path)
    any_mapped = False
    for slab in arena.slabs():
        if RECOVERED not in arena.owners(slab.pack_id):
            continue
        end = slab.offset + slab.num_slab_bytes
        if any(begin < end and slab.offset < mapped_end for begin, mapped_end in mapped):
            any_mapped = True
        else:
            arena.unpin(slab.pack_id, RECOVERED)
    return any_mapped


def mapped_ranges(path: Path) -> list[tuple[int, int]]:
    """The byte ranges [begin, end) of a file that other processes map, as far as this process may see."""
    ranges: list[tuple[int, int]] = []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        try:
            lines = (process / "maps").read_text(errors="replace").splitlines()
        except OSError:  # the process has ended, or belongs to another user
            continue
        for line in lines:  # begin-end permissions offset device inode path
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] == str(path):
                begin, _, end = fields[0].partition("-")
                offset = int(fields[2], 16)
                ranges.append((offset, offset + int(end, 16) - int(begin, 16)))
    return ranges
