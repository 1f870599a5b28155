"""Rows of the ledger, prices, and the amounts of bills."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway.conftest import AccountingRig
from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, InvalidRequest
from torchrelay.gateway.billing.bills import Adjustment, BilledSum, Invoice, month_bounds
from torchrelay.gateway.billing.ledger_rows import LedgerRow, ledger_rows, supplement_rows
from torchrelay.gateway.billing.money import amount_of, exact_amount
from torchrelay.gateway.billing.price_list import PriceList, cost_nano
from torchrelay.gateway.billing.usage_register import (
    EMPTY_REGISTER,
    UsageRegister,
    merge_registers,
    usages_from_registers,
)
from torchrelay.gateway.core import ChoiceUsage, FinishCause, OpenedRequest, Price

PRICE = Price("p", "", 100, 25, 400, 0)


def _opened(num_choices: int) -> OpenedRequest:
    return OpenedRequest("r", "t", "k", "t/m", "v", "p", 10, 20, num_choices, "gw", 1)


def _usage(choice: int, num_output: int, num_cached: int = 0) -> ChoiceUsage:
    return ChoiceUsage("r", choice, 10, num_cached, num_output, FinishCause.STOP)


def test_prompt_is_billed_once_for_all_choices() -> None:
    rows = ledger_rows(_opened(2), [_usage(0, 3, 4), _usage(1, 5, 4)], PRICE)
    assert [(row.num_prompt_tokens, row.num_cached_prompt_tokens, row.num_output_tokens) for row in rows] == [
        (10, 4, 3),
        (0, 0, 5),
    ]
    assert [row.cost_nano for row in rows] == [6 * 100 + 4 * 25 + 3 * 400, 5 * 400]


def test_request_without_tokens_bills_the_computed_prompt() -> None:
    def rows_of(num_prompt: int, num_cached: int) -> list[LedgerRow]:
        return ledger_rows(_opened(2), [ChoiceUsage("r", 0, num_prompt, num_cached, 0, FinishCause.CANCELLED)], PRICE)

    assert [(row.choice, row.cost_nano, row.num_prompt_tokens) for row in rows_of(0, 0)] == [(0, 0, 0), (1, 0, 0)]
    first, second = rows_of(7, 4)
    assert (first.num_prompt_tokens, first.num_cached_prompt_tokens, first.cost_nano) == (7, 4, 3 * 100 + 4 * 25)
    assert (second.cost_nano, second.cause) == (0, FinishCause.ERROR)
    assert rows_of(99, 99)[0].cost_nano == 10 * 25  # no more than the prompt


def test_request_with_a_token_bills_the_whole_prompt() -> None:
    usages = [ChoiceUsage("r", 0, 3, 0, 0, FinishCause.STOP), ChoiceUsage("r", 1, 3, 0, 2, FinishCause.STOP)]
    assert [row.num_prompt_tokens for row in ledger_rows(_opened(2), usages, PRICE)] == [10, 0]


counts = st.integers(0, 20)
usages_of_two = st.tuples(*(st.tuples(st.integers(0, 10), counts, counts) for _ in range(2)))


def _rows(used: tuple[tuple[int, int, int], ...], cause: FinishCause) -> list[LedgerRow]:
    usages = [ChoiceUsage("r", choice, *numbers, cause) for choice, numbers in enumerate(used)]
    return ledger_rows(_opened(2), usages, PRICE)


@given(usages_of_two, usages_of_two)
def test_swept_row_and_supplement_equal_accepted_usage(
    swept: tuple[tuple[int, int, int], ...], accepted: tuple[tuple[int, int, int], ...]
) -> None:
    standing, own = _rows(swept, FinishCause.GATEWAY_LOST), _rows(accepted, FinishCause.STOP)
    more = supplement_rows(standing, own, PRICE)
    for name in ("num_prompt_tokens", "num_output_tokens"):
        for choice in (0, 1):
            total = sum(getattr(row, name) for row in (*standing, *more) if row.choice == choice)
            assert total == max(getattr(standing[choice], name), getattr(own[choice], name))
    assert all(row.cost_nano >= 0 and row.num_cached_prompt_tokens <= row.num_prompt_tokens for row in more)
    assert supplement_rows([*standing, *more], own, PRICE) == [] or not more
    assert supplement_rows(own, standing, PRICE) == []  # settled by the gateway first


@given(st.permutations([_usage(0, 3), _usage(1, 5), _usage(2, 0)]))
def test_order_of_usages_does_not_matter(usages: list[ChoiceUsage]) -> None:
    assert ledger_rows(_opened(3), usages, PRICE) == ledger_rows(_opened(3), sorted(usages, key=_choice), PRICE)


def _choice(usage: ChoiceUsage) -> int:
    return usage.choice


registers = st.builds(UsageRegister, *[st.integers(0, 10**6)] * 3)


@given(registers, registers, registers)
def test_merge_of_registers_is_a_maximum(a: UsageRegister, b: UsageRegister, c: UsageRegister) -> None:
    """Commutative, associative, idempotent, monotone, and with a neutral element: order and repetition are harmless."""
    merged = merge_registers(a, b)
    assert merged == merge_registers(b, a) == merge_registers(merged, a)
    assert merge_registers(a, merge_registers(b, c)) == merge_registers(merged, c)
    assert merge_registers(a, a) == a == merge_registers(a, EMPTY_REGISTER)
    assert merged.output_position == max(a.output_position, b.output_position)
    assert merged.num_prompt_tokens >= max(a.num_prompt_tokens, b.num_prompt_tokens)


@given(registers)
def test_swept_bill_is_bounded_by_the_request(register: UsageRegister) -> None:
    usage, other = usages_from_registers(_opened(2), {0: register})
    assert usage.num_output_tokens == min(register.output_position, 20)
    assert usage.num_prompt_tokens == min(register.num_prompt_tokens, 10)
    assert usage.num_cached_prompt_tokens == min(register.num_cached_prompt_tokens, 10)
    assert (other.choice, other.num_output_tokens, other.cause) == (1, 0, FinishCause.GATEWAY_LOST)


async def test_new_price_applies_from_its_start(parts: AccountingRig) -> None:
    assert (await parts.prices.current("acme/glossary")).price_id == "price-default"
    added = await parts.prices.add("acme/glossary", 1, 2, 3)
    assert await parts.prices.current("acme/glossary") == added
    assert (await parts.prices.current("acme/other")).price_id == "price-default"
    later = await parts.prices.add("", 7, 8, 9, now_unix_us() + 10**9)
    assert (await parts.prices.current("acme/other")).price_id == "price-default"
    assert [price.price_id for price in (await parts.prices.all()).rows] == [
        "price-default",
        added.price_id,
        later.price_id,
    ]
    with pytest.raises(InvalidRequest):
        await parts.prices.add("", 7, 8, 9, 5)
    with pytest.raises(Conflict):
        await parts.prices.add("", 7, 8, 9, later.valid_from_unix_us)


def _price(price_id: str, model: str, begin: int) -> Price:
    return Price(price_id, model, 100, 25, 400, begin)


PRICES = [_price("d0", "", 0), _price("m10", "a/m", 10), _price("d20", "", 20), _price("m30", "a/m", 30)]


def test_latest_row_of_the_model_wins_over_the_default_until_the_next_begins() -> None:
    assert [PriceList(PRICES).at("a/m", at).price_id for at in (9, 10, 29, 30)] == ["d0", "m10", "m10", "m30"]
    assert [PriceList(PRICES).at("b/x", at).price_id for at in (19, 20)] == ["d0", "d20"]
    assert [PriceList(PRICES).valid_until(price) for price in PRICES] == [20, 30, None, None]


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_cached_tokens_have_their_own_price(prompt: int, cached: int, output: int) -> None:
    cached = min(cached, prompt)
    assert cost_nano(PRICES[0], prompt, cached, output) == 100 * (prompt - cached) + 25 * cached + 400 * output


def test_half_a_cent_of_a_bill_rounds_up_and_usage_is_exact() -> None:
    costs_nano = (0, 4_999_999, 5_000_000, 14_999_999, 15_000_000, 10**10)
    assert [str(amount_of(cost)) for cost in costs_nano] == ["0.00", "0.00", "0.01", "0.01", "0.02", "10.00"]
    assert [exact_amount(cost) for cost in (123, 5 * 10**9)] == ["0.000000123", "5.000000000"]


def billed_sum(cost_nano: int) -> BilledSum:
    return BilledSum("a/m", 100, 25, 400, 1, 0, 1, 1, cost_nano)


@given(st.lists(st.integers(0, 10**15), max_size=6))
def test_lines_are_rounded_once_and_add_up(costs: list[int]) -> None:
    lines = tuple(billed_sum(cost) for cost in costs)
    invoice = Invoice("acme", "2026-11", lines, (Adjustment("adj", "t", "2026-11", -costs[0], "", 1),) if costs else ())
    assert (
        invoice.amount == sum((line.amount for line in lines[1:]), Decimal(0)) == Decimal(invoice.amount_nano) / 10**9
    )
    for line in lines:
        assert abs(line.amount * 10**9 - line.cost_nano) <= 5_000_000


def test_month_bounds_are_half_open_across_years() -> None:
    begin, end = month_bounds("2026-11")
    assert (end - begin) == 30 * 86400 * 10**6
    assert month_bounds("2026-12")[1] == month_bounds("2027-01")[0]
    for wrong in ("2026", "2026-13", "2026-1", "26-11", "2026-11-01", ""):
        with pytest.raises(InvalidRequest):
            month_bounds(wrong)
