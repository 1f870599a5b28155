"""The transport that an address asks for, and the local listener that makes shared memory possible.

A holder may listen twice: on the network, and on a Unix socket for its own host. Callers pass on its address, or the
pair "shm:/path|host:port", and need not know which way their bytes take.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from pathlib import Path

from torchrelay.common.process.telemetry import get_logger
from torchrelay.transfer.transport.interface import Connection, Listener, Transport
from torchrelay.transfer.transport.shm import SCHEME, ShmTransport

LOCAL_CONNECT_TIMEOUT_S = 0.5  # a local listener whose queue is full for longer is skipped
SHARED_MEMORY = Path("/dev/shm")
_SEPARATOR = "|"
log = get_logger(__name__)


def prefer_local(local_address: str, address: str) -> str:
    """An address pair: the local one, if there is one, is tried first; the other always reaches the same holder."""
    return f"{local_address}{_SEPARATOR}{address}" if local_address else address


def open_local_listener(node_key: bytes, folder: Path = SHARED_MEMORY) -> Listener | None:
    """For ``HolderServer.add_listener``. None, with a log line, if the folder does not exist or the name is taken."""
    # Named by the node's key: a restarted node replaces its dead predecessor's socket and no other's, and nodes of
    # other installations on the same machine, whatever their ids, get other names.
    name = hmac.digest(node_key, b"torchrelay local listener", hashlib.sha256).hex()[:16]
    try:
        return ShmTransport().listen(f"{SCHEME}{folder / f'torchrelay-{name}.sock'}")
    except OSError as error:
        log.warning("no_local_listener", folder=str(folder), reason=str(error))
        return None


class AutoTransport:
    """ "shm:/path" is shared memory; every other address is the network transport's. See ``interface.Transport``.

    Of "shm:/path|host:port" the second is used where the first cannot be reached: hosts that share a name by mistake,
    or containers of one host that share no folder.
    """

    def __init__(self, network: Transport, local: Transport | None = None) -> None:
        self._network, self._local = network, local or ShmTransport()

    def listen(self, host: str, port: int) -> Listener:
        return self._of(host).listen(host, port)

    def connect(self, address: str, timeout_s: float, stop: threading.Event | None = None) -> Connection:
        local, is_pair, remote = address.partition(_SEPARATOR)
        if not is_pair:
            return self._of(address).connect(address, timeout_s, stop)
        try:
            return self._of(local).connect(local, min(timeout_s, LOCAL_CONNECT_TIMEOUT_S), stop)
        except InterruptedError:
            raise
        except OSError as error:
            log.info("local_listener_unreachable", address=local, instead=remote, reason=str(error))
            return self._of(remote).connect(remote, timeout_s, stop)

    def _of(self, address: str) -> Transport:
        return self._local if address.startswith(SCHEME) else self._network
