"""The epoch: workers and stores obey the scheduler with the highest one, so that a replaced scheduler does no harm.

It begins as the start time in milliseconds, normally above that of any earlier scheduler. During start-up it is raised
above any epoch in the reports; a higher one seen later belongs to a newer scheduler, and this one steps down.
"""

from __future__ import annotations

from torchrelay.common.errors import StaleEpoch

STARTUP_S = 1.0


class Epoch:
    def __init__(self, started_at: float) -> None:
        self.value = int(started_at * 1000)
        self._startup_until = started_at + STARTUP_S

    def check(self, epoch: int, now: float) -> None:
        """A worker or store has seen ``epoch``. Raises ``StaleEpoch`` if a newer scheduler is active."""
        if epoch <= self.value:
            return
        if now > self._startup_until:
            raise StaleEpoch(f"A scheduler with epoch {epoch} has taken over; this one has {self.value}.")
        self.value = epoch + 1

    def refused(self, now: float) -> bool:
        """A peer refused a command for its epoch. True: another scheduler is active; False: still starting up."""
        return now > self._startup_until
