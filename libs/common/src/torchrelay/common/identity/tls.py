"""Mutual TLS inside a cluster: one CA, and a certificate for each process.

Addresses of processes change, so certificates name no host: all carry the DNS name ``torchrelay.internal``, and one
such as ``worker.torchrelay.internal`` for the part that their process plays: it says what that may call, and clients of
the part expect it. On the data plane tickets prove which node a peer is (``transfer.protocol.tickets``).
"""

from __future__ import annotations

import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import structlog

from torchrelay.common.identity.callers import CLUSTER_NAME, Caller, certificate_name

log = structlog.get_logger(module=__name__)

LOOK_EVERY_S = 1.0
_Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]


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


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """The contents of the files at one time; ``stamp`` differs from that of other contents.

    The contexts are for the data plane (TLS 1.3) and require a peer certificate of the same CA.
    """

    ca: bytes
    cert: bytes
    key: bytes
    server_context: ssl.SSLContext
    client_context: ssl.SSLContext
    stamp: _Stamp

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.ca)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def check(self, caller: Caller | None) -> None:
        """Raises ``TlsUnusable``; see ``Tls.check``."""
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


class Tls:
    """The TLS identity of a process, as its files are now: new connections use files that have been replaced.

    The files are looked at once in ``look_every_s`` at most. Contents that peers would reject, such as a certificate
    whose key is not written yet, are not used: then the last ones are. ``caller``: the part of the process, which a
    certificate has to name. Raises ``TlsUnusable`` when the first contents are not a certificate and its key.
    Thread-safe.
    """

    def __init__(self, files: TlsFiles, caller: Caller | None = None, look_every_s: float = LOOK_EVERY_S) -> None:
        self._files, self._caller, self._look_every_s = files, caller, look_every_s
        self._identity = _load(files)
        self._looked_at = time.monotonic()
        self._unusable: _Stamp | None = None  # contents that have been reported
        self._lock = threading.Lock()

    @property
    def identity(self) -> TlsIdentity:
        """The identity for a new connection."""
        if time.monotonic() - self._looked_at >= self._look_every_s and self._lock.acquire(blocking=False):
            try:
                self._look()
                self._looked_at = time.monotonic()
            finally:
                self._lock.release()
        return self._identity

    def _look(self) -> None:
        stamp = _stamp(self._files)
        if stamp == self._identity.stamp:
            return
        try:
            identity = _load(self._files)
            identity.check(self._caller)
        except TlsUnusable as error:  # until the next look: the other files may follow, or a certificate become valid
            if stamp != self._unusable:
                log.warning("certificate_unusable", error=str(error))
            self._unusable = stamp
            return
        self._identity, self._unusable = identity, None
        log.info("certificate_replaced", file=str(self._files.cert))

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC server, which asks at each new connection whether the certificate has changed."""
        served = self.identity

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            identity = self.identity
            if identity is served:
                return None
            served = identity
            return identity.server_configuration()

        return grpc.dynamic_ssl_server_credentials(
            served.server_configuration(),
            changed,  # type: ignore[arg-type]  # None is right: no change
            require_client_authentication=True,
        )

    def check(self, caller: Caller | None = None) -> None:
        """Raises ``TlsUnusable`` when peers would reject this certificate: expired, wrong CA or wrong name.

        ``caller``: the part of its process, which the certificate has to name.
        """
        self.identity.check(caller)


def _stamp(files: TlsFiles) -> _Stamp:
    """Returns inode, time of change and size of each file; None for those that cannot be read."""
    return tuple(_state(path) for path in (files.ca, files.cert, files.key))


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns, state.st_size


def _load(files: TlsFiles) -> TlsIdentity:
    stamp = _stamp(files)
    ca = _read(files.ca, "TORCHRELAY_TLS_CA_FILE")
    cert = _read(files.cert, "TORCHRELAY_TLS_CERT_FILE")
    key = _read(files.key, "TORCHRELAY_TLS_KEY_FILE")
    try:
        server_context = _context(ssl.PROTOCOL_TLS_SERVER, files)
        client_context = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    except OSError as error:  # a file is gone that was there just now
        raise TlsUnusable("the files of TORCHRELAY_TLS_* were replaced while they were read") from error
    # No session tickets: nothing resumes, and a follower would have to read them between chunks.
    server_context.num_tickets = 0
    if _stamp(files) != stamp:
        raise TlsUnusable("the files of TORCHRELAY_TLS_* were replaced while they were read")
    return TlsIdentity(ca, cert, key, server_context, client_context, stamp)


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
