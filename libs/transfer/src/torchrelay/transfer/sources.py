"""Whom to follow next: the rota of sources of one transfer, as a pure decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchrelay.common.errors import NotFound, PermissionDenied
from torchrelay.transfer.errors import BufferLost
from torchrelay.transfer.tickets import Ticket

MAX_STRIKES = 2  # failures in a row, with no chunk between them, that a source is allowed


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


class Rota:
    """Goes through the sources in turn; one that refuses, or fails twice with no chunk between, is struck off.

    Every turn either brings a chunk or costs a strike, hence it ends.
    """

    def __init__(self, sources: Sequence[SourceAddress]) -> None:
        self._sources = list(sources)
        self._strikes = [0] * len(sources)
        self._turn = 0
        self.failures: list[tuple[str, Exception]] = []

    def current(self) -> SourceAddress | None:
        """The source to follow now; None when all are struck off."""
        for step in range(len(self._sources)):
            turn = (self._turn + step) % len(self._sources)
            if self._strikes[turn] < MAX_STRIKES:
                self._turn = turn
                return self._sources[turn]
        return None

    def progressed(self) -> None:
        """The current source has brought a chunk."""
        self._strikes[self._turn] = 0

    def failed(self, error: Exception) -> None:
        """The current source has failed: the next one's turn."""
        # A refusal stays a refusal; a broken connection or a damaged chunk deserves one more try.
        final = isinstance(error, PermissionDenied | NotFound | BufferLost)
        self._strikes[self._turn] += MAX_STRIKES if final else 1
        self.failures.append((self._sources[self._turn].holder_id, error))
        self._turn += 1
