"""Tickets: the right of one receiver to read one buffer from one holder, until it expires.

Every node has a key derived from the cluster's key. Only the scheduler knows the cluster's key and issues tickets. A
holder verifies its own tickets with its own key, with which it cannot issue tickets for other holders.

    session        = HMAC(holder key, fields)                  recomputed by the holder
    sealed_session = session XOR HMAC(receiver key, fields)    only the receiver can unseal it
    mac            = HMAC(holder key, fields, sealed_session)

Each side then proves that it knows the session key by a MAC over the other's fresh challenge. A stolen ticket is
worthless without the receiver's key. The receiver may reuse a ticket until it expires.
"""

from __future__ import annotations

import hmac
import os
import struct
from typing import Any

from torchrelay.common.identity.keys import HmacKey, framed, framed_mac
from torchrelay.common.identity.keys import derive_node_key as derive_node_key
from torchrelay.common.recent import Recent
from torchrelay.control.v1.types_pb2 import Ticket as Ticket
from torchrelay.transfer.errors import TicketExpired, TicketRefused, WrongHolder

NONCE_BYTES = 16
_MAX_NODES = 4096  # node keys that an issuer caches
CHALLENGE_BYTES = 32
PROOF_BYTES = SESSION_BYTES = 32
_EXPIRY = struct.Struct(">q")

_SESSION, _SEAL, _TICKET = framed(b"torchrelay session"), framed(b"torchrelay seal"), framed(b"torchrelay ticket")


class TicketIssuer:
    """Issues tickets; only the scheduler has one."""

    def __init__(self, cluster_key: bytes) -> None:
        self._cluster_key = cluster_key
        self._node_keys: Recent[str, HmacKey] = Recent(_MAX_NODES)

    def issue(self, buffer_id: str, holder_id: str, receiver_id: str, expires_unix_ms: int) -> Ticket:
        """A ticket to read a buffer."""
        return Ticket(**self.issue_fields(buffer_id, holder_id, receiver_id, expires_unix_ms))

    def issue_fields(self, buffer_id: str, holder_id: str, receiver_id: str, expires_unix_ms: int) -> dict[str, Any]:
        """The fields of a ticket, for a message that contains it: building the ticket first would copy it."""
        nonce = os.urandom(NONCE_BYTES)
        fields = _framed_fields(buffer_id, holder_id, receiver_id, expires_unix_ms, nonce)
        holder_key, receiver_key = self._node_key(holder_id), self._node_key(receiver_id)
        sealed_session = _xor(_session(fields, holder_key), _pad(fields, receiver_key))
        return {
            "buffer_id": buffer_id,
            "holder_id": holder_id,
            "receiver_id": receiver_id,
            "expires_unix_ms": expires_unix_ms,
            "nonce": nonce,
            "sealed_session": sealed_session,
            "mac": _ticket_mac(fields, sealed_session, holder_key),
        }

    def _node_key(self, node_id: str) -> HmacKey:
        key = self._node_keys.get(node_id)
        if key is None:
            key = self._node_keys[node_id] = HmacKey(derive_node_key(self._cluster_key, node_id))
        return key


def verify_ticket(ticket: Ticket, holder_id: str, holder_key: bytes, now_unix_ms: int) -> bytes:
    """The holder's side: returns the session key, which the receiver has yet to prove that it knows.

    Raises ``WrongHolder``, ``TicketExpired``, or ``TicketRefused`` for a wrong MAC.
    """
    if ticket.holder_id != holder_id:
        raise WrongHolder(f"the ticket is for holder {ticket.holder_id!r}, this is {holder_id!r}")
    key, fields = HmacKey(holder_key), _fields(ticket)
    if not hmac.compare_digest(ticket.mac, _ticket_mac(fields, ticket.sealed_session, key)):
        raise TicketRefused("the ticket's MAC does not match")
    check_expiry(ticket, now_unix_ms)
    return _session(fields, key)


def check_expiry(ticket: Ticket, now_unix_ms: int, grace_ms: int = 0) -> None:
    """Raises ``TicketExpired`` once the ticket has expired and the grace has passed."""
    if now_unix_ms >= ticket.expires_unix_ms + grace_ms:
        raise TicketExpired(f"the ticket for {ticket.buffer_id} expired {now_unix_ms - ticket.expires_unix_ms} ms ago")


def unseal_session(ticket: Ticket, receiver_key: bytes) -> bytes:
    """The receiver's side: the session key; with any other node's key, 32 meaningless bytes."""
    if len(ticket.sealed_session) != SESSION_BYTES:
        raise TicketRefused("the ticket has no sealed session key")
    return _xor(ticket.sealed_session, _pad(_fields(ticket), HmacKey(receiver_key)))


def prove_session(session: bytes, side: bytes, challenge: bytes) -> bytes:
    """The answer of ``side`` (b"holder" or b"receiver") to a challenge; compare with ``hmac.compare_digest``."""
    return framed_mac(session, b"torchrelay proof", side, challenge)


def _session(fields: bytes, holder_key: HmacKey) -> bytes:
    return holder_key.digest(_SESSION + fields)


def _pad(fields: bytes, receiver_key: HmacKey) -> bytes:
    return receiver_key.digest(_SEAL + fields)


def _ticket_mac(fields: bytes, sealed_session: bytes, holder_key: HmacKey) -> bytes:
    return holder_key.digest(_TICKET + fields + framed(sealed_session))


def _fields(ticket: Ticket) -> bytes:
    return _framed_fields(ticket.buffer_id, ticket.holder_id, ticket.receiver_id, ticket.expires_unix_ms, ticket.nonce)


def _framed_fields(buffer_id: str, holder_id: str, receiver_id: str, expires_unix_ms: int, nonce: bytes) -> bytes:
    expiry = _EXPIRY.pack(expires_unix_ms)
    return framed(buffer_id.encode(), holder_id.encode(), receiver_id.encode(), expiry, nonce)


def _xor(left: bytes, right: bytes) -> bytes:
    assert len(left) == len(right)
    return (int.from_bytes(left) ^ int.from_bytes(right)).to_bytes(len(left))
