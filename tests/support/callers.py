"""Tokens for tests, which call as several parts of a cluster at once."""

from __future__ import annotations

from torchrelay.common.identity.callers import Caller, call_token
from torchrelay.common.identity.keys import derive_node_key


def every_token(cluster_key: bytes, node_id: str) -> str:
    """Lets its bearer make every call of a node."""
    return call_token(derive_node_key(cluster_key, node_id), *Caller)
