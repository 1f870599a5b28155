"""Damage to bytes at rest in a host's arena, and what finds it."""

from __future__ import annotations

import mmap

from blake3 import blake3

from torchrelay.control.v1.param_store_pb2 import HoldReply
from torchrelay.transfer.arena.mapped_slab import MappedSlab
from torchrelay.transfer.arena.slab_format import read_format
from torchrelay.transfer.manifest import decode_manifest


def corrupt_chunk(place: HoldReply, index: int) -> None:
    """Damages one bit of a chunk where it lies in the arena, or mends it again."""
    with (
        open(place.arena_path, "r+b") as file,
        mmap.mmap(file.fileno(), place.slab_bytes, offset=place.slab_offset) as memory,
    ):
        with memoryview(memory) as slab:
            form = read_format(slab)
            chunk = decode_manifest(bytes(slab[form.manifest])).chunk_range(index)
        memory[form.data_offset + chunk.begin + 1003] ^= 1


def corrupt_chunks(place: HoldReply) -> list[int]:
    """The chunks in the arena that do not match their digests."""
    slab = MappedSlab(place.arena_path, place.slab_offset, place.slab_bytes)
    manifest = slab.manifest
    spans = [manifest.chunk_range(index) for index in range(manifest.num_chunks)]
    digests = [blake3(slab.data[span.begin : span.end]).digest() for span in spans]
    slab.close()
    return [index for index, digest in enumerate(digests) if digest != manifest.chunk_digests[index]]
