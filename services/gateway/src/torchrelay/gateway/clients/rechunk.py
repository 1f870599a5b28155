"""Cuts a request body, which arrives in pieces of any size, into slices for gRPC messages."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import TypeAlias

ByteStream: TypeAlias = AsyncIterable[bytes]

CHUNK_BYTES = 512 << 10  # the store accepts up to 1 MiB; half of that bounds memory per upload


async def rechunk(body: ByteStream, slice_bytes: int = CHUNK_BYTES) -> AsyncIterator[bytes]:
    """The same bytes, copied once, in slices of ``slice_bytes``; the last may be shorter, none is empty."""
    pending: list[memoryview] = []
    num_pending = 0
    async for piece in body:
        view = memoryview(piece)
        while num_pending + len(view) >= slice_bytes:
            num_taken = slice_bytes - num_pending
            pending.append(view[:num_taken])
            yield b"".join(pending)
            view = view[num_taken:]
            pending, num_pending = [], 0
        if view:
            pending.append(view)
            num_pending += len(view)
    if pending:
        yield b"".join(pending)
