"""The follower's end of a stream: handshake, requests, and received chunks."""

from __future__ import annotations

import hmac
import math
import secrets
import threading
from collections.abc import Callable, Sequence

from blake3 import blake3

from torchrelay.transfer.errors import ChunkDamaged, ProtocolViolation, TicketRefused
from torchrelay.transfer.fetch.options import FollowOptions
from torchrelay.transfer.fetch.sources import Receiver, SourceAddress
from torchrelay.transfer.protocol import frames
from torchrelay.transfer.protocol.frame_stream import FrameStream, StopRequested
from torchrelay.transfer.protocol.frames import FrameHeader, FrameKind
from torchrelay.transfer.protocol.tickets import CHALLENGE_BYTES, PROOF_BYTES, prove_session, unseal_session
from torchrelay.transfer.transport.interface import TransferClass

ALIVE_PER_STALL = 4  # keep-alives requested per stall timeout
MAX_ALIVE_INTERVAL_S = 0.04  # keep-alives distinguish a holder that has nothing to send from a dead one


class Upstream:
    """An open stream of chunks. ``head`` is the buffer's head; close it when done."""

    def __init__(self, stream: FrameStream, head: bytes, transfer_class: TransferClass) -> None:
        self.frames, self.head, self.transfer_class = stream, head, transfer_class
        self.abort, self.close = stream.abort, stream.close
        self._num_chunks = 0  # set by HAVE

    @classmethod
    def open(
        cls,
        source: SourceAddress,
        receiver: Receiver,
        options: FollowOptions,
        stop: threading.Event | None = None,
        connect_timeout_s: float = math.inf,
        watch: Callable[[int], None] | None = None,
    ) -> Upstream:
        """Connects and opens the stream. Raises what ``FrameStream.receive_header`` does, and ``OSError``.

        ``watch``: see ``FrameStream``.
        """
        try:
            connection = options.transport.connect(source.address, min(connect_timeout_s, options.stall_s), stop)
        except InterruptedError:
            raise StopRequested from None
        stream = FrameStream(connection, options.stall_s, stop)
        if watch is not None:
            stream.watch = watch
        try:
            _handshake(stream, source, receiver, options)
            return cls(stream, stream.receive(FrameKind.HEAD, frames.MAX_HEAD_BYTES), options.transfer_class)
        except BaseException:
            stream.close()
            raise

    def ask(self, wanted: Sequence[int], cancelled: Sequence[int] = ()) -> None:
        """Requests more chunks and cancels earlier requests. Any thread may call it."""
        if cancelled:
            self.frames.send(FrameKind.CANCEL, frames.pack_runs(cancelled))
        if wanted:
            self.frames.send(FrameKind.WANT, frames.pack_runs(wanted))

    def gained(self, header: FrameHeader) -> list[int]:
        """The chunks named by a HAVE or GAINED frame."""
        packed = self.frames.payload(header, frames.MAX_HAVE_BYTES)
        if header.kind == FrameKind.GAINED:
            return frames.unpack_runs(packed, self._num_chunks)
        flags = frames.unpack_bitmap(packed, header.chunk)
        self._num_chunks = len(flags)
        return [index for index, flag in enumerate(flags) if flag]

    def receive_chunk(self, header: FrameHeader, view: memoryview, expected: bytes | None) -> bool:
        """Receives the bytes after a CHUNK header. False: the chunk was revoked meanwhile. Raises ``ChunkDamaged``."""
        if header.num_bytes != len(view):
            raise ProtocolViolation(f"chunk {header.chunk} has {len(view)} bytes, not {header.num_bytes}")
        digest = blake3()
        if not self.frames.receive_hashed(view, digest):
            return False
        if digest.digest() != (header.digest if expected is None else expected):
            raise ChunkDamaged(f"chunk {header.chunk} does not match its digest")
        return True


def _handshake(stream: FrameStream, source: SourceAddress, receiver: Receiver, options: FollowOptions) -> None:
    session = unseal_session(source.ticket, receiver.node_key)
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    hello = frames.Hello(
        protocol_version=frames.PROTOCOL_VERSION,
        receiver_id=receiver.id,
        ticket=source.ticket.SerializeToString(),
        challenge=challenge,
        alive_every_ms=int(min(options.stall_s / ALIVE_PER_STALL, MAX_ALIVE_INTERVAL_S) * 1000),
        transfer_class=options.transfer_class,
    )
    stream.send(FrameKind.HELLO, frames.encode(hello))
    answer = stream.receive(FrameKind.CHALLENGE, PROOF_BYTES + CHALLENGE_BYTES)
    proof, holder_challenge = answer[:PROOF_BYTES], answer[PROOF_BYTES:]
    stream.send(FrameKind.PROOF, prove_session(session, b"receiver", holder_challenge))
    if not hmac.compare_digest(proof, prove_session(session, b"holder", challenge)):
        # A receiver that cannot unseal the ticket fails here too; the holder has checked its proof and refuses first.
        stream.receive_header()
        raise TicketRefused(f"{source.address} failed to prove that it is holder {source.holder_id!r}")
