"""The epoch: workers and stores obey the scheduler with the highest one, so that a replaced scheduler can do no harm.

It starts at the time of the start in milliseconds, above that of any scheduler before. During start-up it is raised
above whatever the reports show; a higher one seen later belongs to a newer scheduler, and this one ends.
"""

from __future__ import annotations

from torchrelay.common.errors import StaleEpoch

STARTUP_S = 1.0


class Epoch:
    def __init__(self, started_at: float) -> None:
        self.value = int(started_at * 1000)
        self._startup_until = started_at + STARTUP_S

    def check(self, epoch: int, now: float) -> None:
        """A worker or store has seen ``epoch``. Raises ``StaleEpoch`` when a newer scheduler is at work."""
        if epoch <= self.value:
            return
        if now > self._startup_until:
            raise StaleEpoch(f"A scheduler with epoch {epoch} has taken over; this one has {self.value}.")
        self.value = epoch + 1

    def refused(self, now: float) -> bool:
        """Somebody refused a command for its epoch. True: another scheduler is active; False: the reports will tell."""
        return now > self._startup_until
