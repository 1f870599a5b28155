"""The check of SmolLM2's answers counts what differs."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from examples.smollm2.check import NUM_TOKENS, Answer, Comparison, Reference


class Counting:
    """A reference whose answer to any prompt is 0, 1, 2, ..."""

    def prompt(self, question: str) -> list[int]:
        return [len(question)]

    def answer(self, prompt: list[int]) -> list[int]:
        return list(range(NUM_TOKENS))


@pytest.fixture
def comparison() -> Comparison:
    return Comparison(cast(Reference, cast(Any, Counting())))


def check_rounded(comparison: Comparison, token_ids: list[int]) -> None:
    """Checks an answer whose best token is 0; token 1 is two errors of bf16 below it, token 2 more."""
    exact = torch.tensor([1.0, 0.5, 0.4]).repeat(len(token_ids), 1)
    comparison.check_rounded("bf16", token_ids, exact, exact - 0.25)


def test_equal_answer_is_no_difference(comparison: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    comparison.check("cold", 0, Answer("r", list(range(NUM_TOKENS))), True)
    check_rounded(comparison, [0] * NUM_TOKENS)
    check_rounded(comparison, [1] + [0] * (NUM_TOKENS - 1))
    assert comparison.num_different == 0
    equal, best, close = capsys.readouterr().out.splitlines()
    assert equal == "  equal  64 of 64 tokens  cold"
    assert best == "  right  64 of 64 tokens best  bf16"
    below = "the others at most 0.50 below it; bf16 is off by up to 0.25"
    assert close == f"  right  63 of 64 tokens best, {below}  bf16"


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


@pytest.mark.parametrize("token_ids", [[0] * (NUM_TOKENS - 1), [0] * (NUM_TOKENS - 1) + [2]])
def test_worse_tokens_are_differences(comparison: Comparison, token_ids: list[int]) -> None:
    check_rounded(comparison, token_ids)
    assert comparison.num_different == 1
