"""Free ports for the children of one `up`, kept from other installs until they are listened on."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from torchrelay.cli.errors import CliError

PREFERRED_HTTP_PORT = 8080


class Ports:
    """Chooses ports; between the choice and the child's listening no other `up` of this machine chooses the same."""

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []

    def close(self) -> None:
        for claim in self._claims:
            claim.close()

    def free(self, host: str = "127.0.0.1", preferred: Sequence[int] = ()) -> int:
        """The first of ``preferred`` to be had, else any. Raises ``Problem`` for an address that is not ours."""
        for port in preferred:
            if found := self._take(host, port):
                return found
        for _ in range(100):
            if found := self._take(host, 0):
                return found
        raise CliError(f"this machine cannot listen on {host}", "give one of its own addresses with --host")

    def exactly(self, host: str, port: int) -> int:
        """``port`` itself. Raises ``Problem`` when it is taken."""
        if not self._take(host, port):
            raise CliError(f"port {port} of {host} is taken", "choose another, or 0 for any free one")
        return port

    def _take(self, host: str, port: int) -> int | None:
        with socket.socket() as probe:
            # As servers do: connections of a server that ended a moment ago do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except (OSError, UnicodeError):  # an address nobody has, or that is none at all
                return None
            bound: int = probe.getsockname()[1]
        return bound if self._claim(bound) else None

    def _claim(self, port: int) -> bool:
        """A name in Linux's abstract socket space: per network namespace like ports, and gone with the process."""
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
