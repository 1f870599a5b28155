"""The holder's end of a stream: verifies the ticket, finds the buffer, sends each wanted chunk once it is ready."""

from __future__ import annotations

import hmac
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from torchrelay.common.errors import TorchrelayError
from torchrelay.common.ids import new_id
from torchrelay.common.process.telemetry import get_logger
from torchrelay.transfer.buffers import Buffer, LeasedBuffer
from torchrelay.transfer.errors import ProtocolViolation, SourceClosed, WrongReceiver
from torchrelay.transfer.protocol import frames, tickets
from torchrelay.transfer.protocol.frame_stream import FrameStream
from torchrelay.transfer.protocol.frames import FrameKind
from torchrelay.transfer.protocol.tickets import Ticket
from torchrelay.transfer.serve.send_queue import SendQueue
from torchrelay.transfer.transport.interface import Connection, TransferClass

BATCH_BYTES = 256 << 10  # small ready chunks are sent in one system call
POLL_S = 0.02  # maximum delay until a waiting stream sees new requests; interval of announcements of new chunks
# How long an open stream may request chunks after its ticket has expired, so that a nearly finished relay completes.
# Chunks requested in time are sent, however late they become ready.
EXPIRY_GRACE_S = 10.0
ALIVE_INTERVAL_RANGE_S = (0.02, 10.0)  # limits of the interval that a follower requests
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HolderContext:
    """The parts of the server that its streams use.

    ``find`` may block, and calls its second argument meanwhile; it raises ``UnknownBuffer``.
    """

    holder_id: str
    node_key: bytes = field(repr=False)
    handshake_s: float
    unix_ms: Callable[[], int]
    find: Callable[[str, Callable[[], None]], Buffer]
    count_sent: Callable[[int], None]


