"""A node's door for its own host: a Unix socket whose name only the node itself would choose.

The name comes from the node's key: a restarted node replaces its dead predecessor's socket and no other's, and nodes of
other installs on the same machine, whatever they are called, have other names.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from torchrelay.common.process.telemetry import get_logger
from torchrelay.transfer.transport.interface import Listener
from torchrelay.transfer.transport.shm import SCHEME, ShmTransport

SHARED_MEMORY = Path("/dev/shm")
log = get_logger(__name__)


def open_local_listener(node_key: bytes, folder: Path = SHARED_MEMORY) -> Listener | None:
    """For ``HolderServer.add_listener``. None, and logged: this system has no such folder, or the name is taken."""
    name = hmac.digest(node_key, b"torchrelay local listener", hashlib.sha256).hex()[:16]
    try:
        return ShmTransport().listen(f"{SCHEME}{folder / f'torchrelay-{name}.sock'}")
    except OSError as error:
        log.warning("no_local_listener", folder=str(folder), reason=str(error))
        return None
