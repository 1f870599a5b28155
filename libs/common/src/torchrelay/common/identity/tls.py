"""Mutual TLS inside a cluster: one CA, and a certificate for each process.

Addresses of processes change, so certificates name no host: all carry the DNS name ``torchrelay.internal``, and one
such as ``worker.torchrelay.internal`` for the part that their process plays: it says what that may call, and clients of
the part expect it. On the data plane tickets prove which node a peer is (``transfer.protocol.tickets``).
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from torchrelay.common.identity.callers import CLUSTER_NAME, Caller, certificate_name


class TlsUnusable(ValueError):
    """The files do not make a TLS identity; the message names the setting."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the CA (several during a rotation), this process's certificate, and its key."""

    ca: Path
    cert: Path
    key: Path

    def as_settings(self) -> dict[str, str]:
        """The paths by setting name."""
        return {"tls_ca_file": str(self.ca), "tls_cert_file": str(self.cert), "tls_key_file": str(self.key)}


class Tls:
    """Credentials for gRPC and contexts for the data plane (TLS 1.3), which require a peer certificate of the same CA.

    Reads the files once; raises ``TlsUnusable``.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._ca = _read(files.ca, "TORCHRELAY_TLS_CA_FILE")
        self._cert = _read(files.cert, "TORCHRELAY_TLS_CERT_FILE")
        self._key = _read(files.key, "TORCHRELAY_TLS_KEY_FILE")
        self.server_context = _context(ssl.PROTOCOL_TLS_SERVER, files)
        # No session tickets: nothing resumes, and a follower would have to read them between chunks.
        self.server_context.num_tickets = 0
        self.client_context = _context(ssl.PROTOCOL_TLS_CLIENT, files)

    def server_credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(self._key, self._cert)], self._ca, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self._ca, self._key, self._cert)

    def check(self, caller: Caller | None = None) -> None:
        """Raises ``TlsUnusable`` when peers would reject this certificate: expired, wrong CA or wrong name.

        ``caller``: the part of its process, which the certificate has to name.
        """
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
                f"peers would reject the certificate of TORCHRELAY_TLS_CERT_FILE: {error.verify_message}; "
                f"it must be valid now, signed by a CA in TORCHRELAY_TLS_CA_FILE, and name {CLUSTER_NAME}"
            ) from error
        proven: Any = client.getpeercert()
        names = [name for kind, name in proven["subjectAltName"] if kind == "DNS"]
        if caller is not None and certificate_name(caller) not in names:
            raise TlsUnusable(
                f"the certificate of TORCHRELAY_TLS_CERT_FILE names {', '.join(names)}, which lets its owner "
                f"call nobody: a {caller} needs one with the DNS name {certificate_name(caller)} too"
            )


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
        raise TlsUnusable(f"TORCHRELAY_TLS_CA_FILE: {files.ca} contains no PEM certificate ({error.reason})") from error
    try:
        # The empty password makes an encrypted key fail instead of prompting on the terminal.
        context.load_cert_chain(files.cert, files.key, password="")
    except ssl.SSLError as error:
        raise TlsUnusable(
            f"TORCHRELAY_TLS_CERT_FILE and TORCHRELAY_TLS_KEY_FILE: {files.cert} and {files.key} are not a certificate "
            f"and its unencrypted key in PEM ({error.reason})"
        ) from error
    return context
