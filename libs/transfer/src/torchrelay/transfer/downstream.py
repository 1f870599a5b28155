"""The holder's end of one stream: checks the ticket, finds the buffer, and sends each wanted chunk once it is ready."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate

from google.protobuf.message import DecodeError

from torchrelay.common.errors import TorchrelayError
from torchrelay.common.ids import new_id
from torchrelay.common.telemetry import get_logger
from torchrelay.transfer.buffers import Buffer, Leased
from torchrelay.transfer.errors import ProtocolViolation, RangeRefused, WrongReceiver
from torchrelay.transfer.frames import FrameStream
from torchrelay.transfer.tickets import CHALLENGE_BYTES, PROOF_BYTES, Ticket, check, prove
from torchrelay.transfer.transport import Connection
from torchrelay.transfer.wire import (
    MAX_HELLO_BYTES,
    MAX_WANT_BYTES,
    PROTOCOL_VERSION,
    FrameKind,
    Hello,
    Refusal,
    decode_hello,
    encode,
    pack_header,
    unpack_wanted,
)

HANDSHAKE_S = 10.0  # a peer that has not said in this time who it is and what it wants is sent away
BATCH_BYTES = 1 << 20  # small chunks that are ready leave in one system call
BATCH_PARTS = 256  # a header and a chunk are two
WAIT_S = 0.1  # how soon a stream that waits for a chunk notices that it was aborted
ALIVE_S = (0.02, 10.0)  # what a follower may ask for
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who serves: the holder's id and key, its clock, how it finds a buffer, and who counts the bytes.

    ``find`` may take its time, calling its second argument meanwhile; raises ``UnknownBuffer``.
    """

    holder_id: str
    node_key: bytes = field(repr=False)
    unix_ms: Callable[[], int]
    find: Callable[[str, Callable[[], None]], Buffer]
    count_sent: Callable[[int], None]


class Downstream:
    """One follower's stream, in a thread of its own."""

    def __init__(self, holder: Holder, connection: Connection) -> None:
        self._holder = holder
        self._connection = connection
        self._frames = FrameStream(connection, HANDSHAKE_S, ends_at=time.monotonic() + HANDSHAKE_S)
        self._alive_s = ALIVE_S[1]
        self._last_sent = time.monotonic()
        self._aborted = False

    def run(self) -> None:
        """The whole stream; a refusal is told to the follower, a follower that has gone ends it quietly."""
        try:
            self._serve()
        except TorchrelayError as error:
            log.info("stream_refused", code=error.code, reason=error.message)
            with suppress(OSError):  # the follower has gone as well
                self._frames.send(FrameKind.REFUSED, encode(Refusal.of(error)))
        except OSError as error:
            log.info("follower_gone", reason=str(error))
        finally:
            self._frames.close()

    def abort(self) -> None:
        """Ends the stream from another thread; it is over within ``WAIT_S``."""
        self._aborted = True
        self._connection.abort()

    def _serve(self) -> None:
        ticket, packed_wanted = self._admit()
        buffer = self._holder.find(ticket.buffer_id, self._keep_alive)
        with _leased(buffer):
            wanted = unpack_wanted(packed_wanted, buffer.num_chunks)
            _check_range(ticket, buffer, wanted)
            self._frames.send(FrameKind.HEAD, buffer.head)
            self._send_chunks(buffer, wanted)

    def _admit(self) -> tuple[Ticket, bytes]:
        hello = decode_hello(self._frames.receive(FrameKind.HELLO, MAX_HELLO_BYTES))
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolViolation(f"protocol version {hello.protocol_version}; this holder speaks {PROTOCOL_VERSION}")
        ticket = _ticket_of(hello)
        session = check(ticket, self._holder.holder_id, self._holder.node_key, self._holder.unix_ms())
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self._frames.send(FrameKind.CHALLENGE, prove(session, b"holder", hello.challenge) + challenge)
        proof = self._frames.receive(FrameKind.PROOF, PROOF_BYTES)
        # Read before judging: a refusal sent with bytes still unread would be lost in TCP's reset.
        packed_wanted = self._frames.receive(FrameKind.WANT, MAX_WANT_BYTES)
        proven = hmac.compare_digest(proof, prove(session, b"receiver", challenge))
        if hello.receiver_id != ticket.receiver_id or not proven:
            raise WrongReceiver(f"the ticket is for receiver {ticket.receiver_id!r}, and this is not it")
        self._alive_s = min(max(hello.alive_every_ms / 1000, ALIVE_S[0]), ALIVE_S[1])
        return ticket, packed_wanted

    def _send_chunks(self, buffer: Buffer, wanted: list[int]) -> None:
        position = 0
        while position < len(wanted):
            self._await_ready(buffer, wanted[position])
            parts: list[bytes | memoryview] = []
            num_bytes = 0
            while position < len(wanted) and num_bytes < BATCH_BYTES and len(parts) < BATCH_PARTS:
                index = wanted[position]
                if not buffer.wait(index, 0.0):
                    break
                chunk = buffer.chunk(index)
                parts += (pack_header(FrameKind.CHUNK, len(chunk), index, buffer.digest(index)), chunk)
                num_bytes += len(chunk)
                position += 1
            self._connection.send(parts)
            self._last_sent = time.monotonic()
            self._holder.count_sent(num_bytes)

    def _await_ready(self, buffer: Buffer, index: int) -> None:
        while not buffer.wait(index, min(self._alive_s, WAIT_S)):
            self._keep_alive()

    def _keep_alive(self) -> None:
        """Tells the follower now and then that its holder is slow, not dead; notices when either has gone."""
        if self._aborted:
            raise ConnectionAbortedError("the holder shuts down")
        if self._connection.ended():
            raise ConnectionResetError("the follower has closed the stream")
        if time.monotonic() - self._last_sent >= self._alive_s:
            self._frames.send(FrameKind.ALIVE)
            self._last_sent = time.monotonic()


@contextmanager
def _leased(buffer: Buffer) -> Iterator[None]:
    if not isinstance(buffer, Leased):
        yield
        return
    owner = new_id("stream")
    buffer.acquire(owner)
    try:
        yield
    finally:
        buffer.release(owner)


def _ticket_of(hello: Hello) -> Ticket:
    try:
        return Ticket.FromString(hello.ticket)
    except DecodeError as error:
        raise ProtocolViolation("the ticket cannot be read") from error


def _check_range(ticket: Ticket, buffer: Buffer, wanted: Sequence[int]) -> None:
    if ticket.begin == 0 and ticket.end == 0:
        return
    end = ticket.end or buffer.num_bytes
    offsets = list(accumulate((len(buffer.chunk(index)) for index in range(buffer.num_chunks)), initial=0))
    for index in wanted:
        if offsets[index] < ticket.begin or offsets[index + 1] > end:
            raise RangeRefused(f"the ticket allows bytes [{ticket.begin}, {end}) only; chunk {index} is not in them")
