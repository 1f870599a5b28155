"""Usage registers: how reports of one choice, in any order and any number, become one truth.

A register only grows: prompt and cached tokens are fixed by attempt 1, the output position rises, the cause appears at
the end. Merging takes the maximum of each, so it is commutative, associative and idempotent: duplicates and reordering
cannot change a total.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchrelay.gateway.core import ChoiceUsage, FinishCause, OpenedRequest


@dataclass(frozen=True, slots=True)
class UsageRegister:
    """What workers reported of one choice; all fields are maxima."""

    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    output_position: int = 0  # tokens sent to the gateway, forced ones included


EMPTY_REGISTER = UsageRegister()


def merge_registers(one: UsageRegister, other: UsageRegister) -> UsageRegister:
    """The least register that holds both."""
    return UsageRegister(
        num_prompt_tokens=max(one.num_prompt_tokens, other.num_prompt_tokens),
        num_cached_prompt_tokens=max(one.num_cached_prompt_tokens, other.num_cached_prompt_tokens),
        output_position=max(one.output_position, other.output_position),
    )


def usages_from_registers(opened: OpenedRequest, registers: Mapping[int, UsageRegister]) -> list[ChoiceUsage]:
    """What a request whose gateway is gone is billed for, per choice.

    Never more than the request could have used, whatever a register says. A choice nobody reported had no output.
    """
    return [_usage(opened, choice, registers.get(choice, EMPTY_REGISTER)) for choice in range(opened.num_choices)]


def _usage(opened: OpenedRequest, choice: int, register: UsageRegister) -> ChoiceUsage:
    return ChoiceUsage(
        request_id=opened.request_id,
        choice=choice,
        num_prompt_tokens=opened.num_prompt_tokens,
        num_cached_prompt_tokens=min(register.num_cached_prompt_tokens, opened.num_prompt_tokens),
        num_output_tokens=min(register.output_position, opened.max_tokens),
        cause=FinishCause.GATEWAY_LOST,
    )
