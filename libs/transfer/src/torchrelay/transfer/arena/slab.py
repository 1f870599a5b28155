"""A pack in the arena, filled and served by the store."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from blake3 import blake3

from torchrelay.transfer.arena.slab_format import SlabFormat, read_format
from torchrelay.transfer.buffers import MAX_READY_CHUNKS
from torchrelay.transfer.errors import ArenaCorrupted, BufferLost
from torchrelay.transfer.manifest import Manifest, checked_manifest


class Pins(Protocol):
    """The arena, which does not evict a pinned slab."""

    def lease(self, slab: Slab, owner: str) -> None: ...

    def unpin(self, pack_id: str, owner: str) -> None: ...


class Slab:
    """A pack's range of the arena: a ``LeasedBuffer`` to serve and a ``Sink`` to fill.

    The verified bytes of a reopened arena are not trusted: each chunk is hashed again at its first use and counts from
    then on (``recheck`` hashes all at once). When the slab is dropped, its waiters get ``BufferLost`` and its views
    must not be used any more; a pin prevents that.
    """

    def __init__(self, pins: Pins, memory: memoryview, offset: int, pack_id: str) -> None:
        self.pack_id = self.buffer_id = pack_id
        self.offset = offset  # in the arena's file
        self.format: SlabFormat = read_format(memory)
        self.head = bytes(memory[self.format.manifest])
        self.manifest: Manifest = checked_manifest(self.head)
        if SlabFormat.of(self.manifest, len(self.head)) != self.format:
            raise ArenaCorrupted(f"the slab of pack {pack_id} does not have its manifest's sizes")
        self.num_chunks, self.num_bytes = self.manifest.num_chunks, self.manifest.num_bytes
        self.num_slab_bytes = self.format.num_slab_bytes
        self._memory = memory
        self.data = memory[self.format.data]
        self._shared = memory[self.format.verified]  # what the workers see
        self._verified = bytearray(self.num_chunks)  # what this process has verified itself
        self.num_verified = 0
        self.num_segments_ready = 0  # leading segments, in execution order, with all chunks verified
        self.error = ""  # why the missing chunks will not arrive; empty while they may
        self._pins = pins
        self._dropped = False
        self._changed = threading.Condition()

    @property
    def complete(self) -> bool:
        return self.num_verified == self.num_chunks

    def chunk(self, index: int) -> memoryview:
        span = self.manifest.chunk_range(index)
        return self.data[span.begin : span.end]

    def digest(self, index: int) -> bytes:
        return self.manifest.chunk_digests[index]

    def is_verified(self, index: int) -> bool:
        """Whether the bytes matched their digest. Hashes a chunk of a reopened arena at the first call."""
        if self._verified[index]:
            return True
        return bool(self._shared[index]) and self._recheck_chunk(index)

    def missing(self) -> list[int]:
        """The unverified chunks, in execution order."""
        return [index for index in range(self.num_chunks) if not self.is_verified(index)]

    def accept(self, index: int) -> None:
        """Records that the chunk's digest has matched: shows the chunk to the workers and wakes waiters.

        Raises ``BufferLost`` when the slab has been dropped: its range may belong to another slab.
        """
        with self._changed:
            if self._dropped:
                raise BufferLost(self.error)
            self._shared[index] = 1
            self._count(index)

    def wait_any(self, indices: Sequence[int], timeout_s: float) -> list[int]:
        """The first of these chunks that are verified; waits while none is. See ``buffers.Buffer``."""
        # A snapshot, so that a chunk accepted during the scan cannot overtake earlier chunks.
        shared = bytes(self._shared)
        verified = (index for index in indices if shared[index] and self.is_verified(index))
        if ready := list(islice(verified, MAX_READY_CHUNKS)):
            return ready
        with self._changed:
            self._changed.wait_for(lambda: self.error or any(self._verified[index] for index in indices), timeout_s)
            ready = list(islice((index for index in indices if self._verified[index]), MAX_READY_CHUNKS))
            if self.error and not ready:
                raise BufferLost(self.error)
            return ready

    def ready_flags(self) -> bytes:
        """Flags of all chunks, one byte each: 1 if this process has verified the chunk."""
        return bytes(self._verified)

    def fail(self, error: Exception | str) -> None:
        """Gives up the missing chunks. Verified chunks stay valid; see ``revive``."""
        with self._changed:
            self.error = self.error or f"pack {self.pack_id} cannot be completed here: {error}"
            self._changed.notify_all()

    def revive(self) -> None:
        """Allows the missing chunks to be filled again after ``fail``."""
        with self._changed:
            if not self._dropped:
                self.error = ""

    def mark_dropped(self) -> None:
        """Records that the arena has reclaimed the range."""
        with self._changed:
            self._dropped = True
            self._verified = bytearray(self.num_chunks)
            self.num_verified = self.num_segments_ready = 0
        self.fail("it was dropped from the arena")

    def acquire(self, owner: str) -> None:
        """Pins the slab for a reader. Raises ``UnknownBuffer`` when it has been dropped."""
        self._pins.lease(self, owner)

    def release(self, owner: str) -> None:
        self._pins.unpin(self.pack_id, owner)

    def recheck(self) -> int:
        """Hashes every chunk that an earlier process left as verified; returns the number of verified chunks."""
        for index in range(self.num_chunks):
            self.is_verified(index)
        return self.num_verified

    def check_integrity(self) -> None:
        """Raises ``ArenaCorrupted`` when this process's counts and what the workers see differ."""
        with self._changed:
            if self._dropped:
                return
            if read_format(self._memory) != self.format:
                raise ArenaCorrupted(f"the header of pack {self.pack_id} has changed")
            shared = bytes(self._shared)
            if shared.count(0) + shared.count(1) != self.num_chunks:
                raise ArenaCorrupted(f"pack {self.pack_id} has verified bytes that are neither 0 nor 1")
            if any(own and not seen for own, seen in zip(self._verified, shared, strict=True)):
                raise ArenaCorrupted(f"pack {self.pack_id} hides verified chunks from the workers")
            if self._verified.count(1) != self.num_verified:
                raise ArenaCorrupted(f"pack {self.pack_id} has a wrong count of verified chunks: {self.num_verified}")

    def _recheck_chunk(self, index: int) -> bool:
        good = blake3(self.chunk(index)).digest() == self.digest(index)
        with self._changed:
            if self._dropped:
                return False
            if good:
                self._count(index)
            elif not self._verified[index]:
                self._shared[index] = 0
        return good

    def _count(self, index: int) -> None:
        if not self._verified[index]:
            self._verified[index] = 1
            self.num_verified += 1
            while self.num_segments_ready < len(self.manifest.segments) and all(
                self._verified[chunk] for chunk in self.manifest.chunks_of(self.num_segments_ready)
            ):
                self.num_segments_ready += 1
        self._changed.notify_all()
