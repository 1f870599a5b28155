"""The holder's door: serves buffers to those who bring a ticket, chunk by chunk, as they become ready."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torchrelay.common.process.telemetry import get_logger
from torchrelay.transfer.buffers import Buffer
from torchrelay.transfer.errors import UnknownBuffer
from torchrelay.transfer.serve.downstream import Downstream, HolderContext
from torchrelay.transfer.transport.interface import Connection, Listener, Transport
from torchrelay.transfer.transport.tcp import TcpTransport

FIND_TIMEOUT_S = 2.0
FIND_RETRY_S = 0.02
MAX_STREAMS = 256
IDLE_S = 30.0  # a follower that has wanted nothing for so long gives up its place, if none is left for others
PERMIT_RETRY_S = 0.2
log = get_logger(__name__)


class HolderServer:
    """One per store and per worker: a thread that listens, and a thread per stream.

    ``find`` gives the buffer of an id, or None when there is none (yet); it is called from many threads. A buffer
    that is asked for before it exists may appear within ``find_timeout_s``. Beyond ``max_streams`` connections wait,
    until a stream ends, or has been idle for ``IDLE_S``.
    """

    def __init__(
        self,
        holder_id: str,
        node_key: bytes,
        find: Callable[[str], Buffer | None],
        host: str,
        port: int = 0,
        find_timeout_s: float = FIND_TIMEOUT_S,
        max_streams: int = MAX_STREAMS,
        unix_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        transport: Transport | None = None,
    ) -> None:
        self._holder = HolderContext(holder_id, node_key, unix_ms, self._find, self._count_sent)
        self._lookup = find
        self._find_timeout_s = find_timeout_s
        self._bytes_sent = 0
        self._streams: dict[Downstream, threading.Thread] = {}
        self._permits = threading.Semaphore(max_streams)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._listeners: list[Listener] = [(transport or TcpTransport()).listen(host, port)]
        self._accepting: list[threading.Thread] = []

    @property
    def address(self) -> str:
        """ "host:port"; known, and connections wait, before ``start``."""
        return self._listeners[0].address

    @property
    def bytes_sent(self) -> int:
        """Bytes of chunks sent since the start, over all streams."""
        return self._bytes_sent

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def add_listener(self, listener: Listener) -> None:
        """Serves at a further door, which is the server's from now on. Before ``start``."""
        self._listeners.append(listener)

    def start(self) -> None:
        for listener in self._listeners:
            name = f"holder-{self._holder.holder_id}"
            self._accepting.append(threading.Thread(target=self._accept, args=(listener,), name=name, daemon=True))
            self._accepting[-1].start()

    def close(self) -> None:
        """Ends all streams and waits until their threads are gone: their buffers are no longer touched."""
        self._closing.set()
        for listener in self._listeners:
            listener.close()
        self._permits.release(len(self._listeners))
        for accepting in self._accepting:
            accepting.join()
        with self._lock:
            streams = dict(self._streams)
        for stream in streams:
            stream.abort()
        for thread in streams.values():
            thread.join()

    def _accept(self, listener: Listener) -> None:
        while (connection := listener.accept()) is not None:
            # Not before: a door where nobody comes would keep a place from the other.
            while not self._permits.acquire(timeout=PERMIT_RETRY_S):
                self._end_idlest()
            if self._closing.is_set():
                connection.close()
                return
            self._begin(connection)

    def _end_idlest(self) -> None:
        """Makes a place, if there is a stream that has wanted nothing for long: a follower may be stopped, or stuck."""
        now = time.monotonic()
        with self._lock:
            idlest = max(self._streams, key=lambda stream: stream.idle_s(now), default=None)
        if idlest is not None and idlest.idle_s(now) > IDLE_S:
            log.warning("idle_stream_ended", holder_id=self._holder.holder_id, idle_s=round(idlest.idle_s(now), 1))
            idlest.abort()

    def _begin(self, connection: Connection) -> None:
        stream = Downstream(self._holder, connection)
        thread = threading.Thread(target=self._serve, args=(stream,), name="stream", daemon=True)
        with self._lock:
            self._streams[stream] = thread
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no thread more: this stream ends, the door stays open
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
        deadline = time.monotonic() + self._find_timeout_s
        while True:
            found = self._lookup(buffer_id)
            if found is not None:
                return found
            if time.monotonic() >= deadline:
                raise UnknownBuffer(f"holder {self._holder.holder_id} has no buffer {buffer_id}")
            # The owner of the buffers need not know of us, so it is asked again rather than waited for.
            self._closing.wait(FIND_RETRY_S)
            keep_alive()

    def _count_sent(self, num_bytes: int) -> None:
        with self._lock:
            self._bytes_sent += num_bytes
