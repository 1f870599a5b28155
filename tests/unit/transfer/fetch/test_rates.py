"""Rates on a simulated clock, what is displayed and when a source counts as slow; statistics of a transfer."""

from __future__ import annotations

import pytest

from torchrelay.transfer.fetch.rates import DecayingRate, RateMonitor
from torchrelay.transfer.fetch.sources import Receiver
from torchrelay.transfer.fetch.statistics import TransferStats

STEP_S = 0.005


def run(monitor: RateMonitor, rate: float, seconds: float, *, busy: bool = True, sharing: bool = False) -> float:
    """Feeds a steady rate until the monitor reports slow, or for this long; returns how long it took."""
    for step in range(round(seconds / STEP_S)):
        monitor.record(int(rate * STEP_S), STEP_S, busy=busy, sharing=sharing)
        if monitor.slow:
            return (step + 1) * STEP_S
    return seconds


def known(rate: float = 50e6) -> RateMonitor:
    monitor = RateMonitor()
    run(monitor, rate, 1.0)
    assert monitor.recent == pytest.approx(rate, rel=0.01)
    assert monitor.baseline == pytest.approx(rate, rel=0.01)
    return monitor


@pytest.mark.parametrize(
    ("share", "earliest_s", "latest_s"), [(0.0, 0.1, 0.2), (0.25, 0.1, 0.2), (0.5, 0.2, 0.3), (0.6, 0.4, 0.6)]
)
def test_deeper_rate_drop_detected_sooner(share: float, earliest_s: float, latest_s: float) -> None:
    monitor = known()
    assert earliest_s <= run(monitor, share * 50e6, 2.0) <= latest_s
    assert monitor.slow


@pytest.mark.parametrize("share", [0.75, 0.9, 2.0])
def test_three_quarters_of_rate_is_not_slow(share: float) -> None:
    monitor = known()
    run(monitor, share * 50e6, 5.0)
    assert not monitor.slow


def test_short_gaps_are_forgotten() -> None:
    monitor = known()
    for _ in range(20):
        run(monitor, 0.0, 0.05)
        run(monitor, 50e6, 0.15)
    assert not monitor.slow


def test_time_without_anything_to_send_does_not_count() -> None:
    monitor = known()
    run(monitor, 5e6, 3.0, busy=False)
    assert not monitor.slow
    assert monitor.baseline == pytest.approx(50e6, rel=0.01)


def test_forwarder_is_measured_by_its_incoming_rate() -> None:
    """Links let short bursts through: a forwarder may never be busy for long and turn slow all the same."""
    monitor = RateMonitor()
    run(monitor, 50e6, 1.0, busy=False)
    assert monitor.baseline == pytest.approx(50e6, rel=0.05)
    assert run(monitor, 12e6, 1.0) <= 0.3
    assert monitor.slow


def test_window_recovers_at_former_rate() -> None:
    monitor = known()
    run(monitor, 10e6, 1.0)
    for _ in range(100):
        monitor.record(int(30e6 * STEP_S), STEP_S, busy=True, sharing=False)
    assert monitor.slow
    for _ in range(100):
        monitor.record(int(30e6 * STEP_S), STEP_S, busy=True, sharing=True)
    assert not monitor.slow


def test_displayed_rate_settles_quickly_and_decays() -> None:
    rate = DecayingRate(begun_at=10.0)
    assert rate.bytes_per_s(10.0) == 0.0
    for step in range(1, 101):
        rate.add(500_000, 10.0 + step * 0.01)
        if step > 10:
            assert rate.bytes_per_s(10.0 + step * 0.01) == pytest.approx(50e6, rel=0.2)
    assert rate.bytes_per_s(14.0) < 1e6


def test_statistics_report_bytes_errors_and_sources() -> None:
    stats = TransferStats()
    assert (stats.largest, stats.by_source(), stats.num_repairs) == ("", [], 0)
    stats.joined("host-a")
    assert stats.largest == "host-a"
    stats.received("host-a", 10)
    stats.joined("host-b")
    stats.received("host-b", 30)
    stats.failed("host-a", "it broke")
    stats.left("host-a")
    stats.repaired(2)
    first, second = stats.by_source()
    assert (first.holder_id, first.num_bytes, first.bytes_per_s) == ("host-a", 10, 0.0)
    assert (first.following, first.error) == (False, "it broke")
    assert (second.holder_id, second.num_bytes, second.following, second.error) == ("host-b", 30, True, "")
    assert second.bytes_per_s > 0
    assert stats.largest == "host-b"
    assert stats.num_repairs == 2


def test_key_never_printed() -> None:
    assert "secret" not in repr(Receiver("host-r", b"secret"))
