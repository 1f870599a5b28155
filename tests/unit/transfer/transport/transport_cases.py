"""The transports that the suites run over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchrelay.transfer.transport.interface import Connection, Listener, Transport
from torchrelay.transfer.transport.shm import ShmTransport
from torchrelay.transfer.transport.sockets import SEND_TIMEOUT_S
from torchrelay.transfer.transport.tcp import TcpTransport

TRANSPORTS = ("tcp", "shm")


@dataclass(frozen=True)
class TransportCase:
    """A transport, and the host to listen at."""

    transport: Transport
    host: str

    @contextmanager
    def listening(self) -> Iterator[Listener]:
        listener = self.transport.listen(self.host, 0)
        try:
            yield listener
        finally:
            listener.close()

    @contextmanager
    def pair(self) -> Iterator[tuple[Connection, Connection]]:
        """Two ends of one connection: the connector's, and the accepted one."""
        with self.listening() as listener:
            near = self.transport.connect(listener.address, timeout_s=5.0)
            far = listener.accept()
            assert far is not None
            try:
                yield near, far
            finally:
                near.close()
                far.close()

    @contextmanager
    def silent_listener(self) -> Iterator[str]:
        """Accepts connections and never sends a byte; yields its address."""
        accepted: list[Connection] = []

        def accept() -> None:
            while (connection := listener.accept()) is not None:
                accepted.append(connection)

        with self.listening() as listener:
            accepting = threading.Thread(target=accept)
            accepting.start()
            yield listener.address
            listener.close()
            accepting.join()
            for connection in accepted:
                connection.close()


def make_case(name: str, folder: Path, send_timeout_s: float = SEND_TIMEOUT_S) -> TransportCase:
    """``folder`` is for the sockets of shared memory; its path must be short."""
    if name == "tcp":
        return TransportCase(TcpTransport(send_timeout_s), "127.0.0.1")
    return TransportCase(ShmTransport(send_timeout_s), f"shm:{folder / 'socket'}")


def receive(connection: Connection, num_bytes: int) -> bytes:
    """Exactly this many bytes, however they arrive."""
    view, done = memoryview(bytearray(num_bytes)), 0
    while done < num_bytes:
        try:
            received = connection.receive_into(view[done:])
        except TimeoutError:
            continue
        if received == 0:
            raise EOFError(f"{done} of {num_bytes} bytes came")
        done += received
    return bytes(view)
