"""The holder's server: serves buffers to followers that present a ticket, chunk by chunk, as they become ready."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torchrelay.common.process.telemetry import get_logger
from torchrelay.transfer.buffers import Buffer
from torchrelay.transfer.errors import UnknownBuffer
from torchrelay.transfer.serve.downstream import Downstream, HolderContext
from torchrelay.transfer.transport.interface import Connection, Listener

FIND_RETRY_S = 0.02
PERMIT_RETRY_S = 0.2
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HolderLimits:
    """Limits of a holder. Beyond ``max_streams``, connections wait until a stream ends or is idle for ``idle_s``."""

    find_timeout_s: float = 2.0  # how long a requested buffer may take to appear
    max_streams: int = 256
    idle_s: float = 30.0
    handshake_s: float = 10.0  # a peer that has not authenticated in this time is disconnected
    handshake_grace_s: float = 0.5  # the same limit while other connections wait for its permit


class HolderServer:
    """The data-plane server of a store or worker: a thread that accepts and a thread per stream.

    ``find`` returns the buffer of an id, or None if there is none (yet); many threads call it. The server owns its
    listener.
    """

    def __init__(
        self,
        holder_id: str,
        node_key: bytes,
        find: Callable[[str], Buffer | None],
        listener: Listener,
        limits: HolderLimits | None = None,
        unix_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._limits = limits or HolderLimits()
        self._context = HolderContext(
            holder_id, node_key, self._limits.handshake_s, unix_ms, self._find, self._count_sent
        )
        self._lookup = find
        self.bytes_sent = 0  # bytes of chunks sent since the start, over all streams
        self._streams: dict[Downstream, threading.Thread] = {}
        self._permits = threading.Semaphore(self._limits.max_streams)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self.address = listener.address  # connections to it wait for ``start``
        self._listener = listener
        self._accepting = threading.Thread(target=self._accept, name=f"holder-{holder_id}", daemon=True)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def start(self) -> None:
        self._accepting.start()

    def close(self) -> None:
        """Ends all streams and waits for their threads; no buffer is used afterwards."""
        self._closing.set()
        self._listener.close()
        self._permits.release()
        if self._accepting.ident is not None:
            self._accepting.join()
        with self._lock:
            streams = dict(self._streams)
        for stream in streams:
            stream.abort()
        for thread in streams.values():
            thread.join()

    def _accept(self) -> None:
        while (connection := self._listener.accept()) is not None:
            # Acquired after the accept, so that a listener without connections holds no permit.
            while not self._permits.acquire(timeout=PERMIT_RETRY_S):
                self._end_unauthenticated()
                self._end_idlest()
            if self._closing.is_set():
                connection.close()
                return
            self._start_stream(connection)

    def _end_unauthenticated(self) -> None:
        """Frees the permits of peers that have not authenticated within ``handshake_grace_s``."""
        now = time.monotonic()
        with self._lock:
            late = [stream for stream in self._streams if stream.handshake_s(now) > self._limits.handshake_grace_s]
        if late:  # a follower of this cluster may be among them
            log.warning("handshakes_ended", holder_id=self._context.holder_id, num_streams=len(late))
        for stream in late:
            stream.abort()

    def _end_idlest(self) -> None:
        """Frees the permit of the stream that has been idle longest, beyond ``idle_s``: its follower may be stuck."""
        now = time.monotonic()
        with self._lock:
            idlest = max(self._streams, key=lambda stream: stream.idle_s(now), default=None)
        if idlest is not None and idlest.idle_s(now) > self._limits.idle_s:
            log.warning("idle_stream_ended", holder_id=self._context.holder_id, idle_s=round(idlest.idle_s(now), 1))
            idlest.abort()

    def _start_stream(self, connection: Connection) -> None:
        stream = Downstream(self._context, connection)
        thread = threading.Thread(target=self._serve, args=(stream,), name="stream", daemon=True)
        with self._lock:
            self._streams[stream] = thread
        try:
            thread.start()
        except RuntimeError as error:  # the system is out of threads: only this stream ends
            log.warning("stream_not_started", reason=str(error))
            connection.close()
            self._end(stream)

    def _serve(self, stream: Downstream) -> None:
        try:
            stream.run()
        finally:
            self._end(stream)

    def _end(self, stream: Downstream) -> None:
        with self._lock:
            del self._streams[stream]
        self._permits.release()

    def _find(self, buffer_id: str, keep_alive: Callable[[], None]) -> Buffer:
        deadline = time.monotonic() + self._limits.find_timeout_s
        while True:
            buffer = self._lookup(buffer_id)
            if buffer is not None:
                return buffer
            if time.monotonic() >= deadline:
                raise UnknownBuffer(f"holder {self._context.holder_id} has no buffer {buffer_id}")
            # Polled, so that the owner of the buffers need not know this server.
            self._closing.wait(FIND_RETRY_S)
            keep_alive()

    def _count_sent(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes_sent += num_bytes
