"""Usage registers: merging workers' reports of one choice, in any order and number. Pure.

A register only grows: while its prompt is computed the prompt tokens rise, then the output position. Merging takes
maxima and is therefore commutative, associative and idempotent: duplicates and reordering cannot change a total.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torchrelay.gateway.core import ChoiceUsage, FinishCause, OpenedRequest


class UsageRegister(NamedTuple):
    """The usage workers reported for one choice; every field is a maximum."""

    num_prompt_tokens: int = 0  # computed or found cached
    num_cached_prompt_tokens: int = 0
    output_position: int = 0  # tokens sent to the gateway, including forced ones


EMPTY_REGISTER = UsageRegister()


def merge_registers(a: UsageRegister, b: UsageRegister) -> UsageRegister:
    """The field-wise maximum."""
    return UsageRegister(*map(max, a, b))


def usages_from_registers(opened: OpenedRequest, registers: Mapping[int, UsageRegister]) -> list[ChoiceUsage]:
    """The usage per choice billed for a request whose gateway is gone.

    Capped at what the request could have used, whatever a register says. An unreported choice had no output.
    """
    return [_usage(opened, choice, registers.get(choice, EMPTY_REGISTER)) for choice in range(opened.num_choices)]


def _usage(opened: OpenedRequest, choice: int, register: UsageRegister) -> ChoiceUsage:
    return ChoiceUsage(
        request_id=opened.request_id,
        choice=choice,
        num_prompt_tokens=min(register.num_prompt_tokens, opened.num_prompt_tokens),
        num_cached_prompt_tokens=min(register.num_cached_prompt_tokens, opened.num_prompt_tokens),
        num_output_tokens=min(register.output_position, opened.max_tokens),
        cause=FinishCause.GATEWAY_LOST,
    )
