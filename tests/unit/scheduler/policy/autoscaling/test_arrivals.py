"""The arrival history of a model."""

from __future__ import annotations

from torchrelay.scheduler.policy.autoscaling.arrivals import MEAN_S, WINDOW_S, ArrivalRate, Arrivals


def test_rate_covers_last_seconds() -> None:
    history = Arrivals().of("v")
    assert history.rate(0.0) == ArrivalRate()
    for number in range(20):
        history.arrive(100, 0.5, 60.0, 1.0, number * 0.5, is_unused=False)
    assert history.rate(9.9) == ArrivalRate(20 / WINDOW_S, 2000 / WINDOW_S)
    assert history.rate(14.5) == ArrivalRate(10 / WINDOW_S, 1000 / WINDOW_S)
    assert history.rate(40.0) == ArrivalRate()


def test_rate_counts_latest_requests_only() -> None:
    history = Arrivals().of("v")
    for number in range(5000):
        history.arrive(10, 0.5, 60.0, 1.0, number * 0.001, is_unused=False)
    rate = history.rate(5.0)
    assert 900 < rate.requests_per_s < 1100 and 9000 < rate.tokens_per_s < 11000


def test_long_run_rate_is_expected_between_bursts() -> None:
    """The most popular model, idle between two bursts, gave its slot to the first request of any other."""
    history = Arrivals().of("v")
    assert history.expected_per_s(0.0) == 0.0
    for burst in range(10):
        for number in range(50):
            history.arrive(10, 0.5, 60.0, 1.0, burst * 50.0 + number * 0.1, is_unused=False)
    assert history.expected_per_s(455.0) == 5.0  # of late
    assert history.rate(499.0) == ArrivalRate() and 0.9 < history.expected_per_s(499.0) < 1.2
    assert history.expected_per_s(499.0 + 5 * MEAN_S) < 0.01
    assert history.expected_per_s(1e9) < 1e-9


def test_gaps_are_times_without_requests() -> None:
    arrivals = Arrivals()
    history = arrivals.of("v")
    history.arrive(100, 0.5, 60.0, 1.0, 0.0, is_unused=True)
    for number in range(1, 17):
        history.arrive(100, 0.5, 60.0, 1.0, 1000.0 * number - 995.0, is_unused=False)
        gap_s = 2.0 if number % 2 else 500.0
        arrivals.used("v", 1000.0 * number - gap_s)  # an answer ends so long before the next request
        history.arrive(100, 0.5, 60.0, 1.0, 1000.0 * number, is_unused=True)
    assert history.idle_gaps.plan(60.0, 1.0).keep_s == 2.0
    arrivals.used("unknown", 1.0)


def test_late_requests_count_from_their_admission() -> None:
    history = Arrivals().of("v")
    for at in (1.0, 2.0, 3.0):
        history.late(at)
    assert [history.num_late(since) for since in (0.0, 1.0, 2.5, 3.0)] == [3, 2, 1, 0]
