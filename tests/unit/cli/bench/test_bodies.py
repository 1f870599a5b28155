"""Prompts that share their first tokens only."""

from __future__ import annotations

import random

from torchrelay.cli.bench.bodies import Prompts, completion_body


def test_prompts_share_what_they_are_to_share() -> None:
    prompts = Prompts(1000, num_shared=4, random_=random.Random(0))
    first, second = prompts.prompt(16), prompts.prompt(16)
    assert first[:4] == second[:4] and first[4:] != second[4:]
    assert len(first) == len(second) == 16 and len(prompts.prompt(2)) == 2
    assert all(256 <= token < 1000 for token in (*first, *second))


def test_another_client_has_other_prompts() -> None:
    assert Prompts(1000).prompt(16) != Prompts(1000).prompt(16)
    assert all(50 <= token < 100 for token in Prompts(100).prompt(64))


def test_answers_have_exactly_the_asked_length() -> None:
    body = completion_body("tiny", [1, 2], 8)
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (8, True, True)
