"""The fence lets the current epoch and higher ones pass."""

from __future__ import annotations

import pytest

from torchrelay.common.epoch_fence import MAX_EPOCH_LEAD_MS, EpochFence
from torchrelay.common.errors import InvalidRequest, StaleEpoch


def test_lower_epoch_is_refused() -> None:
    fence = EpochFence()
    fence.check(5)
    fence.check(5)
    with pytest.raises(StaleEpoch, match="epoch 4"):
        fence.check(4)
    assert fence.highest == 5


@pytest.mark.parametrize("lead_ms", [MAX_EPOCH_LEAD_MS + 1, 1 << 61])
def test_future_epoch_is_refused_without_fencing(lead_ms: int) -> None:
    now_ms = 1_700_000_000_000
    fence = EpochFence(lambda: now_ms * 1000)
    with pytest.raises(InvalidRequest, match="ahead of this host's clock, and 60 s are allowed"):
        fence.check(now_ms + lead_ms)
    fence.check(now_ms + MAX_EPOCH_LEAD_MS)
    assert fence.highest == now_ms + MAX_EPOCH_LEAD_MS
