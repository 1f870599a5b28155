"""Choosing the next token. The random number is f(seed, choice, position): the same on any batch, worker or attempt."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from torchrelay.engine.core import GroupSpec, NewToken, SamplingParams
from torchrelay.engine.sequences import Context, Decoding

_COUNTER = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose: from which row of the logits, and for which choice and output position of a group."""

    row: int
    group: GroupSpec
    choice: int
    position: int
    num_cached: int = 0

    def token(self, token_id: int) -> NewToken:
        finish = self.group.sampling.finish_of(token_id, self.position)
        return NewToken(self.group.group_id, self.choice, self.position, token_id, finish, self.num_cached)


def draw_of_decoding(row: int, decoding: Decoding) -> Draw:
    return Draw(row, decoding.spec, decoding.choice, decoding.next_position)


def draws_of_context(row: int, context: Context) -> list[Draw]:
    """The first token of each choice that shares the context; they differ by the choice's random number alone."""
    spec = context.group.spec
    num_cached = min(context.num_cached, spec.num_prompt_tokens)
    return [Draw(row, spec, choice, context.num_forced, num_cached) for choice in context.choices]


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: BLAKE2b of the counter."""
    digest = blake2b(_COUNTER.pack(seed & (2**64 - 1), choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def choose(logits: Tensor, draws: Sequence[Draw]) -> list[NewToken]:
    """The token of each draw; ``logits`` is [rows, vocab]."""
    greedy = logits.argmax(dim=-1).tolist() if any(draw.group.sampling.greedy for draw in draws) else []
    return [
        draw.token(
            greedy[draw.row]
            if draw.group.sampling.greedy
            else sample(logits[draw.row], draw.group.sampling, draw.choice, draw.position)
        )
        for draw in draws
    ]


def sample(logits: Tensor, params: SamplingParams, choice: int, position: int) -> int:
    """One token from [vocab] logits by the inverse of the cumulative distribution, taken in the order of the ids.

    That order, and not the order of the probabilities, because two tokens that are nearly equally likely would change
    places with the last bits of the logits, which depend on the batch.
    """
    if params.greedy:
        return int(logits.argmax())
    cumulative = probabilities(logits, params).double().cumsum(0)
    total = cumulative[-1]
    # Rounding must not carry the threshold to the total itself: the first sum above it is the token.
    threshold = torch.minimum(
        total * uniform(params.seed, choice, position), torch.nextafter(total, torch.zeros_like(total))
    )
    found = int(torch.searchsorted(cumulative, threshold, right=True))
    return min(found, len(logits) - 1)  # NaN is above every sum; a broken model must not break the batch


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """fp32 [vocab] after temperature, then top-k, then top-p; tokens cut away have zero.

    Ties at the border of top-k or top-p all stay. Top-p keeps the likeliest tokens up to the one whose sum reaches it.
    """
    scaled = logits.float()
    scaled = (scaled - scaled.max()) / params.temperature
    if 0 < params.top_k < len(scaled):
        border = scaled.topk(params.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < border, -torch.inf)
    found = scaled.softmax(dim=-1)
    if params.top_p < 1:
        ordered = found.sort(descending=True).values
        num_kept = max(1, int((ordered.double().cumsum(0) - ordered < params.top_p).sum()))
        found = found.masked_fill(found < ordered[num_kept - 1], 0.0)
    return found
