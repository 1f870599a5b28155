from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.gateway.billing.price_list import cost_nano, price_at, valid_until
from torchrelay.gateway.core import Price


def _price(price_id: str, model: str, begin: int) -> Price:
    return Price(price_id, model, 100, 25, 400, begin)


LIST = [_price("d0", "", 0), _price("m10", "a/m", 10), _price("d20", "", 20), _price("m30", "a/m", 30)]


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
    assert price_at(LIST, model, at).price_id == expected


def test_price_ends_where_the_next_of_its_model_begins() -> None:
    assert [valid_until(LIST, price) for price in LIST] == [20, 30, None, None]


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_cached_tokens_have_their_own_price(prompt: int, cached: int, output: int) -> None:
    cached = min(cached, prompt)
    assert cost_nano(LIST[0], prompt, cached, output) == 100 * (prompt - cached) + 25 * cached + 400 * output
