"""The transport that an address asks for: callers hand on addresses, and need not know what lies between."""

from __future__ import annotations

import threading

from torchrelay.common.process.telemetry import get_logger
from torchrelay.transfer.transport.interface import Connection, Listener, Transport
from torchrelay.transfer.transport.shm import SCHEME, ShmTransport

LOCAL_CONNECT_TIMEOUT_S = 0.5  # a local door whose queue is full for so long is passed by
_SEPARATOR = "|"
log = get_logger(__name__)


def prefer_local(local_address: str, address: str) -> str:
    """An address to try first, if there is one, and the one that reaches the same holder in any case."""
    return f"{local_address}{_SEPARATOR}{address}" if local_address else address


class AutoTransport:
    """ "shm:/path" is shared memory; everything else goes by the network's transport. See ``transport.Transport``.

    Of "shm:/path|host:port" the second is taken where the first cannot be reached: hosts that carry the same name by
    mistake, or containers of one host that share no folder.
    """

    def __init__(self, network: Transport) -> None:
        self._network = network
        self._shm = ShmTransport()

    def listen(self, host: str, port: int) -> Listener:
        return self._of(host).listen(host, port)

    def connect(self, address: str, timeout_s: float, stop: threading.Event | None = None) -> Connection:
        local, either, beyond = address.partition(_SEPARATOR)
        if not either:
            return self._of(address).connect(address, timeout_s, stop)
        try:
            return self._of(local).connect(local, min(timeout_s, LOCAL_CONNECT_TIMEOUT_S), stop)
        except InterruptedError:
            raise
        except OSError as error:
            log.info("local_listener_unreachable", address=local, instead=beyond, reason=str(error))
            return self._of(beyond).connect(beyond, timeout_s, stop)

    def _of(self, address: str) -> Transport:
        return self._shm if address.startswith(SCHEME) else self._network
