"""The sending side of a KV transfer: KV that is published chunk by chunk, and its offer to another worker."""

from __future__ import annotations

import asyncio
from typing import Any

from torchrelay.control.v1 import decode_pb2, types_pb2
from torchrelay.engine.core import KvBlock, NewToken
from torchrelay.engine.kv.layout import KvLayout
from torchrelay.transfer.buffers import MemoryBuffer
from torchrelay.worker.attempts.attempt import Attempt
from torchrelay.worker.role import RoleContext


class KvSendBuffer(MemoryBuffer):
    """A KV buffer that the other worker has received once the stream that sent the last chunk has ended.

    With ``serves_one_stream`` the end of its first stream counts as received, wherever it stops.
    """

    def __init__(
        self, buffer_id: str, layout: KvLayout, received: asyncio.Event, *, serves_one_stream: bool = False
    ) -> None:
        super().__init__(buffer_id, layout.chunk_sizes)
        self.received = received
        self._is_last_stream = serves_one_stream
        self._loop = asyncio.get_running_loop()

    def digest(self, index: int) -> bytes:
        self._is_last_stream |= index == self.num_chunks - 1  # each stream sends the digest with the chunk
        return super().digest(index)

    def acquire(self, owner: str) -> None:
        """Does nothing when a stream starts to read; part of transfer.LeasedBuffer."""

    def release(self, owner: str) -> None:
        """Sets ``received`` when the stream that sent the last chunk ends; part of transfer.LeasedBuffer."""
        if self._is_last_stream:
            self._loop.call_soon_threadsafe(self.received.set)


class KvSender:
    """Publishes an attempt's KV blocks, from the engine's thread, and its first tokens, from the event loop."""

    def __init__(self, attempt: Attempt, layout: KvLayout) -> None:
        self.attempt, self.layout = attempt, layout
        self.complete = asyncio.Event()  # the trailer is published, or nothing more will be
        self.received = asyncio.Event()  # the decode worker has everything, or needs nothing more
        self._buffer: KvSendBuffer | None = KvSendBuffer(attempt.group_id, layout, self.received)  # None: abandoned
        self._first_tokens: list[NewToken] = []

    @property
    def buffer(self) -> KvSendBuffer:
        assert self._buffer is not None, "the attempt was abandoned"
        return self._buffer

    def publish(self, block: KvBlock) -> None:
        """(engine's thread) Publishes a finished block of one layer. Ignores the blocks of an abandoned attempt, whose
        prompt may be kept for another worker.
        """
        if (buffer := self._buffer) is not None:
            buffer.publish(block.index, block.data)

    def add_first_token(self, token: NewToken) -> None:
        """Publishes the trailer once every choice has its first token."""
        self._first_tokens.append(token)
        if len(self._first_tokens) == len(self.attempt.start.choices):
            self.buffer.publish(self.layout.trailer_index, self.layout.pack_trailer(self._first_tokens))
            self.complete.set()

    def abandon(self) -> None:
        """Fails the buffer of an attempt that has ended, unless its follower has received everything, and frees it."""
        if not self.received.is_set():
            self.buffer.fail("the attempt ended")
        self._buffer = None
        self.complete.set()
        self.received.set()


def kv_offer(
    worker: RoleContext, layout: KvLayout, ticket: types_pb2.Ticket, pack_id: str, **fields: Any
) -> decode_pb2.KvOffer:
    """The offer of a buffer of this worker to the receiver of the ticket."""
    settings = worker.settings
    return decode_pb2.KvOffer(
        pack_id=pack_id,
        sequences=[
            decode_pb2.KvSequence(choices=sequence.choices, num_context_tokens=sequence.num_context_tokens)
            for sequence in layout.sequences
        ],
        source=types_pb2.Source(holder_id=settings.worker_id, data_address=worker.data_address, ticket=ticket),
        block_tokens=layout.block_tokens,
        **fields,
    )
