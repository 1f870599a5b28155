"""The ledger rows of a request, from its opened row, usage and price. Pure.

A request has one row per choice. It gets a second row, its *supplement*, if the sweep took its gateway for gone while
the gateway still delivered tokens: together the two rows are what the client received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrelay.gateway.billing.price_list import cost_nano
from torchrelay.gateway.core import ChoiceUsage, FinishCause, OpenedRequest, Price


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """A choice in the ledger. Only choice 0 carries the prompt tokens, so that sums are right."""

    request_id: str
    choice: int
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_output_tokens: int
    cost_nano: int
    cause: FinishCause
    supplement: int = 0  # 1: what the gateway accepted beyond the row that the sweep wrote


def ledger_rows(opened: OpenedRequest, usages: Sequence[ChoiceUsage], price: Price) -> list[LedgerRow]:
    """A row per choice, in order.

    The prompt is computed and billed once for all choices: as far as it was computed, and in full if any choice
    produced a token. Choices without a usage had no output.
    """
    by_choice = {usage.choice: usage for usage in usages}
    num_prompt = min(max((usage.num_prompt_tokens for usage in usages), default=0), opened.num_prompt_tokens)
    if any(usage.num_output_tokens > 0 for usage in usages):
        num_prompt = opened.num_prompt_tokens
    num_cached = min(max((usage.num_cached_prompt_tokens for usage in usages), default=0), num_prompt)
    rows = []
    for choice in range(opened.num_choices):
        usage = by_choice.get(choice)
        prompt, cached = (num_prompt, num_cached) if choice == 0 else (0, 0)
        num_output = usage.num_output_tokens if usage else 0
        cause = usage.cause if usage else FinishCause.ERROR
        cost = cost_nano(price, prompt, cached, num_output)
        rows.append(LedgerRow(opened.request_id, choice, prompt, cached, num_output, cost, cause))
    return rows


def supplement_rows(swept: Sequence[LedgerRow], accepted: Sequence[LedgerRow], price: Price) -> list[LedgerRow]:
    """The excess of ``accepted``, the rows of a request's own gateway, over ``swept``, the rows of the sweep.

    Never negative. Empty unless ``swept`` are the rows of a sweep without a supplement.
    """
    if not swept or any(row.supplement or row.cause is not FinishCause.GATEWAY_LOST for row in swept):
        return []
    by_choice = {row.choice: row for row in swept}
    rows = []
    for row in accepted:
        before = by_choice[row.choice]
        prompt = max(row.num_prompt_tokens - before.num_prompt_tokens, 0)
        cached = min(max(row.num_cached_prompt_tokens - before.num_cached_prompt_tokens, 0), prompt)
        output = max(row.num_output_tokens - before.num_output_tokens, 0)
        if prompt or output:
            cost = cost_nano(price, prompt, cached, output)
            rows.append(LedgerRow(row.request_id, row.choice, prompt, cached, output, cost, row.cause, supplement=1))
    return rows
