"""Whom to follow, and who follows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchrelay.transfer.protocol.tickets import Ticket


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


class SourceUpdates:
    """Sources named while a transfer runs: put in by whoever plans, taken out by the transfer. Any thread may."""

    def __init__(self) -> None:
        self.num_striped = 1  # at least so many are to be followed at once
        self.is_urgent = False  # somebody waits by now
        self._sources: deque[SourceAddress] = deque()

    def add(self, sources: Iterable[SourceAddress], num_striped: int = 1, is_urgent: bool = False) -> None:
        self._sources.extend(sources)
        self.num_striped = max(self.num_striped, num_striped)
        self.is_urgent |= is_urgent

    @property
    def any_waiting(self) -> bool:
        return bool(self._sources)

    def take(self) -> list[SourceAddress]:
        """All that were added since, in that order."""
        return [self._sources.popleft() for _ in range(len(self._sources))]
