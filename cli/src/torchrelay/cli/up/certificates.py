"""Certificates of an embedded install: a CA, and a certificate for each process and for `up` itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from torchrelay.common.identity.callers import CLUSTER_NAME, Caller, certificate_name
from torchrelay.common.identity.tls import Tls, TlsFiles, TlsUnusable

CA_LIFE = timedelta(days=3650)
CERT_LIFE = timedelta(days=730)
RENEW_BEFORE = timedelta(days=365)  # an `up` may run this long
MAX_CLOCK_SKEW = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate and its key."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def ends_within(self, span: timedelta, now: datetime) -> bool:
        return self.cert.not_valid_after_utc - now < span


def ensure_certificates(folder: Path, nodes: Mapping[str, Caller], now: datetime | None = None) -> dict[str, TlsFiles]:
    """The TLS files of each node in ``folder``, created if missing, renewed when damaged or near expiry.

    Call while no process of the install runs: those with the old CA would reject the new one.
    Raises ``OSError`` when the folder cannot be written.
    """
    now = now or datetime.now(UTC)
    folder.mkdir(mode=0o700, exist_ok=True)
    ca_file, ca_key_file = folder / "ca.crt", folder / "ca.key"
    files = {name: TlsFiles(ca_file, folder / f"{name}.crt", folder / f"{name}.key") for name in nodes}
    ca = _load(ca_file, ca_key_file)
    for name, caller in nodes.items():
        if _are_valid(files[name], caller, now):
            continue
        if ca is None or ca.ends_within(CERT_LIFE, now):  # no certificate outlives its CA
            ca = make_ca(now, now + CA_LIFE)
            _write(ca, ca_file, ca_key_file)
            return ensure_certificates(folder, nodes, now)  # those before were of the old one
        _write(issue(ca, now, now + CERT_LIFE, node_names(caller)), files[name].cert, files[name].key)
    return files


def node_names(*callers: Caller) -> tuple[str, ...]:
    """The DNS names of a node's certificate: the cluster's, and one for each part that it plays."""
    return (CLUSTER_NAME, *map(certificate_name, callers))


def make_ca(now: datetime, end: datetime) -> Identity:
    """A self-signed CA that signs only node certificates."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Torchrelay cluster CA")
    cert = (
        _builder(name, name, key, now, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Identity(cert, key)


def issue(ca: Identity, now: datetime, end: datetime, dns_names: Sequence[str]) -> Identity:
    """A node's certificate, for server and client use."""
    key = ec.generate_private_key(ec.SECP256R1())
    both_ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    cert = (
        _builder(_name("Torchrelay node"), ca.cert.subject, key, now, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(both_ends, critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in dns_names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key()), critical=False)
        .sign(ca.key, hashes.SHA256())
    )
    return Identity(cert, key)


def _are_valid(files: TlsFiles, caller: Caller, now: datetime) -> bool:
    node = _load(files.cert, files.key)
    if node is None or node.ends_within(RENEW_BEFORE, now):
        return False
    try:
        Tls(files).check(caller)
    except TlsUnusable:
        return False
    return True


def _load(cert_file: Path, key_file: Path) -> Identity | None:
    """None: the files are missing, or are not a matching pair."""
    try:
        cert = x509.load_pem_x509_certificate(cert_file.read_bytes())
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
    except (FileNotFoundError, ValueError, TypeError):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        return None
    return Identity(cert, key)


def _write(identity: Identity, cert_file: Path, key_file: Path) -> None:
    """Replaces each file atomically; a mismatched pair is detected at the next start."""
    pem = serialization.Encoding.PEM
    key = identity.key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for path, content, mode in ((key_file, key, 0o600), (cert_file, identity.cert.public_bytes(pem), 0o644)):
        draft = path.with_suffix(f"{path.suffix}.draft")
        draft.unlink(missing_ok=True)  # left by a killed start
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        draft.replace(path)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - MAX_CLOCK_SKEW)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
