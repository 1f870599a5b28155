"""The check of SmolLM2's answers counts what differs."""

from __future__ import annotations

from typing import Any, cast

import pytest

from examples.smollm2.check import MAX_STEPS, NUM_TOKENS, Answer, Comparison, Reference


class Counting:
    """A reference whose answer to any prompt is 0, 1, 2, ..."""

    def prompt(self, question: str) -> list[int]:
        return [len(question)]

    def answer(self, prompt: list[int]) -> list[int]:
        return list(range(NUM_TOKENS))


@pytest.fixture
def comparison() -> Comparison:
    return Comparison(cast(Reference, cast(Any, Counting())))


def test_equal_answer_is_no_difference(comparison: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    comparison.check("cold", 0, Answer("r", list(range(NUM_TOKENS))), True)
    comparison.check_steps("bf16", [0.0] * NUM_TOKENS)
    comparison.check_steps("bf16", [float(MAX_STEPS)] + [0.0] * (NUM_TOKENS - 1))
    assert comparison.num_different == 0
    assert capsys.readouterr().out.splitlines() == [
        "  equal  64 of 64 tokens  cold",
        "  right  64 of 64 tokens best  bf16",
        "  right  63 of 64 tokens best, the others within 2.0 steps of bf16  bf16",
    ]


def test_other_answers_and_worse_tokens_are_differences(
    comparison: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison.check("cold", 0, Answer("r", [*range(9), 0, *range(10, NUM_TOKENS)]), True)
    comparison.check("cold", 0, Answer("r", list(range(NUM_TOKENS - 1))), True)
    comparison.check("cold", 0, Answer("r", list(range(NUM_TOKENS))), False)
    assert capsys.readouterr().out.splitlines() == [
        "  DIFFERENT  9 of 64 tokens  cold",
        "  DIFFERENT  63 of 64 tokens  cold",
        "  DIFFERENT  64 of 64 tokens  cold; the request was NOT computed in this way",
    ]
    comparison.check_steps("bf16", [0] * (NUM_TOKENS - 1))
    comparison.check_steps("bf16", [0] * (NUM_TOKENS - 1) + [MAX_STEPS + 1])
    assert comparison.num_different == 5
