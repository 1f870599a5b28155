"""The transport that an address asks for: callers hand on addresses, and need not know what lies between."""

from __future__ import annotations

import threading

from torchrelay.transfer.shm import SCHEME, ShmTransport
from torchrelay.transfer.transport import Connection, Listener, Transport


class AnyTransport:
    """ "shm:/path" is shared memory; everything else goes by the network's transport. See ``transport.Transport``."""

    def __init__(self, network: Transport) -> None:
        self._network = network
        self._shm = ShmTransport()

    def listen(self, host: str, port: int) -> Listener:
        return self._of(host).listen(host, port)

    def connect(self, address: str, timeout_s: float, stop: threading.Event | None = None) -> Connection:
        return self._of(address).connect(address, timeout_s, stop)

    def _of(self, address: str) -> Transport:
        return self._shm if address.startswith(SCHEME) else self._network
