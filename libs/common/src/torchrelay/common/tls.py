"""TLS inside a cluster: one CA, a certificate for each process, and both ends of every connection show theirs.

Processes reach each other by addresses that change, so no certificate names a host: each carries the DNS name
``torchrelay.internal``, and a client expects this name of whomever it connects to. That a peer belongs to the cluster
is what the CA says; which peer it is, tickets say (``transfer.tickets``).
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

CLUSTER_NAME = "torchrelay.internal"


class TlsUnusable(ValueError):
    """The files do not make a TLS identity; the message names the setting to mend."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the CA (or several, while one replaces another), this process's certificate, and its key."""

    ca: Path
    cert: Path
    key: Path

    def as_settings(self) -> dict[str, str]:
        """By the names of the settings."""
        return {"tls_ca_file": str(self.ca), "tls_cert_file": str(self.cert), "tls_key_file": str(self.key)}


class Tls:
    """What the files give: credentials for gRPC, contexts for the data plane (TLS 1.3). All demand the peer's own
    certificate, of the same CA. The files are read once, here; raises ``TlsUnusable``.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._ca = _read(files.ca, "TORCHRELAY_TLS_CA_FILE")
        self._cert = _read(files.cert, "TORCHRELAY_TLS_CERT_FILE")
        self._key = _read(files.key, "TORCHRELAY_TLS_KEY_FILE")
        self.server_context = _context(ssl.PROTOCOL_TLS_SERVER, files)
        # Tickets of TLS would be bytes that a follower, which waits for chunks alone, has to take in; nothing resumes.
        self.server_context.num_tickets = 0
        self.client_context = _context(ssl.PROTOCOL_TLS_CLIENT, files)

    def server_credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(self._key, self._cert)], self._ca, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self._ca, self._key, self._cert)

    def check(self) -> None:
        """Raises ``TlsUnusable`` when peers would refuse this certificate now: expired, another CA's, another name."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.client_context.wrap_bio(to_client, to_server, server_hostname=CLUSTER_NAME)
        server = self.server_context.wrap_bio(to_server, to_client, server_side=True)
        try:
            for end in (client, server, client):
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
            server.do_handshake()
        except ssl.SSLCertVerificationError as error:
            raise TlsUnusable(
                f"every peer would refuse the certificate of TORCHRELAY_TLS_CERT_FILE: {error.verify_message}; "
                f"it must be valid now, of a CA in TORCHRELAY_TLS_CA_FILE, and name {CLUSTER_NAME}"
            ) from error


def _read(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsUnusable(f"{setting}: {path} cannot be read: {error.strerror}") from error


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(files.ca)
    except ssl.SSLError as error:
        raise TlsUnusable(f"TORCHRELAY_TLS_CA_FILE: {files.ca} holds no certificate in PEM ({error.reason})") from error
    try:
        # The empty password is for a key that is encrypted: without one, the terminal would be asked.
        context.load_cert_chain(files.cert, files.key, password="")
    except ssl.SSLError as error:
        raise TlsUnusable(
            f"TORCHRELAY_TLS_CERT_FILE and TORCHRELAY_TLS_KEY_FILE: {files.cert} and {files.key} are not a certificate "
            f"and its unencrypted key in PEM ({error.reason})"
        ) from error
    return context
