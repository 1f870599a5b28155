"""TLS over any transport, with certificates of the cluster at both ends.

TLS works on memory buffers, and the plain connection moves the sealed bytes. So the plain connection's time limits,
class and abort apply unchanged, and a megabyte takes one system call although TLS seals it in records of 16 KiB. The
cost is one more copy of the sealed bytes in memory, which is small compared with the ciphers' work.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from torchrelay.common.identity.callers import CLUSTER_NAME
from torchrelay.common.identity.tls import Tls
from torchrelay.transfer.transport.interface import TICK_S, Connection, Listener, Transport
from torchrelay.transfer.transport.tcp import TcpTransport

HANDSHAKE_S = 10.0  # a peer that has not presented its certificate in this time is disconnected
RECORD_BYTES = (16 << 10) + 256  # maximum
SEALED_BYTES = 256 << 10  # received per call
PIECE_BYTES = 256 << 10  # sealed per call


def transport_for(tls: Tls | None) -> Transport:
    """The transport between hosts: TCP, with TLS if this process has an identity."""
    return TcpTransport() if tls is None else TlsTransport(tls, TcpTransport())


class TlsConnection:
    """See ``interface.Connection``. Once bytes have been received, one thread may receive while another sends.

    It ends when the plain connection does: frames have lengths and digests, so no TLS close alert is needed or sent.
    """

    def __init__(
        self, plain: Connection, context: ssl.SSLContext, *, is_server: bool, handshake_s: float = HANDSHAKE_S
    ) -> None:
        self._plain, self._handshake_s = plain, handshake_s
        self.set_class, self.peer_closed = plain.set_class, plain.peer_closed
        self.abort, self.close = plain.abort, plain.close
        self._arrived, self._departing = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = None if is_server else CLUSTER_NAME
        self._tls = context.wrap_bio(self._arrived, self._departing, server_side=is_server, server_hostname=name)
        self._lock = threading.Lock()  # guards the TLS state; never held during network I/O
        self._sending = threading.Lock()  # sealed bytes are sent in the order in which they were sealed
        self._sealed = memoryview(bytearray(RECORD_BYTES))
        self._is_open = False
        self._handshake_ends_at = time.monotonic() + handshake_s

    def receive_into(self, view: memoryview) -> int:
        tick_ends_at = time.monotonic() + TICK_S
        while True:
            if self._is_open or self.handshake_step():
                num_bytes = self._unseal(view)
                if num_bytes:
                    return num_bytes
            if len(view) > len(self._sealed) and self._is_open:
                self._sealed = memoryview(bytearray(SEALED_BYTES))  # receive bulk data in larger pieces
            if not self.receive_records():
                return 0
            if time.monotonic() >= tick_ends_at:  # less than a record has arrived
                raise TimeoutError("nothing received")

    def handshake_step(self) -> bool:
        """Performs a step of the handshake; True once it is done. Call ``receive_records`` before the next step."""
        if time.monotonic() > self._handshake_ends_at:
            raise ConnectionAbortedError(f"the peer has not presented its certificate within {self._handshake_s:g} s")
        try:
            with self._lock:
                self._tls.do_handshake()
            self._is_open = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            with suppress(OSError):
                self._send_sealed()  # the alert with the reason
            raise
        self._send_sealed()
        return self._is_open

    def receive_records(self) -> bool:
        """Passes received bytes to TLS. False: the peer has closed. Raises ``TimeoutError`` like ``receive_into``."""
        num_bytes = self._plain.receive_into(self._sealed)
        with self._lock:
            self._arrived.write(self._sealed[:num_bytes])
        return num_bytes > 0

    def _unseal(self, view: memoryview) -> int:
        """Unseals as many complete records into the view as fit; 0: none has arrived."""
        done = 0
        with self._lock, suppress(ssl.SSLWantReadError):
            while done < len(view):
                num_bytes = cast(int, self._tls.read(len(view) - done, view[done:]))  # an int, since it got a buffer
                if not num_bytes:  # a TLS close alert; the connection's end follows
                    break
                done += num_bytes
        return done

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        while not (self._is_open or self.handshake_step()):
            with suppress(TimeoutError):
                if not self.receive_records():
                    raise ConnectionResetError("the peer ended the TLS handshake")
        with self._sending:
            for part in parts:
                view = memoryview(part)
                for begin in range(0, len(view), PIECE_BYTES):
                    with self._lock:
                        self._tls.write(view[begin : begin + PIECE_BYTES])
                    if self._departing.pending >= PIECE_BYTES:
                        self._flush()
            self._flush()

    def _send_sealed(self) -> None:
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            sealed = self._departing.read()
        if sealed:
            self._plain.send((sealed,))


class TlsListener:
    """See ``interface.Listener``. Each connection does its own handshake, so no peer can block the accept loop."""

    def __init__(self, plain: Listener, tls: Tls, handshake_s: float) -> None:
        self.address, self.close = plain.address, plain.close
        self._plain, self._tls, self._handshake_s = plain, tls, handshake_s

    def accept(self) -> Connection | None:
        plain = self._plain.accept()
        if plain is None:
            return None
        context = self._tls.identity.server_context
        return TlsConnection(plain, context, is_server=True, handshake_s=self._handshake_s)


class TlsTransport:
    """See ``interface.Transport``."""

    def __init__(self, tls: Tls, plain: Transport, handshake_s: float = HANDSHAKE_S) -> None:
        self._tls, self._plain, self._handshake_s = tls, plain, handshake_s

    def listen(self, host: str, port: int) -> Listener:
        return TlsListener(self._plain.listen(host, port), self._tls, self._handshake_s)

    def connect(self, address: str, timeout_s: float, stop: threading.Event | None = None) -> Connection:
        """Connects; returns once the peer has presented its certificate. The first receive fails if it rejects ours."""
        ends_at = time.monotonic() + timeout_s
        plain = self._plain.connect(address, timeout_s, stop)
        context = self._tls.identity.client_context
        connection = TlsConnection(plain, context, is_server=False, handshake_s=self._handshake_s)
        try:
            while not connection.handshake_step():
                with suppress(TimeoutError):
                    if not connection.receive_records():
                        raise ConnectionResetError(f"{address} ended the TLS handshake; does it serve TLS?")
                if stop is not None and stop.is_set():
                    raise InterruptedError(f"stopped while connecting to {address}")
                if time.monotonic() >= ends_at:
                    raise TimeoutError(f"{address} has not presented its certificate within {timeout_s:g} s")
            return connection
        except BaseException:
            connection.close()
            raise
