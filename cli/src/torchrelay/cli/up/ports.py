"""Free ports for the children of one `up`, claimed until they listen on them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from torchrelay.cli.errors import CliError

PREFERRED_HTTP_PORT = 8080


class Ports:
    """Chooses ports; no other `up` on this machine chooses them before the children listen."""

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []

    def close(self) -> None:
        for claim in self._claims:
            claim.close()

    def free(self, host: str = "127.0.0.1", preferred: Sequence[int] = ()) -> int:
        """The first free one of ``preferred``, else any. Raises ``CliError`` for an address of another machine."""
        for port in preferred:
            if found := self._take(host, port):
                return found
        for _ in range(100):
            if found := self._take(host, 0):
                return found
        raise CliError(f"this machine cannot listen on {host}", "pass one of its own addresses with --host")

    def exactly(self, host: str, port: int) -> int:
        """Claims ``port``. Raises ``CliError`` when it is taken."""
        if not self._take(host, port):
            raise CliError(f"port {port} on {host} is taken", "choose another, or 0 for any free one")
        return port

    def _take(self, host: str, port: int) -> int | None:
        with socket.socket() as probe:
            # As servers do: ignores lingering connections of a server that just ended.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except (OSError, UnicodeError):  # not an address of this machine, or not an address
                return None
            bound: int = probe.getsockname()[1]
        return bound if self._claim(bound) else None

    def _claim(self, port: int) -> bool:
        """Binds an abstract Unix socket name: per network namespace, like ports, and freed with the process."""
        if sys.platform != "linux":
            return True
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0torchrelay-port-{port}")
        except OSError:
            claim.close()
            return False
        self._claims.append(claim)
        return True
