"""What derives from the cluster's key: the keys of nodes, passwords of the brokers' users, and how."""

from __future__ import annotations

import hmac
import struct

MIN_KEY_BYTES = 16
_LENGTH = struct.Struct(">Q")


def framed(*parts: bytes) -> bytes:
    """``parts``, each with its length before it: no two sequences of parts give the same bytes."""
    return b"".join([_LENGTH.pack(len(part)) + part for part in parts])


def framed_mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over ``framed`` parts."""
    return hmac.digest(key, framed(*parts), "sha256")


def derive_node_key(cluster_key: bytes, node_id: str) -> bytes:
    """The key of one store or worker, 32 bytes."""
    if len(cluster_key) < MIN_KEY_BYTES:
        raise ValueError(f"the cluster key must have at least {MIN_KEY_BYTES} bytes")
    return framed_mac(cluster_key, b"torchrelay node key", node_id.encode())


def broker_password(cluster_key: bytes, broker: str, user: str) -> str:
    """The password of one user of one broker ("nats", "redis")."""
    # A letter first: nats-server reads a variable that begins with a digit as a number.
    return f"p{framed_mac(cluster_key, b'torchrelay broker password', broker.encode(), user.encode()).hex()}"
