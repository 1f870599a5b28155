"""The epoch at and after a start."""

from __future__ import annotations

import pytest

from torchrelay.common.errors import StaleEpoch
from torchrelay.scheduler.service.epoch import STARTUP_S, Epoch


def test_epoch_rises_at_start_and_yields_later() -> None:
    epoch = Epoch(1000.0)
    assert epoch.value == 1_000_000
    epoch.check(1_050_000, "worker-1", 1, now=1000.5)
    assert epoch.value == 1_050_001
    epoch.check(1_050_001, "worker-1", 1, now=2000.0)
    with pytest.raises(StaleEpoch):
        epoch.check(1_050_002, "worker-1", 1, now=1000.1 + STARTUP_S)


def test_scheduler_yields_to_majority_of_peers() -> None:
    epoch, now = Epoch(1000.0), 2000.0
    for _ in range(10):
        epoch.check(1_500_000, "worker-1", 4, now)  # one that turned, however often it says so
    epoch.check(1_500_001, "worker-2", 4, now)
    with pytest.raises(StaleEpoch, match="3 of 4"):
        epoch.check(1_500_001, "store-1", 4, now)


@pytest.mark.parametrize("num_peers", [1, 2])
def test_all_of_one_or_two_peers_must_agree(num_peers: int) -> None:
    epoch, now = Epoch(1000.0), 2000.0
    for number in range(num_peers - 1):
        epoch.check(1_500_000, f"worker-{number}", num_peers, now)
    with pytest.raises(StaleEpoch):
        epoch.check(1_500_000, "store-1", num_peers, now)


def test_departed_or_restarted_peer_is_not_ahead() -> None:
    epoch, now = Epoch(1000.0), 2000.0
    epoch.check(1_500_000, "worker-1", 3, now)
    epoch.check(0, "worker-1", 3, now)  # a new process of it knows no scheduler
    epoch.check(1_500_000, "worker-2", 3, now)
    epoch.keep({"worker-1", "store-1"}.__contains__)
    epoch.check(1_500_000, "store-1", 2, now)
    with pytest.raises(StaleEpoch):
        epoch.check(1_500_000, "worker-1", 2, now)


@pytest.mark.parametrize("forged", [1_061_001, 1 << 62, (1 << 64) - 1])
@pytest.mark.parametrize("now", [1000.5, 1001.0])
def test_impossible_epoch_is_ignored(forged: int, now: float) -> None:
    """At the start it would be outbid, and no later scheduler could be; afterwards it would end this one."""
    epoch = Epoch(1000.0)
    epoch.check(forged, "worker-1", 1, now)
    epoch.check(forged, "worker-1", 1, now + STARTUP_S - 1)
    assert epoch.value == 1_000_000
