"""What one transfer is given, and what ends it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from torchrelay.transfer.shares import Tally
from torchrelay.transfer.sources import Offers, Receiver
from torchrelay.transfer.swarm import Rules
from torchrelay.transfer.transport import TransferClass, Transport


class Ending(threading.Event):
    """Set when this transfer is over, or when its caller's own event is."""

    def __init__(self, stop: threading.Event | None) -> None:
        super().__init__()
        self._stop = stop

    def is_set(self) -> bool:
        return super().is_set() or (self._stop is not None and self._stop.is_set())


@dataclass(frozen=True, slots=True)
class Terms:
    """What a transfer is given: see ``follow``."""

    buffer_id: str
    receiver: Receiver
    transport: Transport
    rules: Rules
    transfer_class: TransferClass
    stall_s: float
    starve_s: float
    tally: Tally = field(default_factory=Tally)
    offers: Offers = field(default_factory=Offers)
