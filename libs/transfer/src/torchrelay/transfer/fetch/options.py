"""What one transfer is given, and what ends it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from torchrelay.transfer.fetch.source_policy import SourceRules
from torchrelay.transfer.fetch.sources import Receiver, SourceUpdates
from torchrelay.transfer.fetch.statistics import TransferStats
from torchrelay.transfer.transport.interface import TransferClass, Transport


class StopSignal(threading.Event):
    """Set when this transfer is over, or when its caller's own event is."""

    def __init__(self, stop: threading.Event | None) -> None:
        super().__init__()
        self._stop = stop

    def is_set(self) -> bool:
        return super().is_set() or (self._stop is not None and self._stop.is_set())


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """What a transfer is given: see ``follow``."""

    buffer_id: str
    receiver: Receiver
    transport: Transport
    rules: SourceRules
    transfer_class: TransferClass
    stall_s: float
    starve_s: float
    stats: TransferStats = field(default_factory=TransferStats)
    updates: SourceUpdates = field(default_factory=SourceUpdates)
