"""The receiving side of a KV transfer: follows a buffer from the worker that computed it into reserved pages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from torchrelay.control.v1 import decode_pb2
from torchrelay.engine.kv.kv_import import PageImport
from torchrelay.transfer.fetch.follow import FollowOptions, Receiver, SourceAddress, TransferControl, follow
from torchrelay.transfer.transport.interface import Transport

Import = TypeVar("Import", bound=PageImport)


class KvReceiver(Generic[Import]):
    """An incoming KV buffer. ``receive`` blocks and runs on its own thread; ``stop`` ends it early."""

    def __init__(
        self,
        offer: decode_pb2.KvOffer,
        kv_import: Import,
        receiver: Receiver,
        transport: Transport,
    ) -> None:
        self.kv_import = kv_import
        self.num_bytes = 0
        self._receiver, self._transport = receiver, transport
        source = offer.source
        self._source = SourceAddress(source.holder_id, source.data_address, source.ticket)
        self._stop = threading.Event()
        self._staged: dict[int, bytearray] = {}

    def stop(self) -> None:
        self._stop.set()

    def receive(self, write: Callable[[Callable[[], None], threading.Event], None], stall_s: float) -> bytes:
        """Follows the buffer, passing each verified chunk to ``write``. Returns the trailer, if there is one. Raises
        transfer errors, and what ``write`` raises.
        """
        source, layout, trailer = self._source, self.kv_import.layout, b""
        for index in follow(
            source.ticket.buffer_id,
            range(layout.num_chunks),
            [source],
            self,
            self._receiver,
            FollowOptions(self._transport, stall_s),
            TransferControl(self._stop),
        ):
            data = self._staged.pop(index)
            self.num_bytes += len(data)
            if index == layout.trailer_index:
                trailer = bytes(data)
            else:
                write(partial(self.kv_import.write, index, memoryview(data)), self._stop)
        return trailer

    # -- transfer.Sink: chunks are staged, because the pages of a sequence are not contiguous

    def chunk(self, index: int) -> memoryview:
        staged = self._staged[index] = bytearray(self.kv_import.layout.chunk_bytes(index))
        return memoryview(staged)

    def digest(self, index: int) -> bytes | None:
        return None  # only the other worker knows the digest; the frame carries it

    def accept(self, index: int) -> None:
        """Does nothing: ``receive`` passes the chunk on."""
