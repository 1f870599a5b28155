from __future__ import annotations

from torchrelay.gateway.edge.pace import Pace


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
