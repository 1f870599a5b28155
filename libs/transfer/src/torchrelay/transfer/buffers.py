"""The two ends of every transfer, ``Buffer`` and ``Sink``, as interfaces, and a buffer in plain memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Protocol, runtime_checkable

from blake3 import blake3

from torchrelay.transfer.errors import BufferLost

MAX_READY_CHUNKS = 16  # per call; a sender asks again after each batch

__all__ = ["MAX_READY_CHUNKS", "Buffer", "BufferLost", "LeasedBuffer", "MemoryBuffer", "Sink"]


class Buffer(Protocol):
    """A sequence of chunks that a holder serves, possibly while they are still arriving. Thread-safe."""

    buffer_id: str
    num_chunks: int
    num_bytes: int
    head: bytes  # sent first on every stream: the encoded manifest of a pack, b"" for KV

    def chunk(self, index: int) -> memoryview:
        """The chunk; its length is valid from the start, its bytes once it is ready."""

    def digest(self, index: int) -> bytes:
        """BLAKE3 of a ready chunk, 32 bytes."""

    def wait_any(self, indices: Sequence[int], timeout_s: float) -> list[int]:
        """The first ``MAX_READY_CHUNKS`` of these chunks that are ready; waits while none is.

        Raises ``BufferLost`` when none of them will ever be ready.
        """

    def ready_flags(self) -> bytes:
        """Flags of all chunks, one byte each: 1 if the chunk is known to be ready. Does not block."""


@runtime_checkable
class LeasedBuffer(Protocol):
    """A buffer that must not be evicted during reads; a holder takes a lease for each stream."""

    def acquire(self, owner: str) -> None:
        """Raises ``UnknownBuffer`` when the buffer has been evicted."""

    def release(self, owner: str) -> None: ...


class Sink(Protocol):
    """The memory into which a follower receives chunks."""

    def chunk(self, index: int) -> memoryview:
        """A writable view, exactly as long as the chunk, to receive into; undefined before ``accept``."""

    def digest(self, index: int) -> bytes | None:
        """The digest that the chunk must have; None: trust the digest in its frame."""

    def accept(self, index: int) -> None:
        """Marks a chunk as complete and verified. Called once per chunk by the thread that received it, so with several
        sources by several threads.
        """


class MemoryBuffer:
    """Chunks in this process's memory, published one by one: KV pages, activations.

    Write into ``chunk(i)`` and call ``publish(i)``, or pass the bytes to ``publish(i, data)``, which copies them. The
    memory is freed with its last view.
    """

    head = b""

    def __init__(self, buffer_id: str, chunk_sizes: Sequence[int]) -> None:
        self.buffer_id = buffer_id
        self._ends = list(accumulate(chunk_sizes, initial=0))
        self.num_chunks, self.num_bytes = len(chunk_sizes), self._ends[-1]
        self._memory = memoryview(bytearray(self.num_bytes))
        self._digests: list[bytes | None] = [None] * self.num_chunks
        self._published = bytearray(self.num_chunks)
        self._error: BufferLost | None = None
        self._changed = threading.Condition()

    def chunk(self, index: int) -> memoryview:
        return self._memory[self._ends[index] : self._ends[index + 1]]

    def publish(self, index: int, data: bytes | bytearray | memoryview | None = None) -> None:
        """Makes a chunk ready; its bytes must not change afterwards. ``data``, of the chunk's length, is copied in."""
        if data is not None:
            self.chunk(index)[:] = memoryview(data).cast("B")
        with self._changed:
            self._published[index] = 1
            self._changed.notify_all()

    def digest(self, index: int) -> bytes:
        # Hashed by the first stream that sends the chunk, not by the thread that computed it.
        digest = self._digests[index]
        if digest is None:
            assert self._published[index], "only a ready chunk has a digest"
            digest = self._digests[index] = blake3(self.chunk(index)).digest()
        return digest

    def wait_any(self, indices: Sequence[int], timeout_s: float) -> list[int]:
        def ready_chunks() -> list[int]:
            # A snapshot, so that a chunk published during the scan cannot overtake earlier chunks.
            published = self.ready_flags()
            return list(islice((index for index in indices if published[index]), MAX_READY_CHUNKS))

        if ready := ready_chunks():
            return ready
        with self._changed:
            self._changed.wait_for(lambda: ready_chunks() or self._error is not None, timeout_s)
            if not (ready := ready_chunks()) and self._error is not None:
                raise BufferLost(self._error.message)
            return ready

    def ready_flags(self) -> bytes:
        return bytes(self._published)

    def fail(self, error: Exception | str) -> None:
        """Gives up the unpublished chunks: waiting for them raises ``BufferLost``."""
        with self._changed:
            self._error = BufferLost(f"buffer {self.buffer_id} was given up: {error}")
            self._changed.notify_all()
