"""The epoch: workers and stores obey the scheduler with the highest one, so that a replaced scheduler does no harm.

It begins as the start time in milliseconds, normally above that of any earlier scheduler. During start-up it is raised
above any epoch in the reports. A higher epoch seen later belongs to a newer scheduler, and this scheduler steps down
once more than half of the peers obey that one: a single peer, which may be compromised, cannot end a scheduler. Until
then the peers that obey the newer scheduler refuse this scheduler's commands. An epoch further in the future than
clocks differ, which no scheduler can have, is ignored.
"""

from __future__ import annotations

from collections.abc import Callable

from torchrelay.common.epoch_fence import MAX_EPOCH_LEAD_MS
from torchrelay.common.errors import StaleEpoch
from torchrelay.common.process.telemetry import get_logger

log = get_logger(__name__)
STARTUP_S = 1.0


class Epoch:
    def __init__(self, started_at: float) -> None:
        self.value = int(started_at * 1000)
        self._startup_until = started_at + STARTUP_S
        self._ahead: set[str] = set()  # workers and stores that have seen a higher epoch since the start-up
        self._ignored = 0

    def check(self, epoch: int, node_id: str, num_peers: int, now: float) -> None:
        """Checks the epoch that a worker or store, one of ``num_peers`` present, has seen.

        Raises ``StaleEpoch`` if a newer scheduler is active.
        """
        if epoch <= self.value:
            self._ahead.discard(node_id)
            return
        if epoch > now * 1000 + MAX_EPOCH_LEAD_MS:
            if epoch != self._ignored:  # log it once, not ten times a second
                self._ignored = epoch
                log.warning("epoch_ignored", epoch=epoch, lead_s=round(epoch / 1000 - now), own_epoch=self.value)
            return
        if now <= self._startup_until:
            self.value = epoch + 1
            return
        if node_id not in self._ahead:
            self._ahead.add(node_id)
            log.warning("epoch_ahead", epoch=epoch, peer=node_id, num_ahead=len(self._ahead), num_peers=num_peers)
        if 2 * len(self._ahead) > num_peers:
            raise StaleEpoch(
                f"a scheduler with epoch {epoch} has taken over {len(self._ahead)} of {num_peers} workers and stores; "
                f"this one has {self.value}"
            )

    def keep(self, is_present: Callable[[str], bool]) -> None:
        """Forgets peers that are gone."""
        self._ahead = set(filter(is_present, self._ahead))
