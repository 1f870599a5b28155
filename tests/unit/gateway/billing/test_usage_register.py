from __future__ import annotations

from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.gateway.billing.usage_register import (
    EMPTY_REGISTER,
    UsageRegister,
    merge_registers,
    usages_from_registers,
)
from torchrelay.gateway.core import FinishCause, OpenedRequest

counts = st.integers(min_value=0, max_value=10**6)
registers = st.builds(UsageRegister, counts, counts, counts)


@given(registers, registers)
def test_merging_is_commutative(first: UsageRegister, second: UsageRegister) -> None:
    assert merge_registers(first, second) == merge_registers(second, first)


@given(registers, registers, registers)
def test_merging_is_associative(a: UsageRegister, b: UsageRegister, c: UsageRegister) -> None:
    assert merge_registers(merge_registers(a, b), c) == merge_registers(a, merge_registers(b, c))


@given(registers)
def test_merging_is_idempotent_with_a_neutral_element(first: UsageRegister) -> None:
    assert merge_registers(first, first) == first == merge_registers(first, EMPTY_REGISTER)


@given(registers, registers)
def test_merging_is_monotone(first: UsageRegister, second: UsageRegister) -> None:
    merged = merge_registers(first, second)
    assert merged.output_position >= max(first.output_position, second.output_position)
    assert merged.num_prompt_tokens >= max(first.num_prompt_tokens, second.num_prompt_tokens)
    assert merge_registers(merged, first) == merged


@given(st.lists(registers, max_size=8), st.randoms())
def test_duplicates_and_reordering_change_nothing(reports: list[UsageRegister], random: object) -> None:
    shuffled = [*reports, *reports[: len(reports) // 2]]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert reduce(merge_registers, shuffled, EMPTY_REGISTER) == reduce(merge_registers, reports, EMPTY_REGISTER)


def _opened(num_choices: int) -> OpenedRequest:
    return OpenedRequest("r", "t", "k", "t/m", "v", "p", 10, 20, num_choices, "gw", 1)


@given(registers)
def test_swept_bill_is_bounded_by_the_request(register: UsageRegister) -> None:
    usage, other = usages_from_registers(_opened(2), {0: register})
    assert usage.num_output_tokens == min(register.output_position, 20)
    assert usage.num_prompt_tokens == min(register.num_prompt_tokens, 10)
    assert usage.num_cached_prompt_tokens == min(register.num_cached_prompt_tokens, 10)
    assert (other.choice, other.num_output_tokens, other.cause) == (1, 0, FinishCause.GATEWAY_LOST)
