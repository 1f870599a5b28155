"""Join tokens: with one, a machine that does not have the cluster key obtains the keys of its store and workers.

A token is ``SCOPE.EXPIRES.MAC``: it is valid for ids that begin with its scope, until a Unix time in seconds.
"""

from __future__ import annotations

import hmac

from torchrelay.common.errors import CallerRefused, CallerUnknown
from torchrelay.common.identity.keys import framed_mac


def join_token(cluster_key: bytes, scope: str, expires_unix_s: int) -> str:
    """The token for ids that begin with ``scope``, which has the characters of an id; the empty one: for all ids."""
    return f"{scope}.{expires_unix_s}.{_mac(cluster_key, scope, str(expires_unix_s))}"


def check_join_token(cluster_key: bytes, token: str, node_id: str, now_unix_s: float) -> str:
    """Returns the scope.

    Raises ``CallerUnknown`` unless it is a token of this cluster, ``CallerRefused`` if not for this id and time.
    """
    scope, _, rest = token.partition(".")
    expires, _, mac = rest.partition(".")
    if not hmac.compare_digest(_mac(cluster_key, scope, expires).encode(), mac.encode()):
        raise CallerUnknown("the join token is not one of this cluster")
    if not node_id.startswith(scope):
        raise CallerRefused(f"the join token is for ids that begin with {scope!r}, not for {node_id!r}")
    if now_unix_s >= int(expires):
        raise CallerRefused("the join token has expired: make a new one")
    return scope


def _mac(cluster_key: bytes, scope: str, expires: str) -> str:
    return framed_mac(cluster_key, b"torchrelay join token", scope.encode(), expires.encode()).hex()
