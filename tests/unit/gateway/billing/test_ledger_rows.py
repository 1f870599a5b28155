from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.gateway.billing.ledger_rows import LedgerRow, ledger_rows, supplement_rows
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
