"""The fence against a scheduler that is no longer the active one."""

from __future__ import annotations

from collections.abc import Callable

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import InvalidRequest, StaleEpoch

# An epoch is the time of a scheduler's start, in milliseconds, by its own clock. A false one far in the future would
# fence every scheduler out for as long, so it is held against the reader's clock, with a tolerance for their
# difference: the clocks of a cluster's hosts have to agree within a minute.
MAX_EPOCH_LEAD_MS = 60_000


class EpochFence:
    """Remembers the highest epoch of a command or watch and refuses lower ones. ``clock``: microseconds since 1970."""

    def __init__(self, clock: Callable[[], int] = now_unix_us) -> None:
        self._clock = clock
        self.highest = 0

    def check(self, epoch: int) -> None:
        """Raises ``StaleEpoch`` for a lower epoch, ``InvalidRequest`` for one from the future."""
        if epoch < self.highest:
            raise StaleEpoch(f"epoch {epoch} is stale; the current epoch is {self.highest}", field="epoch")
        self.observe(epoch)

    def observe(self, epoch: int) -> None:
        """Fences out lower epochs, and refuses none itself. Raises ``InvalidRequest`` for one from the future."""
        lead_ms = epoch - self._clock() // 1000
        if lead_ms > MAX_EPOCH_LEAD_MS:
            raise InvalidRequest(
                f"epoch {epoch} is {lead_ms / 1000:.0f} s ahead of this host's clock, and "
                f"{MAX_EPOCH_LEAD_MS // 1000} s are allowed: synchronize this clock and the scheduler's",
                field="epoch",
            )
        self.highest = max(self.highest, epoch)
