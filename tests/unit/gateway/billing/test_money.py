from __future__ import annotations

import pytest

from torchrelay.gateway.billing.money import amount_of, exact_amount


@pytest.mark.parametrize(
    ("cost_nano", "amount"),
    [
        (0, "0.00"),
        (4_999_999, "0.00"),
        (5_000_000, "0.01"),
        (14_999_999, "0.01"),
        (15_000_000, "0.02"),
        (10**10, "10.00"),
    ],
)
def test_half_a_cent_rounds_up(cost_nano: int, amount: str) -> None:
    assert str(amount_of(cost_nano)) == amount


def test_usage_is_shown_exactly() -> None:
    assert exact_amount(123) == "0.000000123"
    assert exact_amount(5_000_000_000) == "5.000000000"
