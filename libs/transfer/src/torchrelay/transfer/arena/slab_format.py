"""The layout of a slab in the arena, which a mapping of the slab alone describes.

    [header 64 B][verified: one byte per chunk][encoded manifest][padding][the pack's bytes][padding]

The pack's bytes begin and end on pages. A verified byte becomes 1 after its chunk's digest has matched, never before.
Only the store writes; all other processes read.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

from torchrelay.transfer.errors import ArenaCorrupted
from torchrelay.transfer.manifest import PAGE_BYTES, Manifest

_MAGIC = b"TRSLAB01"
_HEADER = struct.Struct("<8sIIQQ")  # magic, chunks, manifest bytes, data offset, data bytes
_HEADER_BYTES = 64
# The granularity of mmap: a page of the pack format, or of this machine if its pages are larger.
ALIGN_BYTES = max(PAGE_BYTES, mmap.ALLOCATIONGRANULARITY)


def page_aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class SlabFormat:
    """The parts of a slab, as offsets from its beginning."""

    num_chunks: int
    manifest_bytes: int
    data_offset: int
    data_bytes: int

    @classmethod
    def of(cls, manifest: Manifest, manifest_bytes: int) -> SlabFormat:
        front = _HEADER_BYTES + manifest.num_chunks + manifest_bytes
        return cls(manifest.num_chunks, manifest_bytes, page_aligned(front), manifest.num_bytes)

    @property
    def num_slab_bytes(self) -> int:
        return self.data_offset + page_aligned(self.data_bytes)

    @property
    def verified(self) -> slice:
        return slice(_HEADER_BYTES, _HEADER_BYTES + self.num_chunks)

    @property
    def manifest(self) -> slice:
        begin = _HEADER_BYTES + self.num_chunks
        return slice(begin, begin + self.manifest_bytes)

    @property
    def data(self) -> slice:
        return slice(self.data_offset, self.data_offset + self.data_bytes)

    def write(self, slab: memoryview, encoded_manifest: bytes) -> None:
        """Formats an empty slab, with nothing verified."""
        slab[self.verified] = bytes(self.num_chunks)
        slab[self.manifest] = encoded_manifest
        packed = _HEADER.pack(_MAGIC, self.num_chunks, self.manifest_bytes, self.data_offset, self.data_bytes)
        slab[: _HEADER.size] = packed


def read_format(slab: memoryview) -> SlabFormat:
    """The format of a slab. Raises ``ArenaCorrupted`` when this is no slab, or its parts do not fit into it."""
    if len(slab) < _HEADER_BYTES:
        raise ArenaCorrupted(f"a slab of {len(slab)} bytes is too small for its header")
    magic, num_chunks, manifest_bytes, data_offset, data_bytes = _HEADER.unpack_from(slab)
    form = SlabFormat(num_chunks, manifest_bytes, data_offset, data_bytes)
    front = page_aligned(_HEADER_BYTES + num_chunks + manifest_bytes)
    if magic != _MAGIC or data_offset != front or form.num_slab_bytes > len(slab):
        raise ArenaCorrupted("the slab's header does not describe a slab of this size")
    return form
