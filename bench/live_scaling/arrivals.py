"""The busiest part of a trace, scaled to what a few padded workers compute."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from torchrelay.sim.traces import Arrival


def busiest(arrivals: Sequence[Arrival], seconds: float) -> list[Arrival]:
    """The window with the most prompt tokens; its times count from its first arrival."""
    best, most, begin, num_tokens = (0, 0), 0, 0, 0
    for end, arrival in enumerate(arrivals):
        num_tokens += arrival.num_prompt_tokens
        while arrival.at - arrivals[begin].at >= seconds:
            num_tokens -= arrivals[begin].num_prompt_tokens
            begin += 1
        if num_tokens > most:
            best, most = (begin, end + 1), num_tokens
    window = arrivals[slice(*best)]
    return [replace(arrival, at=arrival.at - window[0].at) for arrival in window]


def scaled(arrivals: Sequence[Arrival], num_prompt_tokens: float, longest: int) -> tuple[list[Arrival], float]:
    """Multiplies prompts and answers by the factor with which the prompts have ``num_prompt_tokens`` in total, and
    cuts them at ``longest``; also returns the factor. Times stay.
    """
    factor = num_prompt_tokens / sum(arrival.num_prompt_tokens for arrival in arrivals)

    def length(num_tokens: int) -> int:
        return min(max(round(num_tokens * factor), 1), longest)

    lengths = ((length(arrival.num_prompt_tokens), length(arrival.num_output_tokens)) for arrival in arrivals)
    return [Arrival(arrival.at, *both) for arrival, both in zip(arrivals, lengths, strict=True)], factor


def zipf_models(num_arrivals: int, names: Sequence[str], seed: int) -> list[str]:
    """A model for each arrival, by a Zipf law over their order."""
    weights = [1 / rank for rank in range(1, len(names) + 1)]
    return random.Random(seed).choices(names, weights, k=num_arrivals)
