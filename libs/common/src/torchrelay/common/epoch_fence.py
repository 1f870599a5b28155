"""The fence against a scheduler that is no longer the active one."""

from __future__ import annotations

from torchrelay.common.errors import StaleEpoch


class EpochFence:
    """Remembers the highest epoch that a command carried and refuses lower ones."""

    def __init__(self) -> None:
        self.highest = 0

    def check(self, epoch: int) -> None:
        """Raises ``StaleEpoch`` for a command of a lower epoch."""
        if epoch < self.highest:
            raise StaleEpoch(f"epoch {epoch} is stale; the current epoch is {self.highest}", field="epoch")
        self.highest = epoch
