"""A node's door for its own host: a Unix socket whose name only the node itself would choose.

The name comes from the node's key: a restarted node replaces its dead predecessor's socket and no other's, and nodes of
other installs on the same machine, whatever they are called, have other names.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from torchrelay.common.telemetry import get_logger
from torchrelay.transfer.shm import SCHEME, ShmTransport
from torchrelay.transfer.transport import Listener

SHARED_MEMORY = Path("/dev/shm")
log = get_logger(__name__)


def open_local_door(node_key: bytes, folder: Path = SHARED_MEMORY) -> Listener | None:
    """For ``HolderServer.also_at``. None, and logged: this system has no such folder, or the name is taken."""
    name = hmac.digest(node_key, b"torchrelay local door", hashlib.sha256).hex()[:16]
    try:
        return ShmTransport().listen(f"{SCHEME}{folder / f'torchrelay-{name}.door'}")
    except OSError as error:
        log.warning("no_local_door", folder=str(folder), reason=str(error))
        return None
