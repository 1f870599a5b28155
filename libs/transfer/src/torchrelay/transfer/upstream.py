"""The follower's end of one stream: says who it is, proves it, says what it wants, and receives it."""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Sequence

from blake3 import blake3

from torchrelay.transfer.errors import ChunkDamaged, ProtocolViolation, TicketRefused
from torchrelay.transfer.frames import FrameStream, Stopped
from torchrelay.transfer.sources import Receiver, SourceAddress
from torchrelay.transfer.tickets import CHALLENGE_BYTES, PROOF_BYTES, prove, unseal
from torchrelay.transfer.transport import Transport
from torchrelay.transfer.wire import MAX_HEAD_BYTES, PROTOCOL_VERSION, FrameKind, Hello, encode, pack_wanted

ALIVE_PER_STALL = 4  # how many keep-alive frames a waiting holder is asked for in the time that counts as a stall


class Upstream:
    """An open stream of chunks. ``head`` is the buffer's head; close it when done."""

    def __init__(self, frames: FrameStream, head: bytes) -> None:
        self._frames = frames
        self.head = head

    @classmethod
    def open(
        cls,
        source: SourceAddress,
        receiver: Receiver,
        wanted: Sequence[int],
        transport: Transport,
        stall_s: float,
        stop: threading.Event | None,
    ) -> Upstream:
        """Connects and opens the stream. Raises what ``FrameStream.receive_header`` does, and ``OSError``."""
        try:
            connection = transport.connect(source.address, stall_s, stop)
        except InterruptedError:
            raise Stopped from None
        frames = FrameStream(connection, stall_s, stop)
        try:
            _greet(frames, source, receiver, pack_wanted(wanted), stall_s)
            return cls(frames, frames.receive(FrameKind.HEAD, MAX_HEAD_BYTES))
        except BaseException:
            frames.close()
            raise

    def receive(self, index: int, view: memoryview, expected: bytes | None, starve_s: float) -> None:
        """Receives the next chunk, which must be this one. Raises ``ChunkDamaged`` when its digest differs."""
        header = self._frames.receive_header(starve_s)
        if (header.kind, header.chunk, header.num_bytes) != (FrameKind.CHUNK, index, len(view)):
            raise ProtocolViolation(
                f"chunk {index} of {len(view)} bytes was due, "
                f"not {header.kind.name} {header.chunk} of {header.num_bytes}"
            )
        digest = blake3()
        self._frames.fill(view, digest)
        if digest.digest() != (header.digest if expected is None else expected):
            raise ChunkDamaged(f"chunk {index} does not match its digest")

    def close(self) -> None:
        self._frames.close()


def _greet(
    frames: FrameStream, source: SourceAddress, receiver: Receiver, packed_wanted: bytes, stall_s: float
) -> None:
    session = unseal(source.ticket, receiver.node_key)
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        receiver_id=receiver.id,
        ticket=source.ticket.SerializeToString(),
        challenge=challenge,
        alive_every_ms=int(stall_s * 1000 / ALIVE_PER_STALL),
    )
    frames.send(FrameKind.HELLO, encode(hello))
    answer = frames.receive(FrameKind.CHALLENGE, PROOF_BYTES + CHALLENGE_BYTES)
    proof, theirs = answer[:PROOF_BYTES], answer[PROOF_BYTES:]
    frames.send(FrameKind.PROOF, prove(session, b"receiver", theirs))
    frames.send(FrameKind.WANT, packed_wanted)
    if not hmac.compare_digest(proof, prove(session, b"holder", challenge)):
        # A receiver that cannot open the ticket fails here too; the holder, who sees its proof, says which it was.
        frames.receive_header()
        raise TicketRefused(f"{source.address} does not prove that it is holder {source.holder_id!r}")
