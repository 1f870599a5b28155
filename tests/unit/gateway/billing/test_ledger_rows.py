from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.gateway.billing.ledger_rows import ledger_rows
from torchrelay.gateway.core import ChoiceUsage, FinishCause, OpenedRequest, Price

PRICE = Price("p", "", 100, 25, 400, 0)


def _opened(num_choices: int) -> OpenedRequest:
    return OpenedRequest("r", "t", "k", "t/m", "v", "p", 10, 20, num_choices, "gw", 1)


def _usage(choice: int, num_output: int, num_cached: int = 0) -> ChoiceUsage:
    return ChoiceUsage("r", choice, 10, num_cached, num_output, FinishCause.STOP)


def test_the_prompt_is_billed_once_for_all_choices() -> None:
    rows = ledger_rows(_opened(2), [_usage(0, 3, 4), _usage(1, 5, 4)], PRICE)
    assert [(row.num_prompt_tokens, row.num_cached_prompt_tokens, row.num_output_tokens) for row in rows] == [
        (10, 4, 3),
        (0, 0, 5),
    ]
    assert [row.cost_nano for row in rows] == [6 * 100 + 4 * 25 + 3 * 400, 5 * 400]


def test_without_a_token_nothing_is_billed() -> None:
    rows = ledger_rows(_opened(2), [_usage(0, 0, 4)], PRICE)
    assert [(row.choice, row.cost_nano, row.num_prompt_tokens) for row in rows] == [(0, 0, 0), (1, 0, 0)]
    assert rows[1].cause is FinishCause.ERROR


@given(st.permutations([_usage(0, 3), _usage(1, 5), _usage(2, 0)]))
def test_the_order_of_usages_does_not_matter(usages: list[ChoiceUsage]) -> None:
    assert ledger_rows(_opened(3), usages, PRICE) == ledger_rows(_opened(3), sorted(usages, key=_choice), PRICE)


def _choice(usage: ChoiceUsage) -> int:
    return usage.choice
