"""Whom to follow, and who follows."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrelay.transfer.tickets import Ticket


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """A holder, where its data plane listens ("host:port"), and the right to read from it."""

    holder_id: str
    address: str
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Receiver:
    """Who follows: a store's or worker's id and its node key."""

    id: str
    node_key: bytes = field(repr=False)
