"""The follower's end of one stream: handshake, requests, and received chunks."""

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
from torchrelay.transfer.protocol.frame_stream import FrameStream, StopRequested
from torchrelay.transfer.protocol.frames import (
    MAX_HAVE_BYTES,
    MAX_HEAD_BYTES,
    PROTOCOL_VERSION,
    FrameHeader,
    FrameKind,
    Hello,
    encode,
    pack_runs,
    unpack_bitmap,
    unpack_runs,
)
from torchrelay.transfer.protocol.tickets import CHALLENGE_BYTES, PROOF_BYTES, prove_session, unseal_session
from torchrelay.transfer.transport.interface import TransferClass

ALIVE_PER_STALL = 4  # keep-alive frames requested per stall timeout
MAX_ALIVE_INTERVAL_S = 0.04  # and never fewer: they tell a holder that has nothing from one that is gone


class Upstream:
    """An open stream of chunks. ``head`` is the buffer's head; close it when done."""

    def __init__(self, frames: FrameStream, head: bytes, transfer_class: TransferClass) -> None:
        self.frames, self.head, self.transfer_class = frames, head, transfer_class
        self._num_chunks = 0  # known from HAVE on

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
        frames = FrameStream(connection, options.stall_s, stop)
        if watch is not None:
            frames.watch = watch
        try:
            _handshake(frames, source, receiver, options)
            return cls(frames, frames.receive(FrameKind.HEAD, MAX_HEAD_BYTES), options.transfer_class)
        except BaseException:
            frames.close()
            raise

    def ask(self, wanted: Sequence[int], cancelled: Sequence[int] = ()) -> None:
        """Requests more chunks and cancels earlier requests. Any thread may call it."""
        if cancelled:
            self.frames.send(FrameKind.CANCEL, pack_runs(cancelled))
        if wanted:
            self.frames.send(FrameKind.WANT, pack_runs(wanted))

    def gained(self, header: FrameHeader) -> list[int]:
        """The chunks named by a HAVE or GAINED frame."""
        packed = self.frames.payload(header, MAX_HAVE_BYTES)
        if header.kind == FrameKind.GAINED:
            return unpack_runs(packed, self._num_chunks)
        flags = unpack_bitmap(packed, header.chunk)
        self._num_chunks = len(flags)
        return [index for index, flag in enumerate(flags) if flag]

    def receive_chunk(self, header: FrameHeader, view: memoryview, expected: bytes | None) -> bool:
        """Receives the bytes after a CHUNK header. False: revoked midway. Raises ``ChunkDamaged``."""
        if header.num_bytes != len(view):
            raise ProtocolViolation(f"chunk {header.chunk} has {len(view)} bytes, not {header.num_bytes}")
        digest = blake3()
        if not self.frames.receive_hashed(view, digest):
            return False
        if digest.digest() != (header.digest if expected is None else expected):
            raise ChunkDamaged(f"chunk {header.chunk} does not match its digest")
        return True

    def abort(self) -> None:
        """Ends the stream from another thread."""
        self.frames.abort()

    def close(self) -> None:
        self.frames.close()


def _handshake(frames: FrameStream, source: SourceAddress, receiver: Receiver, options: FollowOptions) -> None:
    session = unseal_session(source.ticket, receiver.node_key)
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        receiver_id=receiver.id,
        ticket=source.ticket.SerializeToString(),
        challenge=challenge,
        alive_every_ms=int(min(options.stall_s / ALIVE_PER_STALL, MAX_ALIVE_INTERVAL_S) * 1000),
        transfer_class=options.transfer_class,
    )
    frames.send(FrameKind.HELLO, encode(hello))
    answer = frames.receive(FrameKind.CHALLENGE, PROOF_BYTES + CHALLENGE_BYTES)
    proof, holder_challenge = answer[:PROOF_BYTES], answer[PROOF_BYTES:]
    frames.send(FrameKind.PROOF, prove_session(session, b"receiver", holder_challenge))
    if not hmac.compare_digest(proof, prove_session(session, b"holder", challenge)):
        # A receiver that cannot unseal the ticket fails here too; the holder, which checks its proof, says so first.
        frames.receive_header()
        raise TicketRefused(f"{source.address} failed to prove that it is holder {source.holder_id!r}")
