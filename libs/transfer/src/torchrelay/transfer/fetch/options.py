"""The tuning of a transfer, and the handles through which other threads watch and control it."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

from torchrelay.transfer.fetch.sources import SourceUpdates
from torchrelay.transfer.fetch.statistics import TransferStats
from torchrelay.transfer.transport.interface import TransferClass, Transport
from torchrelay.transfer.transport.tcp import TcpTransport

STALL_S = 5.0


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """The tuning of ``follow``.

    A source is dropped after ``stall_s`` without a byte although something was due, or after ``starve_s`` in which no
    source delivered anything and this source had nothing to send.
    """

    transport: Transport = field(default_factory=TcpTransport)
    stall_s: float = STALL_S
    # Without this limit, copies that wait for each other in a cycle after a repair would wait forever.
    starve_s: float = math.inf
    num_striped: int = 1
    transfer_class: TransferClass = TransferClass.KV


@dataclass(frozen=True, slots=True)
class TransferControl:
    """The live handles of a running transfer; usable from any thread."""

    stop: threading.Event = field(default_factory=threading.Event)
    updates: SourceUpdates = field(default_factory=SourceUpdates)
    stats: TransferStats = field(default_factory=TransferStats)


class StopSignal(threading.Event):
    """An event that is set once this transfer is over or its caller's event is set."""

    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self._stop = stop

    def is_set(self) -> bool:
        return super().is_set() or self._stop.is_set()
