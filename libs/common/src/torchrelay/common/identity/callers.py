"""Callers between the processes of a cluster, and the tokens and certificate names that prove their identity."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import TypeAlias

from torchrelay.common.errors import CallerRefused, CallerUnknown
from torchrelay.common.identity.keys import framed_mac

CLUSTER_NAME = "torchrelay.internal"
SCHEDULER_NODE = "@scheduler"  # its id as a node that is called; no worker or store can have it
_SEPARATOR = ","  # of the tokens of a process that is several callers


class Caller(StrEnum):
    """The part that a process plays in the cluster, for its calls and for calls to it."""

    SCHEDULER = "scheduler"
    GATEWAY = "gateway"
    STORE = "store"
    WORKER = "worker"
    CLI = "cli"


MethodCallers: TypeAlias = Mapping[str, Collection[Caller]]  # by method: /torchrelay.control.v1.Worker/Load
# And callers without a token: for a method that checks a credential of its own, or whose answers are for everybody.
ANYONE = frozenset(Caller)


def certificate_name(caller: Caller) -> str:
    """The DNS name by which a certificate proves its owner's part: ``worker.torchrelay.internal``."""
    return f"{caller}.{CLUSTER_NAME}"


def call_token(node_key: bytes, *callers: Caller) -> str:
    """The token with which these callers call the node with this key; no other node accepts it."""
    return _SEPARATOR.join(framed_mac(node_key, b"torchrelay call", caller.encode()).hex() for caller in callers)


class CallCheck:
    """Checks the callers of a node: by certificate where ``is_tls``, otherwise by a token made for this node.

    Every call is refused unless ``allow`` has named its method.
    """

    def __init__(self, node_key: bytes, *, is_tls: bool) -> None:
        self._is_tls = is_tls
        self._tokens = {caller: call_token(node_key, caller).encode() for caller in Caller}
        self._allowed: dict[str, frozenset[Caller]] = {}

    def allow(self, methods: MethodCallers) -> None:
        self._allowed |= {method: frozenset(callers) for method, callers in methods.items()}

    def check(self, method: str, token: str, certificate_names: Collection[str]) -> None:
        """Raises ``CallerUnknown`` without a valid token, ``CallerRefused`` for a method that it may not call."""
        allowed = self._allowed.get(method, frozenset())
        if allowed == ANYONE:
            return
        callers = self._by_certificate(certificate_names) if self._is_tls else self._by_token(token)
        if not callers & allowed:
            fault = (
                f"{' and '.join(sorted(callers))} may not call" if callers else "this certificate names no caller of"
            )
            raise CallerRefused(f"{fault} {method}; allowed: {', '.join(sorted(allowed)) or 'nobody'}")

    def _by_certificate(self, names: Collection[str]) -> frozenset[Caller]:
        return frozenset(caller for caller in Caller if certificate_name(caller) in names)

    def _by_token(self, token: str) -> frozenset[Caller]:
        tokens = token.encode().split(_SEPARATOR.encode(), len(Caller))
        callers = frozenset(
            caller for caller, known in self._tokens.items() if any(hmac.compare_digest(known, each) for each in tokens)
        )
        if not callers:
            raise CallerUnknown(
                "the caller's token is not one of this cluster for this node" if token else "the call carries no token"
            )
        return callers
