"""Re-cuts a request body, which arrives in whatever pieces the socket gave, into slices for gRPC messages."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import TypeAlias

ByteStream: TypeAlias = AsyncIterable[bytes]

CHUNK_BYTES = 512 << 10  # the store takes at most 1 MiB; half of it keeps an upload's memory in the gateway small


async def rechunk(body: ByteStream, slice_bytes: int = CHUNK_BYTES) -> AsyncIterator[bytes]:
    """The same bytes in slices of exactly ``slice_bytes``, the last one shorter, none empty."""
    pending: list[bytes] = []
    num_pending = 0
    async for piece in body:
        view = memoryview(piece)
        while num_pending + len(view) >= slice_bytes:
            num_taken = slice_bytes - num_pending
            pending.append(bytes(view[:num_taken]))
            yield b"".join(pending)
            view = view[num_taken:]
            pending, num_pending = [], 0
        if view:
            pending.append(bytes(view))
            num_pending += len(view)
    if pending:
        yield b"".join(pending)
