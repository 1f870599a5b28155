"""The prefill side of a KV transfer: an attempt's KV, published chunk by chunk as layers finish."""

from __future__ import annotations

import asyncio

from torchrelay.control.v1 import decode_pb2, types_pb2
from torchrelay.engine.core import KvBlock, NewToken
from torchrelay.engine.kv.layout import KvLayout
from torchrelay.transfer.buffers import MemoryBuffer
from torchrelay.worker.attempts.attempt import Attempt


class KvSendBuffer(MemoryBuffer):
    """A KV buffer that the decode worker has received once the stream that sent the trailer has ended."""

    def __init__(self, buffer_id: str, layout: KvLayout, received: asyncio.Event) -> None:
        super().__init__(buffer_id, layout.chunk_sizes)
        self.received = received
        self._trailer = layout.trailer_index
        self._trailer_sent = False
        self._loop = asyncio.get_running_loop()

    def chunk(self, index: int) -> memoryview:
        self._trailer_sent |= index == self._trailer
        return super().chunk(index)

    def acquire(self, owner: str) -> None:
        """Does nothing when a stream starts to read; part of transfer.LeasedBuffer."""

    def release(self, owner: str) -> None:
        """Sets ``received`` when the stream that sent the trailer ends; part of transfer.LeasedBuffer."""
        if self._trailer_sent:
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

    def offer(
        self, pack_id: str, holder_id: str, data_address: str, host_id: str = "", local_address: str = ""
    ) -> decode_pb2.KvOffer:
        """The offer of the KV; ``local_address`` is for receivers on ``host_id``."""
        start = self.attempt.start
        return decode_pb2.KvOffer(
            key=start.key,
            instance_id=start.decode.instance_id,
            pack_id=pack_id,
            sequences=[
                decode_pb2.KvSequence(choices=sequence.choices, num_context_tokens=sequence.num_context_tokens)
                for sequence in self.layout.sequences
            ],
            source=types_pb2.Source(holder_id=holder_id, data_address=data_address, ticket=start.kv_ticket),
            block_tokens=self.layout.block_tokens,
            host_id=host_id,
            local_address=local_address,
        )
