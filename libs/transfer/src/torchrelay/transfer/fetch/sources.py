"""The ends of a transfer, sources and receiver, as its caller specifies them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchrelay.transfer.protocol.tickets import Ticket
from torchrelay.transfer.transport.transfer_class import TransferClass


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """A holder, its data plane's address ("host:port"), and a ticket to read from it."""

    holder_id: str
    address: str
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Receiver:
    """The follower: a store's or worker's id and its node key."""

    id: str
    node_key: bytes = field(repr=False)


class SourceUpdates:
    """Changes to a running transfer: added by the planner, taken by the transfer. Thread-safe."""

    def __init__(self) -> None:
        self.num_striped = 1  # sources to follow at once, at least
        self.transfer_class: TransferClass | None = None  # the class requested last; None: the original one
        self._sources: deque[SourceAddress] = deque()

    def add(
        self,
        sources: Iterable[SourceAddress] = (),
        num_striped: int = 1,
        transfer_class: TransferClass | None = None,
    ) -> None:
        self._sources.extend(sources)
        self.num_striped = max(self.num_striped, num_striped)
        if transfer_class is not None:
            self.transfer_class = transfer_class

    @property
    def any_waiting(self) -> bool:
        return bool(self._sources)

    def take(self) -> list[SourceAddress]:
        """The sources added since the last call, in that order."""
        return [self._sources.popleft() for _ in range(len(self._sources))]
