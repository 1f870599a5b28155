"""Whom to follow, and who follows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
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


class Offers:
    """Sources named while a transfer runs: put in by whoever plans, taken out by the transfer. Any thread may."""

    def __init__(self) -> None:
        self._sources: deque[SourceAddress] = deque()

    def add(self, sources: Iterable[SourceAddress]) -> None:
        self._sources.extend(sources)

    def take(self) -> list[SourceAddress]:
        """All that were added since, in that order."""
        return [self._sources.popleft() for _ in range(len(self._sources))]
