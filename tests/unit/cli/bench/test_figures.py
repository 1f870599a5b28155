"""Figures of a load."""

from __future__ import annotations

import pytest

from tests.unit.cli.bench.phases import phase
from torchrelay.cli.bench.answered import Answered
from torchrelay.cli.bench.figures import Held, bill_dollars, cold_of, figures_of, per_million, spread_of
from torchrelay.cli.bench.targets import read_targets

TARGETS = read_targets("0.5,0.1")
PRICE = {"prompt_nano": 100, "cached_nano": 25, "output_nano": 400}


def answered(ttft_s: float, tpot_s: float, **fields: object) -> Answered:
    """An answer of eleven tokens to a prompt of a hundred, twenty of them cached."""
    times = {"due_s": 1.0, "sent_s": 1.0, "first_s": 1.0 + ttft_s, "last_s": 1.0 + ttft_s + 10 * tpot_s, "ended_s": 9.0}
    counts = {"num_prompt_tokens": 100, "num_cached_tokens": 20, "num_output_tokens": 11, "gaps_s": (tpot_s,) * 10}
    return Answered(**{**times, **counts, **fields})  # type: ignore[arg-type]


def test_goodput_counts_requests_that_met_both_targets() -> None:
    runs = [answered(0.4, 0.05), answered(0.6, 0.05), answered(0.4, 0.2), Answered(1.0, 1.3, 10.0, error="full")]
    figures = figures_of(runs, TARGETS)
    assert (figures.num_completed, figures.num_failed, figures.num_met, figures.seconds) == (3, 1, 1, 10.0)
    assert (figures.attainment, figures.goodput_per_s) == (0.25, 0.1)
    assert (figures.num_output_tokens, figures.output_tokens_per_s) == (33, 3.3)
    assert figures.errors == {"full": 1} and figures.late_s == pytest.approx(0.3)
    assert figures.ttft_s is not None and figures.ttft_s.p50 == pytest.approx(0.4)
    assert figures.tbt_s is not None and figures.tbt_s.p99 == 0.2


def test_failed_requests_alone_have_no_latencies() -> None:
    figures = figures_of([Answered(0.0, 0.0, 1.0, error="full")], TARGETS)
    assert (figures.ttft_s, figures.tbt_s, figures.tpot_s, figures.attainment) == (None, None, None, 0.0)
    assert per_million(0.0, figures) is None
    with pytest.raises(ValueError, match="no request has ended"):
        figures_of([], TARGETS)


def test_percentiles_are_values_that_were_measured() -> None:
    spread = spread_of(float(number) for number in range(100, 0, -1))
    assert spread is not None and (spread.p50, spread.p90, spread.p99) == (50.0, 90.0, 99.0)


def test_token_goodput_is_the_needed_share_of_the_computed_tokens() -> None:
    figures = figures_of([answered(0.4, 0.05)] * 2, TARGETS)
    assert figures.num_needed == 2 * (100 - 20 + 11 - 1)
    assert Held(4.0, 2, 240).token_goodput(figures) == 0.75
    assert Held(4.0, 2, 100).token_goodput(figures) == 1.0  # a last report of a worker was missed
    assert Held(4.0, 2, 0).token_goodput(figures) is None


def test_bill_counts_cached_tokens_at_their_own_price() -> None:
    figures = figures_of([answered(0.4, 0.05)], TARGETS)
    assert bill_dollars(figures, PRICE) == pytest.approx((80 * 100 + 20 * 25 + 11 * 400) / 1e9)
    assert per_million(1.11, figures) == pytest.approx(1e4)


def test_phases_are_those_of_cold_requests() -> None:
    warm, cold = [phase("queue", 0, 1)], [phase("queue", 0, 30), phase("plan", 1, 30)]
    figures = cold_of([warm, cold, cold])
    assert (figures.num_explained, figures.num_cold) == (3, 2)
    assert {name: spread.p50 for name, spread in figures.phases_s.items()} == pytest.approx(
        {"queue": 0.03, "plan": 0.029}
    )
    assert cold_of([]).phases_s == {}
