"""Identities for tests: certificates of one cluster's CA, of another's, expired ones."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from torchrelay.cli.up.certificates import issue, make_ca, node_names
from torchrelay.common.identity.callers import Caller
from torchrelay.common.identity.tls import TlsFiles

DAY = timedelta(days=1)


class Authority:
    """A CA, and the files of the nodes it signs."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._now = datetime.now(UTC)
        self._ca = make_ca(self._now - 10 * DAY, self._now + DAY)
        (folder / "ca.crt").write_bytes(self._ca.cert.public_bytes(Encoding.PEM))

    def node(
        self,
        name: str,
        *callers: Caller,
        begin: timedelta = -2 * DAY,
        end: timedelta = DAY,
        dns: tuple[str, ...] | None = None,
    ) -> TlsFiles:
        """The files of a node that plays these parts; ``begin`` and ``end`` of its certificate are from now on.

        ``dns``: other names than such a node's.
        """
        identity = issue(self._ca, self._now + begin, self._now + end, dns or node_names(*callers))
        files = TlsFiles(self._folder / "ca.crt", self._folder / f"{name}.crt", self._folder / f"{name}.key")
        files.cert.write_bytes(identity.cert.public_bytes(Encoding.PEM))
        files.key.write_bytes(identity.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return files

    def expired(self) -> TlsFiles:
        return self.node("expired", end=-DAY)
