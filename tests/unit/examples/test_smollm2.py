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
    equal, best, close = capsys.readouterr().out.splitlines()
    assert equal == "  equal  64 of 64 tokens  cold"
    assert best == "  right  64 of 64 tokens best  bf16"
    assert close == "  right  63 of 64 tokens best, the others within 2.0 steps of bf16  bf16"


@pytest.mark.parametrize(
    ("token_ids", "proof", "line"),
    [
        ([*range(9), 0, *range(10, NUM_TOKENS)], True, "  DIFFERENT  9 of 64 tokens  cold"),
        (list(range(NUM_TOKENS - 1)), True, "  DIFFERENT  63 of 64 tokens  cold"),
        (
            list(range(NUM_TOKENS)),
            False,
            "  DIFFERENT  64 of 64 tokens  cold; the request was NOT computed in this way",
        ),
    ],
    ids=["other token", "too short", "computed otherwise"],
)
def test_other_answers_are_differences(
    comparison: Comparison, capsys: pytest.CaptureFixture[str], token_ids: list[int], proof: bool, line: str
) -> None:
    comparison.check("cold", 0, Answer("r", token_ids), proof)
    assert comparison.num_different == 1
    assert capsys.readouterr().out == f"{line}\n"


@pytest.mark.parametrize("steps", [[0] * (NUM_TOKENS - 1), [0] * (NUM_TOKENS - 1) + [MAX_STEPS + 1]])
def test_worse_tokens_are_differences(comparison: Comparison, steps: list[int]) -> None:
    comparison.check_steps("bf16", steps)
    assert comparison.num_different == 1
