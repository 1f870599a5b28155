"""Log-probabilities of a prompt, joined from the parts that several attempts report."""

from __future__ import annotations

import pytest

from torchrelay.common.errors import TorchrelayError
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.gateway.inference.core import TokenLogprobs
from torchrelay.gateway.inference.execution.prompt_scores import PromptScores


def part(*positions: int) -> pb.PromptLogprobs:
    """A worker's report of successive positions, whose values tell the position."""
    return pb.PromptLogprobs(
        first_position=positions[0],
        chosen=[-float(each) for each in positions],
        ranks=positions,
        top_token_ids=[token for each in positions for token in (each, each + 100)],
        top_logprobs=[value for each in positions for value in (-each / 2, -each / 4)],
    )


def test_repeated_positions_are_known_already() -> None:
    scores = PromptScores(7)
    for each in (part(1, 2, 3), part(1, 2), part(2, 3, 4), part(1, 2, 3, 4), part(5, 6)):
        scores.add(each)
    scores.check()
    for position in range(1, 7):
        top = ((position, -position / 2), (position + 100, -position / 4))
        assert scores.of(position, 5) == TokenLogprobs(-position, top)
        assert scores.of(position, 1).top == top[:1] and scores.of(position, 0).top == ()
        assert scores.rank(position) == position


def test_gaps_and_missing_positions_are_errors() -> None:
    scores = PromptScores(4)
    scores.add(part(1))
    with pytest.raises(TorchrelayError, match="left out"):
        scores.add(part(3))
    with pytest.raises(TorchrelayError, match="no logprobs of the prompt"):
        scores.check()
    scores.add(part(2, 3))
    scores.check()


def test_impossible_tokens_have_the_least_logprob() -> None:
    scores = PromptScores(2)
    impossible = part(1)
    impossible.chosen[0] = impossible.top_logprobs[1] = float("-inf")
    scores.add(impossible)
    assert scores.of(1, 2) == TokenLogprobs(-9999.0, ((1, -0.5), (101, -9999.0)))


def test_prompt_of_a_token_has_none() -> None:
    PromptScores(1).check()
