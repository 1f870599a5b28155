"""The fence against a scheduler that is no longer the active one."""

from __future__ import annotations

from torchrelay.common.errors import StaleEpoch


class EpochFence:
    """The highest epoch that a command carried."""

    def __init__(self) -> None:
        self.highest = 0

    def check(self, epoch: int) -> None:
        """Raises ``StaleEpoch`` for a command of a lower epoch."""
        if epoch < self.highest:
            raise StaleEpoch(f"epoch {epoch} is over: epoch {self.highest} has begun", field="epoch")
        self.highest = epoch
