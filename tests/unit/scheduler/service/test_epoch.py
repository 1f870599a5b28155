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
    epoch.check(1_050_000, now=1000.5)
    assert epoch.value == 1_050_001
    epoch.check(1_050_001, now=2000.0)
    with pytest.raises(StaleEpoch):
        epoch.check(1_050_002, now=1000.1 + STARTUP_S)


@pytest.mark.parametrize("forged", [1_061_001, 1 << 62, (1 << 64) - 1])
@pytest.mark.parametrize("now", [1000.5, 1001.0])
def test_an_epoch_that_no_clock_explains_is_ignored(forged: int, now: float) -> None:
    """At the start it would be outbid, and no later scheduler could be; afterwards it would end this one."""
    epoch = Epoch(1000.0)
    epoch.check(forged, now)
    epoch.check(forged, now + STARTUP_S - 1)
    assert epoch.value == 1_000_000


def test_two_reports_of_what_stays_the_same_come_while_a_new_scheduler_settles() -> None:
    late_s = IDLE_EVERY_S + POLL_EVERY_S
    assert PolicyConfig().settle_s > 1.5 * late_s
    assert 1.5 * late_s < STARTUP_S
    assert PolicyConfig().stale_s > 4 * late_s
