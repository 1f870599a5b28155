"""The fence lets the current epoch and higher ones pass."""

from __future__ import annotations

import pytest

from torchrelay.common.epoch_fence import EpochFence
from torchrelay.common.errors import StaleEpoch


def test_a_lower_epoch_is_refused() -> None:
    fence = EpochFence()
    fence.check(5)
    fence.check(5)
    with pytest.raises(StaleEpoch, match="epoch 4"):
        fence.check(4)
    assert fence.highest == 5
