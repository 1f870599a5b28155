"""The epoch at and after a start."""

from __future__ import annotations

import pytest

from torchrelay.common.errors import StaleEpoch
from torchrelay.common.net.load_reports import IDLE_EVERY_S, POLL_EVERY_S
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.service.epoch import STARTUP_S, Epoch


def test_the_epoch_rises_at_the_start_and_yields_later() -> None:
    epoch = Epoch(1000.0)
    assert epoch.value == 1_000_000
    epoch.check(1_050_000, "worker-1", 1, now=1000.5)
    assert epoch.value == 1_050_001
    epoch.check(1_050_001, "worker-1", 1, now=2000.0)
    with pytest.raises(StaleEpoch):
        epoch.check(1_050_002, "worker-1", 1, now=1000.1 + STARTUP_S)


def test_a_scheduler_yields_to_more_than_half_of_its_peers_only() -> None:
    epoch, now = Epoch(1000.0), 2000.0
    for _ in range(10):
        epoch.check(1_500_000, "worker-1", 4, now)  # one that turned, however often it says so
    epoch.check(1_500_001, "worker-2", 4, now)
    with pytest.raises(StaleEpoch, match="3 of 4"):
        epoch.check(1_500_001, "store-1", 4, now)


@pytest.mark.parametrize("num_peers", [1, 2])
def test_one_or_two_peers_have_to_agree(num_peers: int) -> None:
    epoch, now = Epoch(1000.0), 2000.0
    for number in range(num_peers - 1):
        epoch.check(1_500_000, f"worker-{number}", num_peers, now)
    with pytest.raises(StaleEpoch):
        epoch.check(1_500_000, "store-1", num_peers, now)


def test_a_peer_that_left_or_was_restarted_is_ahead_no_more() -> None:
    epoch, now = Epoch(1000.0), 2000.0
    epoch.check(1_500_000, "worker-1", 3, now)
    epoch.check(0, "worker-1", 3, now)  # a new process of it has heard of no scheduler
    epoch.check(1_500_000, "worker-2", 3, now)
    epoch.keep({"worker-1", "store-1"})
    epoch.check(1_500_000, "store-1", 2, now)
    with pytest.raises(StaleEpoch):
        epoch.check(1_500_000, "worker-1", 2, now)


@pytest.mark.parametrize("forged", [1_061_001, 1 << 62, (1 << 64) - 1])
@pytest.mark.parametrize("now", [1000.5, 1001.0])
def test_an_epoch_that_no_clock_explains_is_ignored(forged: int, now: float) -> None:
    """At the start it would be outbid, and no later scheduler could be; afterwards it would end this one."""
    epoch = Epoch(1000.0)
    epoch.check(forged, "worker-1", 1, now)
    epoch.check(forged, "worker-1", 1, now + STARTUP_S - 1)
    assert epoch.value == 1_000_000


def test_two_reports_of_what_stays_the_same_come_while_a_new_scheduler_settles() -> None:
    late_s = IDLE_EVERY_S + POLL_EVERY_S
    assert PolicyConfig().settle_s > 1.5 * late_s
    assert 1.5 * late_s < STARTUP_S
    assert PolicyConfig().stale_s > 4 * late_s
