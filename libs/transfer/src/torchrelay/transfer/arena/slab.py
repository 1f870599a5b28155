"""A pack in the arena, as the store fills and serves it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Protocol

from blake3 import blake3

from torchrelay.transfer.arena.slab_format import SlabFormat, read_format
from torchrelay.transfer.buffers import MAX_READY_CHUNKS
from torchrelay.transfer.errors import ArenaCorrupted, BufferLost
from torchrelay.transfer.manifest import Manifest, checked_manifest


class Pins(Protocol):
    """Keeps a slab from being evicted: the arena."""

    def lease(self, slab: Slab, owner: str) -> None: ...

    def unpin(self, pack_id: str, owner: str) -> None: ...


class Slab:
    """One pack's range of the arena: a ``Buffer`` to serve, a ``Sink`` to fill, a lease while it is read.

    Chunks found verified in a reopened arena are not trusted: each is hashed again when it is first asked for, and
    counts from then on (``recheck`` does all at once). When the slab is dropped, its waiters get ``BufferLost`` and its
    views must not be used any more; a pin prevents that.
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
        self.num_segments_ready = 0  # leading segments, in execution order, that have all their chunks verified
        self.error = ""  # why the missing chunks will not arrive; empty while they may
        self._pins = pins
        self._dropped = False
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def complete(self) -> bool:
        return self.num_verified == self.num_chunks

    def chunk(self, index: int) -> memoryview:
        span = self.manifest.chunk_range(index)
        return self.data[span.begin : span.end]

    def digest(self, index: int) -> bytes:
        return self.manifest.chunk_digests[index]

    def is_verified(self, index: int) -> bool:
        """Whether the bytes matched their digest. Hashes the chunk once after the arena was reopened."""
        if self._verified[index]:
            return True
        return bool(self._shared[index]) and self._recheck_chunk(index)

    def missing(self) -> list[int]:
        """The chunks to request, in execution order."""
        return [index for index in range(self.num_chunks) if not self.is_verified(index)]

    def accept(self, index: int) -> None:
        """The chunk's digest has matched: counts it, shows it to the workers, wakes waiters.

        Raises ``BufferLost`` when the slab was dropped meanwhile: its range may belong to another.
        """
        with self._changed:
            if self._dropped:
                raise BufferLost(self.error)
            self._shared[index] = 1
            self._count(index)
        self._notify()

    def wait_any(self, indices: Sequence[int], timeout_s: float) -> list[int]:
        """The first of these chunks that are verified; waits while none is. See ``buffers.Buffer``."""
        # A snapshot: otherwise a chunk accepted during the scan could overtake those before it.
        shared = bytes(self._shared)
        verified = (index for index in indices if shared[index] and self.is_verified(index))
        if found := list(islice(verified, MAX_READY_CHUNKS)):
            return found
        with self._changed:
            self._changed.wait_for(lambda: self.error or any(self._verified[index] for index in indices), timeout_s)
            found = list(islice((index for index in indices if self._verified[index]), MAX_READY_CHUNKS))
            if self.error and not found:
                raise BufferLost(self.error)
            return found

    def ready_flags(self) -> bytes:
        """One byte per chunk: 1 if verified by this process."""
        return bytes(self._verified)

    def fail(self, error: Exception | str) -> None:
        """The missing chunks will not arrive (every source failed). Verified ones stay valid; see ``revive``."""
        with self._changed:
            self.error = self.error or f"pack {self.pack_id} cannot be completed here: {error}"
            self._changed.notify_all()
        self._notify()

    def revive(self) -> None:
        """Starts over after ``fail``."""
        with self._changed:
            if not self._dropped:
                self.error = ""

    def mark_dropped(self) -> None:
        """The arena has reclaimed the range."""
        with self._changed:
            self._dropped = True
            self._verified = bytearray(self.num_chunks)
            self.num_verified = self.num_segments_ready = 0
        self.fail("it was dropped from the arena")

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back after each accepted chunk and failure, in the thread that caused it: be quick.

        Returns a function that removes the callback.
        """
        with self._changed:
            self._callbacks.append(callback)

        def remove() -> None:
            with self._changed, suppress(ValueError):  # removed twice
                self._callbacks.remove(callback)

        return remove

    def acquire(self, owner: str) -> None:
        """Pins the slab for a reader. Raises ``UnknownBuffer`` when it was dropped."""
        self._pins.lease(self, owner)

    def release(self, owner: str) -> None:
        self._pins.unpin(self.pack_id, owner)

    def recheck(self) -> int:
        """Hashes every chunk that a previous process left as verified; returns how many are verified now."""
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
        self._notify()
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

    def _notify(self) -> None:
        for callback in tuple(self._callbacks):
            callback()
