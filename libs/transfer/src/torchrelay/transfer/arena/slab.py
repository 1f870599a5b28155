"""A pack in the arena: ``Slab`` for the store that fills and serves it, ``MappedSlab`` for the workers that use it."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from torchrelay.common.errors import NotFound
from torchrelay.transfer.arena.slab_format import ALIGN_BYTES, SlabFormat, checked_manifest, read_format
from torchrelay.transfer.buffers import MAX_READY_CHUNKS
from torchrelay.transfer.errors import ArenaCorrupted, BufferLost
from torchrelay.transfer.manifest import Manifest, decode_manifest


class Pins(Protocol):
    """Who keeps a slab from being evicted; the arena."""

    def lease(self, slab: Slab, owner: str) -> None: ...

    def unpin(self, pack_id: str, owner: str) -> None: ...


class Slab:
    """One pack's place in the arena: a ``Buffer`` to serve from, a ``Sink`` to fill, a lease while it is read.

    Chunks found verified in a re-opened arena are not believed: each is hashed again when it is first asked about,
    and counts from then on (``recheck`` does all at once). After the slab is dropped its waiters get ``BufferLost``,
    and its views must not be used any more: a pin prevents that.
    """

    def __init__(self, pins: Pins, memory: memoryview, offset: int, pack_id: str) -> None:
        self.pack_id = self.buffer_id = pack_id
        self.offset = offset  # in the arena's file
        self.format: SlabFormat = read_format(memory)
        self.head = bytes(memory[self.format.manifest])
        self.manifest: Manifest = checked_manifest(self.head)
        if SlabFormat.of(self.manifest, len(self.head)) != self.format:
            raise ArenaCorrupted(f"the slab of pack {pack_id} has sizes other than its manifest's")
        self.num_slab_bytes = self.format.num_slab_bytes
        self._memory = memory
        self.data = memory[self.format.data]
        self._shared = memory[self.format.verified]  # what the workers see
        self._verified = bytearray(self.num_chunks)  # what this process has seen with its own eyes
        self._num_verified = 0
        self._num_segments_ready = 0
        self._pins = pins
        self._error = ""
        self._dropped = False
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def num_chunks(self) -> int:
        return self.manifest.num_chunks

    @property
    def num_bytes(self) -> int:
        return self.manifest.num_bytes

    @property
    def num_verified(self) -> int:
        return self._num_verified

    @property
    def num_segments_ready(self) -> int:
        """So many of the first segments, in execution order, have all their chunks verified."""
        return self._num_segments_ready

    @property
    def complete(self) -> bool:
        return self._num_verified == self.num_chunks

    @property
    def error(self) -> str:
        """Why the missing chunks will not come; empty while they may."""
        return self._error

    def chunk(self, index: int) -> memoryview:
        span = self.manifest.chunk_range(index)
        return self.data[span.begin : span.end]

    def digest(self, index: int) -> bytes:
        return self.manifest.chunk_digests[index]

    def is_verified(self, index: int) -> bool:
        """True: the bytes matched their digest. Takes a chunk's hashing time once after an arena was re-opened."""
        if self._verified[index]:
            return True
        return bool(self._shared[index]) and self._recheck_chunk(index)

    def missing(self) -> list[int]:
        """The chunks to ask for, in execution order."""
        return [index for index in range(self.num_chunks) if not self.is_verified(index)]

    def accept(self, index: int) -> None:
        """The chunk's digest has matched: counts it, shows it to the workers, wakes whoever waits.

        Raises ``BufferLost`` when the slab was dropped meanwhile: its place may be another's.
        """
        with self._changed:
            if self._dropped:
                raise BufferLost(self._error)
            self._shared[index] = 1
            self._count(index)
        self._notify()

    def wait(self, index: int, timeout_s: float) -> bool:
        if self.is_verified(index):
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._verified[index] or self._error, timeout_s)
            if self._error and not self._verified[index]:
                raise BufferLost(self._error)
            return bool(self._verified[index])

    def wait_any(self, indices: Sequence[int], timeout_s: float) -> list[int]:
        """The first few of these that are verified; waits while there is none. See ``buffers.Buffer``."""
        shared = bytes(self._shared)  # at one moment: else a chunk that comes while we look overtakes those before it
        here = (index for index in indices if shared[index] and self.is_verified(index))
        if found := list(islice(here, MAX_READY_CHUNKS)):
            return found
        with self._changed:
            self._changed.wait_for(lambda: self._error or any(self._verified[index] for index in indices), timeout_s)
            found = list(islice((index for index in indices if self._verified[index]), MAX_READY_CHUNKS))
            if self._error and not found:
                raise BufferLost(self._error)
            return found

    def ready_flags(self) -> bytes:
        """One byte for each chunk, 1: verified by this process."""
        return bytes(self._verified)

    def fail(self, error: Exception | str) -> None:
        """The missing chunks will not come (every source has failed). Verified ones stay good; see ``revive``."""
        with self._changed:
            self._error = self._error or f"pack {self.pack_id} will not be completed here: {error}"
            self._changed.notify_all()
        self._notify()

    def revive(self) -> None:
        """A new filling begins after ``fail``."""
        with self._changed:
            if not self._dropped:
                self._error = ""

    def mark_dropped(self) -> None:
        """The arena has taken the place back."""
        with self._changed:
            self._dropped = True
            self._verified = bytearray(self.num_chunks)
            self._num_verified = self._num_segments_ready = 0
        self.fail("it was dropped from the arena")

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back, without arguments, after each accepted chunk and failure, in the thread that caused it: be quick.

        Returns what ends it.
        """
        with self._changed:
            self._callbacks.append(callback)

        def remove() -> None:
            with self._changed, suppress(ValueError):  # ended twice
                self._callbacks.remove(callback)

        return remove

    def acquire(self, owner: str) -> None:
        """Pins the slab for a reader. Raises ``UnknownBuffer`` when it was dropped."""
        self._pins.lease(self, owner)

    def release(self, owner: str) -> None:
        self._pins.unpin(self.pack_id, owner)

    def recheck(self) -> int:
        """Hashes every chunk that a previous process left as verified; returns how many chunks are now."""
        for index in range(self.num_chunks):
            self.is_verified(index)
        return self._num_verified

    def check_integrity(self) -> None:
        """Raises ``ArenaCorrupted`` when what this process counts and what the workers see differ."""
        with self._changed:
            if self._dropped:
                return
            if read_format(self._memory) != self.format:
                raise ArenaCorrupted(f"the header of pack {self.pack_id} has changed")
            shared = bytes(self._shared)
            if shared.count(0) + shared.count(1) != self.num_chunks:
                raise ArenaCorrupted(f"pack {self.pack_id} has verified marks that are neither 0 nor 1")
            if any(mine and not seen for mine, seen in zip(self._verified, shared, strict=True)):
                raise ArenaCorrupted(f"pack {self.pack_id} hides chunks that were verified")
            if self._verified.count(1) != self._num_verified:
                raise ArenaCorrupted(f"pack {self.pack_id} counts {self._num_verified} verified chunks wrongly")

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
            self._num_verified += 1
            while self._num_segments_ready < len(self.manifest.segments) and all(
                self._verified[chunk] for chunk in self.manifest.chunks_of(self._num_segments_ready)
            ):
                self._num_segments_ready += 1
        self._changed.notify_all()

    def _notify(self) -> None:
        for callback in tuple(self._callbacks):
            callback()


class MappedSlab:
    """A worker's read-only view of one slab; valid for as long as it is mapped, whatever becomes of the store.

    Raises ``NotFound`` when there is no such arena, ``ArenaCorrupted`` when no slab lies there.
    """

    def __init__(self, arena_path: str | Path, slab_offset: int, slab_bytes: int) -> None:
        self._mapping = _map_read_only(Path(arena_path), slab_offset, slab_bytes)
        whole = memoryview(self._mapping)
        self._format = read_format(whole)
        self._verified = whole[self._format.verified]
        self._encoded = bytes(whole[self._format.manifest])
        self.data = whole[self._format.data]  # read-only; begins on a page

    @cached_property
    def manifest(self) -> Manifest:
        return decode_manifest(self._encoded)

    @property
    def num_chunks(self) -> int:
        return self._format.num_chunks

    @property
    def num_verified(self) -> int:
        return bytes(self._verified).count(1)

    @property
    def complete(self) -> bool:
        return self.num_verified == self.num_chunks

    def is_verified(self, index: int) -> bool:
        return self._verified[index] == 1

    def close(self) -> None:
        """Gives the mapping back. While tensors still look into it, it stays until the last of them is collected."""
        with suppress(BufferError):
            self.data.release()
        with suppress(BufferError):
            self._verified.release()
        with suppress(BufferError):
            self._mapping.close()


def _map_read_only(path: Path, offset: int, num_bytes: int) -> mmap.mmap:
    if offset < 0 or offset % ALIGN_BYTES or num_bytes <= 0:
        raise ArenaCorrupted(f"a slab cannot lie at {offset} with {num_bytes} bytes")
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"there is no arena at {path}", field="arena_path") from error
    try:
        if offset + num_bytes > os.fstat(file).st_size:
            raise ArenaCorrupted(f"a slab at {offset} with {num_bytes} bytes is beyond the arena's end")
        return mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset)
    finally:
        os.close(file)
