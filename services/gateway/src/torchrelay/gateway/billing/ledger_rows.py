"""What a request costs: its ledger rows, decided from what was opened, what was used and the price. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrelay.gateway.billing.price_list import cost_nano
from torchrelay.gateway.core import ChoiceUsage, FinishCause, OpenedRequest, Price


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One choice in the ledger. The prompt stands in the row of choice 0 only, so that sums are right."""

    request_id: str
    choice: int
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_output_tokens: int
    cost_nano: int
    cause: FinishCause


def ledger_rows(opened: OpenedRequest, usages: Sequence[ChoiceUsage], price: Price) -> list[LedgerRow]:
    """One row for each choice of the request, in order.

    The prompt is computed once for all choices and billed once, and only when at least one token came of it: a request
    that ended before its first token costs nothing. Choices without a usage had no output.
    """
    by_choice = {usage.choice: usage for usage in usages}
    produced = any(usage.num_output_tokens > 0 for usage in usages)
    num_cached = min(max((usage.num_cached_prompt_tokens for usage in usages), default=0), opened.num_prompt_tokens)
    rows = []
    for choice in range(opened.num_choices):
        usage = by_choice.get(choice)
        bears_prompt = produced and choice == 0
        num_prompt = opened.num_prompt_tokens if bears_prompt else 0
        cached = num_cached if bears_prompt else 0
        num_output = usage.num_output_tokens if usage else 0
        rows.append(
            LedgerRow(
                request_id=opened.request_id,
                choice=choice,
                num_prompt_tokens=num_prompt,
                num_cached_prompt_tokens=cached,
                num_output_tokens=num_output,
                cost_nano=cost_nano(price, num_prompt, cached, num_output),
                cause=usage.cause if usage else FinishCause.ERROR,
            )
        )
    return rows
