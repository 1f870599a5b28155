"""The epoch: workers and stores obey the scheduler with the highest one, so that a replaced scheduler does no harm.

It begins as the start time in milliseconds, normally above that of any earlier scheduler. During start-up it is raised
above any epoch in the reports; a higher one seen later belongs to a newer scheduler, and this one steps down. An epoch
that no scheduler can have, further in the future than clocks differ, counts for nothing.
"""

from __future__ import annotations

from torchrelay.common.epoch_fence import MAX_EPOCH_LEAD_MS
from torchrelay.common.errors import StaleEpoch
from torchrelay.common.process.telemetry import get_logger

log = get_logger(__name__)
STARTUP_S = 1.0


class Epoch:
    def __init__(self, started_at: float) -> None:
        self.value = int(started_at * 1000)
        self._startup_until = started_at + STARTUP_S
        self._ignored = 0

    def check(self, epoch: int, now: float) -> None:
        """A worker or store has seen ``epoch``. Raises ``StaleEpoch`` if a newer scheduler is active."""
        if epoch <= self.value:
            return
        if epoch > now * 1000 + MAX_EPOCH_LEAD_MS:
            if epoch != self._ignored:  # ten reports a second say the same
                self._ignored = epoch
                log.warning("epoch_ignored", epoch=epoch, lead_s=round(epoch / 1000 - now), own_epoch=self.value)
            return
        if now > self._startup_until:
            raise StaleEpoch(f"A scheduler with epoch {epoch} has taken over; this one has {self.value}.")
        self.value = epoch + 1
