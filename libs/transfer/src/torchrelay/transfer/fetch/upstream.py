"""The follower's end of one stream: says who it is, proves it, says what it wants, and receives it."""

from __future__ import annotations

import hmac
import math
import secrets
import threading
from collections.abc import Callable, Sequence

from blake3 import blake3

from torchrelay.transfer.errors import ChunkDamaged, ProtocolViolation, TicketRefused
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
from torchrelay.transfer.transport.interface import TransferClass, Transport

ALIVE_PER_STALL = 4  # how many keep-alive frames a waiting holder is asked for in the time that counts as a stall
MAX_ALIVE_INTERVAL_S = 0.04  # and never less often: by them a holder that has nothing is told from one that is gone


class Upstream:
    """An open stream of chunks. ``head`` is the buffer's head; close it when done."""

    def __init__(self, frames: FrameStream, head: bytes) -> None:
        self.frames = frames
        self.head = head
        self._num_chunks = 0  # HAVE tells

    @classmethod
    def open(
        cls,
        source: SourceAddress,
        receiver: Receiver,
        transport: Transport,
        stall_s: float,
        stop: threading.Event | None,
        transfer_class: TransferClass = TransferClass.KV,
        connect_s: float = math.inf,
        watch: Callable[[int], None] | None = None,
    ) -> Upstream:
        """Connects and opens the stream. Raises what ``FrameStream.receive_header`` does, and ``OSError``.

        ``watch``: see ``FrameStream``.
        """
        try:
            connection = transport.connect(source.address, min(connect_s, stall_s), stop)
        except InterruptedError:
            raise StopRequested from None
        frames = FrameStream(connection, stall_s, stop)
        if watch is not None:
            frames.watch = watch
        try:
            _handshake(frames, source, receiver, stall_s, transfer_class)
            return cls(frames, frames.receive(FrameKind.HEAD, MAX_HEAD_BYTES))
        except BaseException:
            frames.close()
            raise

    def ask(self, wanted: Sequence[int], cancelled: Sequence[int] = ()) -> None:
        """Asks for more chunks, and takes back what was asked for before. Any thread may."""
        if cancelled:
            self.frames.send(FrameKind.CANCEL, pack_runs(cancelled))
        if wanted:
            self.frames.send(FrameKind.WANT, pack_runs(wanted))

    def gained(self, header: FrameHeader) -> list[int]:
        """The chunks that a HAVE or GAINED frame names."""
        packed = self.frames.payload(header, MAX_HAVE_BYTES)
        if header.kind == FrameKind.GAINED:
            return unpack_runs(packed, self._num_chunks)
        marks = unpack_bitmap(packed, header.chunk)
        self._num_chunks = len(marks)
        return [index for index, mark in enumerate(marks) if mark]

    def receive_chunk(self, header: FrameHeader, view: memoryview, expected: bytes | None) -> bool:
        """Receives what follows a CHUNK header. False: let go midway. Raises ``ChunkDamaged`` for another digest."""
        if header.num_bytes != len(view):
            raise ProtocolViolation(f"chunk {header.chunk} has {len(view)} bytes, not {header.num_bytes}")
        digest = blake3()
        if not self.frames.receive_hashed(view, digest):
            return False
        if digest.digest() != (header.digest if expected is None else expected):
            raise ChunkDamaged(f"chunk {header.chunk} does not match its digest")
        return True

    def abort(self) -> None:
        """Ends it from another thread."""
        self.frames.abort()

    def close(self) -> None:
        self.frames.close()


def _handshake(
    frames: FrameStream,
    source: SourceAddress,
    receiver: Receiver,
    stall_s: float,
    transfer_class: TransferClass,
) -> None:
    session = unseal_session(source.ticket, receiver.node_key)
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        receiver_id=receiver.id,
        ticket=source.ticket.SerializeToString(),
        challenge=challenge,
        alive_every_ms=int(min(stall_s / ALIVE_PER_STALL, MAX_ALIVE_INTERVAL_S) * 1000),
        transfer_class=transfer_class,
    )
    frames.send(FrameKind.HELLO, encode(hello))
    answer = frames.receive(FrameKind.CHALLENGE, PROOF_BYTES + CHALLENGE_BYTES)
    proof, theirs = answer[:PROOF_BYTES], answer[PROOF_BYTES:]
    frames.send(FrameKind.PROOF, prove_session(session, b"receiver", theirs))
    if not hmac.compare_digest(proof, prove_session(session, b"holder", challenge)):
        # A receiver that cannot open the ticket fails here too; the holder, who sees its proof, says which it was.
        frames.receive_header()
        raise TicketRefused(f"{source.address} does not prove that it is holder {source.holder_id!r}")