class Downstream:
    """A follower's stream: one thread sends, another reads the follower's requests."""

    def __init__(self, holder: HolderContext, connection: Connection) -> None:
        self._holder = holder
        self._connection = connection
        self._frames = FrameStream(connection, holder.handshake_s, ends_at=time.monotonic() + holder.handshake_s)
        self._queue = SendQueue()
        self._alive_s = ALIVE_INTERVAL_RANGE_S[1]
        self._last_sent = time.monotonic()
        self._announced = bytearray()  # one byte per chunk: 1 if the follower knows that it is ready
        self._announced_at = 0.0
        self._busy_at = time.monotonic()
        self._begun_at, self._is_admitted = self._busy_at, False
        self._aborted = False
        self._reader: threading.Thread | None = None

    def run(self) -> None:
        """Serves the whole stream. Sends refusals to the follower; ends without an error when it is gone."""
        try:
            self._serve()
        except TorchrelayError as error:
            log.info("stream_refused", code=error.code, reason=error.message)
            with suppress(OSError):  # the follower is gone as well
                self._frames.send(FrameKind.REFUSED, frames.encode(frames.Refusal.of(error)))
        except OSError as error:
            log.debug("follower_gone", reason=str(error))
        finally:
            self._frames.abort()
            if self._reader is not None:
                self._reader.join()
            self._frames.close()

    def abort(self) -> None:
        """Ends the stream from another thread, within ``POLL_S``."""
        self._aborted = True
        self._frames.abort()

    def idle_s(self, now: float) -> float:
        """Seconds since the follower last had a request open. ``now``: monotonic."""
        return now - self._busy_at

    def handshake_s(self, now: float) -> float:
        """Seconds that the handshake has taken so far; 0 once the follower is authenticated. ``now``: monotonic."""
        return 0.0 if self._is_admitted else now - self._begun_at

    def _serve(self) -> None:
        ticket = self._admit()
        self._is_admitted = True
        buffer = self._holder.find(ticket.buffer_id, self._keep_waiting)
        with _leased(buffer):
            self._announced = bytearray(buffer.ready_flags())
            head, have = buffer.head, frames.pack_bitmap(self._announced)
            head_header = frames.pack_header(FrameKind.HEAD, len(head))
            have_header = frames.pack_header(FrameKind.HAVE, len(have), buffer.num_chunks)
            self._connection.send((head_header, head, have_header, have))
            reader = threading.Thread(target=self._read, args=(ticket, buffer), name="wants", daemon=True)
            try:
                reader.start()
            except RuntimeError as error:  # the system is out of threads
                raise ConnectionAbortedError(str(error)) from error
            self._reader = reader
            self._send_chunks(ticket, buffer)

    def _admit(self) -> Ticket:
        hello = frames.decode(self._frames.receive(FrameKind.HELLO, frames.MAX_HELLO_BYTES), frames.Hello)
        if (version := hello.protocol_version) != frames.PROTOCOL_VERSION:
            raise ProtocolViolation(
                f"protocol version {version} is not supported; this holder speaks {frames.PROTOCOL_VERSION}"
            )
        try:
            ticket, transfer_class = Ticket.FromString(hello.ticket), TransferClass(hello.transfer_class)
        except (DecodeError, ValueError) as error:
            raise ProtocolViolation(f"the ticket is malformed, or the transfer class unknown: {error}") from error
        session = tickets.verify_ticket(ticket, self._holder.holder_id, self._holder.node_key, self._holder.unix_ms())
        challenge = secrets.token_bytes(tickets.CHALLENGE_BYTES)
        self._frames.send(FrameKind.CHALLENGE, tickets.prove_session(session, b"holder", hello.challenge) + challenge)
        proof = self._frames.receive(FrameKind.PROOF, tickets.PROOF_BYTES)
        proven = hmac.compare_digest(proof, tickets.prove_session(session, b"receiver", challenge))
        if hello.receiver_id != ticket.receiver_id or not proven:
            raise WrongReceiver(f"the ticket is for receiver {ticket.receiver_id!r}, and this peer is not it")
        self._alive_s = min(max(hello.alive_every_ms / 1000, ALIVE_INTERVAL_RANGE_S[0]), ALIVE_INTERVAL_RANGE_S[1])
        self._connection.set_class(transfer_class)
        return ticket

    def _read(self, ticket: Ticket, buffer: Buffer) -> None:
        """The reader thread: queues the follower's requests until it disconnects."""
        stream = FrameStream(self._connection, math.inf)
        try:
            while True:
                header = stream.receive_header()
                runs = frames.unpack_runs(stream.payload(header, frames.MAX_WANT_BYTES), buffer.num_chunks)
                if header.kind == FrameKind.WANT:
                    self._check_expiry(ticket)
                    self._queue.add(runs)
                elif header.kind == FrameKind.CANCEL:
                    self._queue.cancel(runs)
                else:
                    raise ProtocolViolation(f"unexpected {header.kind.name} frame while reading requests")
        except SourceClosed:
            self._queue.end(ConnectionResetError("the follower closed the stream"))
        except (TorchrelayError, OSError) as error:
            self._queue.end(error)

    def _check_expiry(self, ticket: Ticket) -> None:
        tickets.check_expiry(ticket, self._holder.unix_ms(), int(EXPIRY_GRACE_S * 1000))

    def _send_chunks(self, ticket: Ticket, buffer: Buffer) -> None:
        while True:
            pending = self._queue.pending(POLL_S)
            if pending:
                self._busy_at = time.monotonic()
            else:
                self._check_expiry(ticket)
            ready = buffer.wait_any(pending, min(self._alive_s, POLL_S)) if pending else []
            gained = self._newly_ready(buffer)
            if ready:
                self._send_some(buffer, ready, gained)
            elif gained:
                self._frames.send(FrameKind.GAINED, gained)
                self._last_sent = time.monotonic()
            elif pending:
                self._keep_alive()
            if self._aborted:
                raise ConnectionAbortedError("the holder is shutting down")

    def _send_some(self, buffer: Buffer, ready: list[int], gained: bytes) -> None:
        parts: list[bytes | memoryview] = [frames.pack_header(FrameKind.GAINED, len(gained)), gained] if gained else []
        num_bytes = 0
        for index in ready:
            if self._queue.take(index):
                chunk = buffer.chunk(index)
                parts += (frames.pack_header(FrameKind.CHUNK, len(chunk), index, buffer.digest(index)), chunk)
                num_bytes += len(chunk)
                self._announced[index] = 1
                if num_bytes >= BATCH_BYTES:
                    break
        self._connection.send(parts)
        self._last_sent = time.monotonic()
        self._holder.count_sent(num_bytes)

    def _newly_ready(self, buffer: Buffer) -> bytes:
        """Packed runs of ready chunks that were neither announced nor sent; empty: none, or called too soon."""
        now = time.monotonic()
        if now - self._announced_at < POLL_S or 0 not in self._announced:
            return b""
        self._announced_at = now
        ready_flags = buffer.ready_flags()
        gained = [index for index, flag in enumerate(ready_flags) if flag and not self._announced[index]]
        for index in gained:
            self._announced[index] = 1
        return frames.pack_runs(gained)

    def _keep_waiting(self) -> None:
        if self._connection.peer_closed():
            raise ConnectionResetError("the follower closed the stream")
        self._keep_alive()

    def _keep_alive(self) -> None:
        """Sends a keep-alive when it is due: it distinguishes a holder that has nothing to send from a dead one."""
        if self._aborted:
            raise ConnectionAbortedError("the holder is shutting down")
        if time.monotonic() - self._last_sent >= self._alive_s:
            self._frames.send(FrameKind.ALIVE)
            self._last_sent = time.monotonic()


@contextmanager
def _leased(buffer: Buffer) -> Iterator[None]:
    if not isinstance(buffer, LeasedBuffer):
        yield
        return
    owner = new_id("stream")
    buffer.acquire(owner)
    try:
        yield
    finally:
        buffer.release(owner)
