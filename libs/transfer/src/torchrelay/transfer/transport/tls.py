"""TLS over any transport: what travels is sealed, and both ends show a certificate of the cluster.

TLS works on memory here, and the connection below moves the sealed bytes: its time limits, its class and its way to be
aborted stay as they are, and a megabyte is one system call though TLS seals it in records of 16 KiB. The price is one
copy of the sealed bytes in memory, little beside the ciphers' own work.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from torchrelay.common.tls import CLUSTER_NAME, Tls
from torchrelay.transfer.transport.interface import TICK_S, Connection, Listener, TransferClass, Transport
from torchrelay.transfer.transport.tcp import TcpTransport

HANDSHAKE_S = 10.0  # a peer that has not shown its certificate in this time is sent away
RECORD_BYTES = (16 << 10) + 256  # the longest there is
SEALED_BYTES = 256 << 10  # taken from the wire at once
PIECE_BYTES = 256 << 10  # sealed before it is sent


def transport_for(tls: Tls | None) -> Transport:
    """The transport between hosts: TCP, within TLS if this process has an identity."""
    return TcpTransport() if tls is None else TlsTransport(tls, TcpTransport())


class TlsConnection:
    """See ``transport.Connection``. Once bytes have been received, one thread may receive while another sends.

    The peer has ended when the connection below has: frames tell their own length and carry digests, so nothing hangs
    on a farewell within TLS, and none is sent.
    """

    def __init__(self, plain: Connection, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._plain = plain
        self._arrived, self._departing = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = None if is_server else CLUSTER_NAME
        self._tls = context.wrap_bio(self._arrived, self._departing, server_side=is_server, server_hostname=name)
        self._lock = threading.Lock()  # of the TLS state; never held while the wire is waited for
        self._sending = threading.Lock()  # what is sealed first leaves first
        self._sealed = memoryview(bytearray(RECORD_BYTES))
        self._is_open = False
        self._handshake_ends_at = time.monotonic() + HANDSHAKE_S

    def receive_into(self, view: memoryview) -> int:
        tick_ends_at = time.monotonic() + TICK_S
        while True:
            if self._is_open or self.handshake_step():
                num_bytes = self._unseal(view)
                if num_bytes:
                    return num_bytes
            if len(view) > len(self._sealed) and self._is_open:
                self._sealed = memoryview(bytearray(SEALED_BYTES))  # bulk comes: it is taken in larger pieces
            if not self.receive_records():
                return 0
            if time.monotonic() >= tick_ends_at:  # less than a record has come
                raise TimeoutError("nothing received")

    def handshake_step(self) -> bool:
        """One step of the handshake; True once it is done. More steps need more bytes of the peer: ``take_in``."""
        if time.monotonic() > self._handshake_ends_at:
            raise ConnectionAbortedError(f"the peer has not shown its certificate within {HANDSHAKE_S:g} s")
        try:
            with self._lock:
                self._tls.do_handshake()
            self._is_open = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            with suppress(OSError):
                self._send_sealed()  # the alert that tells the peer why
            raise
        self._send_sealed()
        return self._is_open

    def receive_records(self) -> bool:
        """Hands TLS what has arrived; False: the peer has ended. Raises ``TimeoutError`` like ``receive_into``."""
        num_bytes = self._plain.receive_into(self._sealed)
        with self._lock:
            self._arrived.write(self._sealed[:num_bytes])
        return num_bytes > 0

    def _unseal(self, view: memoryview) -> int:
        """As many records as have arrived whole and fit, straight into the view; 0: none has."""
        done = 0
        with self._lock, suppress(ssl.SSLWantReadError):
            while done < len(view):
                num_bytes = cast(int, self._tls.read(len(view) - done, view[done:]))  # with a view it is a number
                if not num_bytes:  # a peer that says farewell within TLS; its end follows
                    break
                done += num_bytes
        return done

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        while not (self._is_open or self.handshake_step()):
            with suppress(TimeoutError):
                if not self.receive_records():
                    raise ConnectionResetError("the peer has ended the TLS handshake")
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

    def set_class(self, transfer_class: TransferClass) -> None:
        self._plain.set_class(transfer_class)

    def peer_closed(self) -> bool:
        return self._plain.peer_closed()

    def abort(self) -> None:
        self._plain.abort()

    def close(self) -> None:
        self._plain.close()


class TlsListener:
    """See ``transport.Listener``. The handshake is the stream's own: no peer can keep the others at the door."""

    def __init__(self, plain: Listener, context: ssl.SSLContext) -> None:
        self._plain, self._context = plain, context

    @property
    def address(self) -> str:
        return self._plain.address

    def accept(self) -> Connection | None:
        plain = self._plain.accept()
        return None if plain is None else TlsConnection(plain, self._context, is_server=True)

    def close(self) -> None:
        self._plain.close()


class TlsTransport:
    """See ``transport.Transport``."""

    def __init__(self, tls: Tls, plain: Transport) -> None:
        self._tls, self._plain = tls, plain

    def listen(self, host: str, port: int) -> Listener:
        return TlsListener(self._plain.listen(host, port), self._tls.server_context)

    def connect(self, address: str, timeout_s: float, stop: threading.Event | None = None) -> Connection:
        """Once the holder has shown its certificate; whether it takes ours, the first receive tells."""
        ends_at = time.monotonic() + timeout_s
        connection = TlsConnection(
            self._plain.connect(address, timeout_s, stop), self._tls.client_context, is_server=False
        )
        try:
            while not connection.handshake_step():
                with suppress(TimeoutError):
                    if not connection.receive_records():
                        raise ConnectionResetError(f"{address} has ended the TLS handshake: does it serve TLS?")
                if stop is not None and stop.is_set():
                    raise InterruptedError(f"stopped while connecting to {address}")
                if time.monotonic() >= ends_at:
                    raise TimeoutError(f"{address} has not shown its certificate within {timeout_s:g} s")
            return connection
        except BaseException:
            connection.close()
            raise
