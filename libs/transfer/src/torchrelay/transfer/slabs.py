"""A pack in the arena: ``Slab`` for the store that fills and serves it, ``MappedSlab`` for the workers that compute with it."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from torchrelay.common.errors import NotFound
from torchrelay.transfer.errors import ArenaCorrupted, BufferLost, UnknownBuffer
from torchrelay.transfer.manifest import Manifest, decode_manifest
from torchrelay.transfer.slab_format import ALIGN_BYTES, SlabFormat, checked_manifest, read_format

_MADV_POPULATE_READ = 22  # Linux 5.14; not in the mmap module
_POPULATE_STEP_BYTES = 16 << 20


class Pins(Protocol):
    """Who keeps a slab from being evicted; the arena."""

    def pin(self, pack_id: str, owner: str) -> None: ...

    def unpin(self, pack_id: str, owner: str) -> None: ...


class Slab:
    """One pack's place in the arena: a ``Buffer`` to serve from, a ``Sink`` to fill, a lease while it is read.

    Chunks found verified in a re-opened arena are not believed: each is hashed again when it is first asked about, and counts
    from then on (``recheck`` does all at once). After the slab is dropped its waiters get ``BufferLost``, and its views must not
    be used any more: a pin prevents that.
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
        self.data = memory[self.format.data]
        self._shared = memory[self.format.verified]  # what the workers see
        self._verified = bytearray(self.num_chunks)  # what this process has seen with its own eyes
        self._num_verified = 0
        self._pins = pins
        self._lost: BufferLost | None = None
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
    def complete(self) -> bool:
        return self._num_verified == self.num_chunks

    @property
    def error(self) -> str:
        """Why the missing chunks will not come; empty while they may."""
        return "" if self._lost is None else self._lost.message

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
        """The chunk's digest has matched: counts it, shows it to the workers, wakes whoever waits."""
        with self._changed:
            if self._lost is not None:
                raise self._lost
            self._shared[index] = 1
            self._count(index)
        self._notify()

    def wait(self, index: int, timeout_s: float) -> bool:
        if self.is_verified(index):
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._verified[index] or self._lost is not None, timeout_s)
            if self._verified[index]:
                return True
            if self._lost is not None:
                raise BufferLost(self._lost.message)
            return False

    def fail(self, error: Exception | str) -> None:
        """The missing chunks will not come (its sources are exhausted, or it was dropped); verified ones stay good."""
        with self._changed:
            self._lost = BufferLost(f"pack {self.pack_id} will not be completed here: {error}")
            self._changed.notify_all()
        self._notify()

    def revive(self) -> None:
        """A new filling begins after ``fail``."""
        with self._changed:
            self._lost = None

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back after every accepted chunk and every failure, in the thread that caused it: be quick, do not raise.

        Returns what ends it.
        """
        with self._changed:
            self._callbacks.append(callback)

        def remove() -> None:
            with self._changed, suppress(ValueError):
                self._callbacks.remove(callback)

        return remove

    def acquire(self, owner: str) -> None:
        """Pins the slab for a reader. Raises ``UnknownBuffer`` when it was dropped."""
        if self._lost is not None and self._lost is self._dropped:
            raise UnknownBuffer(f"pack {self.pack_id} is no longer in the arena")
        self._pins.pin(self.pack_id, owner)

    def release(self, owner: str) -> None:
        self._pins.unpin(self.pack_id, owner)

    def recheck(self) -> int:
        """Hashes every chunk that a previous process left as verified; returns how many chunks are now."""
        for index in range(self.num_chunks):
            self.is_verified(index)
        return self._num_verified
