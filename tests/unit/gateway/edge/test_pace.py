from __future__ import annotations

import pytest

from torchrelay.gateway.edge.pace import Pace
from torchrelay.gateway.edge.read_limits import BodyProgress, ReadLimits


def test_burst_is_followed_by_the_rate() -> None:
    pace = Pace(bytes_per_s=100.0, burst_bytes=50.0)
    assert pace.after(50, 10.0) == 0.0
    assert pace.after(25, 10.0) == 0.25
    assert pace.after(25, 10.25) == 0.25
    assert pace.after(0, 11.0) == -0.5  # the whole burst is allowed again


def test_idle_time_is_not_saved_up_beyond_the_burst() -> None:
    pace = Pace(bytes_per_s=100.0, burst_bytes=50.0)
    pace.after(10, 0.0)
    assert pace.after(150, 1000.0) == 1.0


LIMITS = ReadLimits(silence_s=30, min_bytes_per_s=1000)


@pytest.mark.parametrize(
    ("bytes_per_s", "ends_at_s"), [(0, 30), (1, 31), (100, 34), (900, 300), (1000, None), (1_000_000, None)]
)
def test_body_below_the_minimum_rate_ends(bytes_per_s: int, ends_at_s: int | None) -> None:
    progress = BodyProgress()
    for second in range(1, 2000):
        progress = progress.after(1.0, bytes_per_s * second)
        if fault := progress.fault(LIMITS):
            assert second == ends_at_s
            assert ("body_silence_s" if bytes_per_s == 0 else "min_body_bytes_per_s") in fault
            return
    assert ends_at_s is None


def test_early_bytes_allow_slowness_but_no_silence() -> None:
    progress = BodyProgress().after(1.0, 1_000_000)
    for _ in range(29):
        progress = progress.after(1.0, 1_000_000)
    assert progress.fault(LIMITS) is None
    assert "nothing of the body arrived for 30 s" in str(progress.after(1.0, 1_000_000).fault(LIMITS))
