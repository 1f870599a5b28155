"""Keys of nodes and of compiled code, and passwords of the brokers' users, derived from the cluster's key."""

from __future__ import annotations

import hashlib
import hmac
import struct

MIN_KEY_BYTES = 16
_LENGTH = struct.Struct(">Q")
_BLOCK_BYTES = 64  # of SHA-256
_INNER_PAD, _OUTER_PAD = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))


def framed(*parts: bytes) -> bytes:
    """``parts``, each with its length before it: no two sequences of parts give the same bytes."""
    return b"".join([_LENGTH.pack(len(part)) + part for part in parts])


def framed_mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over ``framed`` parts."""
    return hmac.digest(key, framed(*parts), "sha256")


class HmacKey:
    """HMAC-SHA256 of many messages by one key (RFC 2104): the blocks that depend on the key alone are hashed once."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        """``key``: at most a block, 64 bytes, as every key here is."""
        if len(key) > _BLOCK_BYTES:
            raise ValueError(f"the key must have at most {_BLOCK_BYTES} bytes")
        block = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(block.translate(_INNER_PAD))
        self._outer = hashlib.sha256(block.translate(_OUTER_PAD))

    def digest(self, message: bytes) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(message)
        outer.update(inner.digest())
        return outer.digest()


def derive_node_key(cluster_key: bytes, node_id: str) -> bytes:
    """The key of one store or worker, 32 bytes."""
    if len(cluster_key) < MIN_KEY_BYTES:
        raise ValueError(f"the cluster key must have at least {MIN_KEY_BYTES} bytes")
    return framed_mac(cluster_key, b"torchrelay node key", node_id.encode())


def derive_compiled_key(cluster_key: bytes, scope: str = "") -> bytes:
    """The key for the MACs of the compiled code that workers share, 32 bytes: of workers with a join token of this
    scope, or of the others.
    """
    return framed_mac(cluster_key, b"torchrelay compiled code", scope.encode())


def broker_password(cluster_key: bytes, broker: str, user: str) -> str:
    """The password of one user of one broker ("nats", "redis")."""
    # A letter first: nats-server reads a variable that begins with a digit as a number.
    return f"p{framed_mac(cluster_key, b'torchrelay broker password', broker.encode(), user.encode()).hex()}"
