"""Shared memory between processes of a host where it can be used, otherwise the network.

A holder may listen twice: on the network, and on a Unix socket for its own host. Its address is then the pair
"shm:/path|host:port", which callers pass on without looking into it.
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
    """The pair of a local address, which is tried first, and ``address``; ``address`` if there is no local one."""
    return f"{local_address}{_SEPARATOR}{address}" if local_address else address


def open_local_listener(node_key: bytes, folder: Path = SHARED_MEMORY) -> Listener | None:
    """For ``HolderServer.add_listener``. None, with a log line, if the folder does not exist or the name is taken."""
    # Named by the node's key: a restarted node replaces its dead predecessor's socket and no other, and nodes of other
    # installs on the same machine, whatever their ids, get other names.
    name = hmac.digest(node_key, b"torchrelay local listener", hashlib.sha256).hex()[:16]
    try:
        return ShmTransport().listen(f"{SCHEME}{folder / f'torchrelay-{name}.sock'}")
    except OSError as error:
        log.warning("no_local_listener", folder=str(folder), reason=str(error))
        return None


class LocalFirstTransport:
    """The network transport, except that the local address of a pair is tried first. See ``interface.Transport``.

    A local address may be unreachable: hosts may share a name by mistake, and containers of a host may share no folder.
    """

    def __init__(self, network: Transport) -> None:
        self._network, self._local = network, ShmTransport()
        self.listen = network.listen

    def connect(self, address: str, timeout_s: float, stop: threading.Event | None = None) -> Connection:
        local, _, remote = address.rpartition(_SEPARATOR)
        if local:
            try:
                return self._local.connect(local, min(timeout_s, LOCAL_CONNECT_TIMEOUT_S), stop)
            except InterruptedError:
                raise
            except OSError as error:
                log.info("local_listener_unreachable", address=local, instead=remote, reason=str(error))
        return self._network.connect(remote, timeout_s, stop)
