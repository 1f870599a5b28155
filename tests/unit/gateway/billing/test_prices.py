from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway.conftest import AccountingRig
from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, InvalidRequest
from torchrelay.gateway.billing.bills import BilledSum, bill_amount, month_bounds
from torchrelay.gateway.billing.money import amount_of, exact_amount
from torchrelay.gateway.billing.price_list import cost_nano, price_at, valid_until
from torchrelay.gateway.core import Price


async def test_new_price_applies_from_its_start(parts: AccountingRig) -> None:
    assert (await parts.prices.current("acme/glossary")).price_id == "price-default"
    added = await parts.prices.add("acme/glossary", 1, 2, 3)
    assert await parts.prices.current("acme/glossary") == added
    assert (await parts.prices.current("acme/other")).price_id == "price-default"
    later = await parts.prices.add("", 7, 8, 9, now_unix_us() + 10**9)
    assert (await parts.prices.current("acme/other")).price_id == "price-default"
    assert [price.price_id for price in await parts.prices.all()] == ["price-default", added.price_id, later.price_id]
    with pytest.raises(InvalidRequest):
        await parts.prices.add("", 7, 8, 9, 5)
    with pytest.raises(Conflict):
        await parts.prices.add("", 7, 8, 9, later.valid_from_unix_us)


def _price(price_id: str, model: str, begin: int) -> Price:
    return Price(price_id, model, 100, 25, 400, begin)


PRICES = [_price("d0", "", 0), _price("m10", "a/m", 10), _price("d20", "", 20), _price("m30", "a/m", 30)]


@pytest.mark.parametrize(
    ("model", "at", "expected"),
    [
        ("a/m", 9, "d0"),
        ("a/m", 10, "m10"),
        ("a/m", 29, "m10"),
        ("a/m", 30, "m30"),
        ("b/x", 19, "d0"),
        ("b/x", 20, "d20"),
    ],
)
def test_latest_row_of_the_model_wins_over_the_default(model: str, at: int, expected: str) -> None:
    assert price_at(PRICES, model, at).price_id == expected


def test_price_ends_where_the_next_of_its_model_begins() -> None:
    assert [valid_until(PRICES, price) for price in PRICES] == [20, 30, None, None]


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_cached_tokens_have_their_own_price(prompt: int, cached: int, output: int) -> None:
    cached = min(cached, prompt)
    assert cost_nano(PRICES[0], prompt, cached, output) == 100 * (prompt - cached) + 25 * cached + 400 * output


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


def billed_sum(cost_nano: int) -> BilledSum:
    return BilledSum("a/m", 100, 25, 400, 1, 0, 1, 1, cost_nano)


@given(st.lists(st.integers(0, 10**15), max_size=6))
def test_lines_are_rounded_once_and_add_up(costs: list[int]) -> None:
    lines = [billed_sum(cost) for cost in costs]
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
