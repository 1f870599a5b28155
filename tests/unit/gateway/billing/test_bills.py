from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.billing.bills import BilledSum, bill_amount, month_bounds


def _sum(cost_nano: int) -> BilledSum:
    return BilledSum("a/m", 100, 25, 400, 1, 0, 1, 1, cost_nano)


@given(st.lists(st.integers(0, 10**15), max_size=6))
def test_lines_are_rounded_once_and_add_up(costs: list[int]) -> None:
    lines = [_sum(cost) for cost in costs]
    assert bill_amount(lines) == sum((line.amount for line in lines), Decimal(0))
    for line in lines:
        assert abs(line.amount * 10**9 - line.cost_nano) <= 5_000_000


def test_month_bounds_are_half_open_across_years() -> None:
    begin, end = month_bounds("2026-11")
    assert (end - begin) == 30 * 86400 * 10**6
    assert month_bounds("2026-12")[1] == month_bounds("2027-01")[0]
    for wrong in ("2026", "2026-13", "2026-1", "26-11", "2026-11-01", ""):
        with pytest.raises(InvalidRequest):
            month_bounds(wrong)
