"""A worker's read-only mapping of one slab."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from torchrelay.common.errors import NotFound
from torchrelay.common.host.file_locks import share_range
from torchrelay.transfer.arena.slab_format import ALIGN_BYTES, read_format
from torchrelay.transfer.errors import ArenaCorrupted
from torchrelay.transfer.manifest import Manifest, decode_manifest


class MappedSlab:
    """A slab that stays valid while it is mapped, whatever happens to the store.

    The mapping holds a shared lock on its range of the file, by which a restarted store knows that the slab is in use.
    Raises ``NotFound`` when there is no such arena, ``ArenaCorrupted`` when there is no slab at this offset.
    """

    def __init__(self, arena_path: str | Path, slab_offset: int, slab_bytes: int) -> None:
        self.arena_path, self.offset, self.num_bytes = str(arena_path), slab_offset, slab_bytes
        self._mapping = _map_read_only(Path(arena_path), slab_offset, slab_bytes)
        whole = memoryview(self._mapping)
        form = read_format(whole)
        self.num_chunks = form.num_chunks
        self._verified = whole[form.verified]
        self._encoded = bytes(whole[form.manifest])
        self.data = whole[form.data]  # read-only; page aligned

    @cached_property
    def manifest(self) -> Manifest:
        return decode_manifest(self._encoded)

    @property
    def num_verified(self) -> int:
        return bytes(self._verified).count(1)

    @property
    def complete(self) -> bool:
        return self.num_verified == self.num_chunks

    def is_verified(self, index: int) -> bool:
        return self._verified[index] == 1

    def close(self) -> None:
        """Unmaps the slab. While tensors still refer to it, the mapping stays until the last of them is collected."""
        for end in (self.data.release, self._verified.release, self._mapping.close):
            with suppress(BufferError):
                end()


def _map_read_only(path: Path, offset: int, num_bytes: int) -> mmap.mmap:
    if offset < 0 or offset % ALIGN_BYTES or num_bytes <= 0:
        raise ArenaCorrupted(f"a slab cannot be at offset {offset} with {num_bytes} bytes")
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"there is no arena at {path}", field="arena_path") from error
    try:
        if offset + num_bytes > os.fstat(file).st_size:
            raise ArenaCorrupted(f"a slab at offset {offset} with {num_bytes} bytes is beyond the arena's end")
        share_range(file, offset, num_bytes)  # until the mapping, which keeps this open file, is collected
        return mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset)
    finally:
        os.close(file)
