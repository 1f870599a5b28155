"""Choosing the next token. The random number is f(seed, choice, position): the same on any batch, worker or attempt."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from torchrelay.engine.core import GroupSpec, Logprobs, NewToken, SamplingParams
from torchrelay.engine.sequences import Context, Decoding

_COUNTER = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose: from which row of the logits, and for which choice and output position of a group."""

    row: int
    group: GroupSpec
    choice: int
    position: int
    counts: Mapping[int, int] | None = None  # of each token of the output so far, where penalties ask for it
    num_cached: int = 0

    def token(self, token_id: int, logprobs: Logprobs | None) -> NewToken:
        finish = self.group.sampling.finish_of(token_id, self.position)
        group_id = self.group.group_id
        return NewToken(group_id, self.choice, self.position, token_id, finish, self.num_cached, logprobs)


def draw_of_decoding(row: int, decoding: Decoding) -> Draw:
    return Draw(row, decoding.spec, decoding.choice, decoding.next_position, decoding.counts)


def draws_of_context(row: int, context: Context) -> list[Draw]:
    """The first token of each choice that shares the context; they differ by the choice's random number alone."""
    spec = context.group.spec
    num_cached = min(context.num_cached, spec.num_prompt_tokens)
    forced = spec.forced_output(context.choices[0]) if context.choices else ()
    counts = Counter(forced) if spec.sampling.penalised else None
    return [Draw(row, spec, choice, context.num_forced, counts, num_cached) for choice in context.choices]


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: BLAKE2b of the counter."""
    digest = blake2b(_COUNTER.pack(seed & (2**64 - 1), choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def choose(logits: Tensor, draws: Sequence[Draw]) -> list[NewToken]:
    """The token of each draw; ``logits`` is [rows, vocab]."""
    likeliest = logits.argmax(dim=-1).tolist() if any(_is_plain(draw.group.sampling) for draw in draws) else []
    return [_chosen(logits[draw.row], draw, likeliest) for draw in draws]


def _is_plain(params: SamplingParams) -> bool:
    """The likeliest token as it is: found for the whole batch at once."""
    return params.greedy and not params.logit_bias and not params.penalised


def _chosen(logits: Tensor, draw: Draw, likeliest: Sequence[int]) -> NewToken:
    params = draw.group.sampling
    if _is_plain(params):
        token_id = likeliest[draw.row]
    else:
        token_id = sample(adjusted(logits, params, draw.counts or {}), params, draw.choice, draw.position)
    return draw.token(token_id, _logprobs(logits, token_id, params.top_logprobs))


def adjusted(logits: Tensor, params: SamplingParams, counts: Mapping[int, int]) -> Tensor:
    """[vocab] logits after biases and penalties, as OpenAI defines them; ``counts`` are those of the output so far."""
    shifts = dict(params.logit_bias)
    if params.penalised:
        for token_id, count in counts.items():
            penalty = params.presence_penalty + params.frequency_penalty * count
            shifts[token_id] = shifts.get(token_id, 0.0) - penalty
    if not shifts:
        return logits
    shifted = logits.float().clone()
    shifted[list(shifts)] += torch.tensor(list(shifts.values()), dtype=torch.float32, device=logits.device)
    return shifted


def _logprobs(logits: Tensor, token_id: int, num_top: int | None) -> Logprobs | None:
    if num_top is None:
        return None
    logs = logits.log_softmax(dim=-1, dtype=torch.float32)
    values, tokens = logs.topk(min(num_top, len(logs)))
    return Logprobs(float(logs[token_id]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


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
    """fp32 [vocab] after temperature, then top-k, top-p and min-p; tokens cut away have zero.

    Ties at the border of top-k or top-p all stay. Top-p keeps the likeliest tokens up to the one whose sum reaches it,
    min-p those at least that fraction as likely as the likeliest (Nguyen et al. 2024).
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
    if params.min_p > 0:
        found = found.masked_fill(found < params.min_p * found.max(), 0.0)
    return found
