from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.gateway.core import Cause, OpenedRequest
from torchrelay.gateway.usage import NOTHING, Register, merge, merge_all, usages_from_registers

counts = st.integers(min_value=0, max_value=10**6)
registers = st.builds(Register, counts, counts, counts)


@given(registers, registers)
def test_merging_is_commutative(one: Register, other: Register) -> None:
    assert merge(one, other) == merge(other, one)


@given(registers, registers, registers)
def test_merging_is_associative(a: Register, b: Register, c: Register) -> None:
    assert merge(merge(a, b), c) == merge(a, merge(b, c))


@given(registers)
def test_merging_is_idempotent_and_nothing_is_neutral(one: Register) -> None:
    assert merge(one, one) == one == merge(one, NOTHING)


@given(registers, registers)
def test_merging_is_monotone(one: Register, other: Register) -> None:
    merged = merge(one, other)
    assert merged.output_position >= max(one.output_position, other.output_position)
    assert merged.num_prompt_tokens >= max(one.num_prompt_tokens, other.num_prompt_tokens)
    assert merge(merged, one) == merged


@given(st.lists(registers, max_size=8), st.randoms())
def test_duplicates_and_reordering_change_nothing(reports: list[Register], random: object) -> None:
    shuffled = [*reports, *reports[: len(reports) // 2]]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert merge_all(shuffled) == merge_all(reports)


def _opened(num_choices: int) -> OpenedRequest:
    return OpenedRequest("r", "t", "k", "t/m", "v", "p", 10, 20, num_choices, "gw", 1)


@given(registers)
def test_a_swept_request_is_billed_for_no_more_than_it_could_use(register: Register) -> None:
    usage, other = usages_from_registers(_opened(2), {0: register})
    assert usage.num_output_tokens == min(register.output_position, 20)
    assert usage.num_cached_prompt_tokens == min(register.num_cached_prompt_tokens, 10)
    assert (other.choice, other.num_output_tokens, other.cause) == (1, 0, Cause.GATEWAY_LOST)
