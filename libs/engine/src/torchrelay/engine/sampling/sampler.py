"""Sampling. The random number is f(seed, choice, position): independent of batch, worker and attempt."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import torch
from torch import Tensor

from torchrelay.engine.batching.sequences import BatchPlan, PrefillContext
from torchrelay.engine.core import NO_TOKEN, Finish, GroupSpec, Logprobs, NewToken, SamplingParams
from torchrelay.engine.sampling import distributions

_COUNTER = struct.Struct("<QQQ")
_MAX_ELEMENTS_CPU: Final = 1 << 19  # logits processed at once: their copies should fit a core's cache
_MAX_ELEMENTS: Final = 1 << 25  # elsewhere, where memory is the only limit


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """A token to sample from a row of the logits, for a choice and output position of a group."""

    row: int
    group: GroupSpec
    choice: int
    position: int
    counts: Mapping[int, int] | None = None  # of each token of the output so far, if penalties need them
    num_cached: int = 0

    @property
    def params(self) -> SamplingParams:
        return self.group.sampling

    @property
    def is_plain(self) -> bool:
        """Whether the token is the most likely one as it is, which is computed for the whole batch at once."""
        return self.params.greedy and not self.params.logit_bias and not self.params.penalised

    def token(self, token_id: int, logprobs: Logprobs | None) -> NewToken:
        is_none = token_id == NO_TOKEN
        finish = Finish.NOT_FINITE if is_none else self.params.finish_of(token_id, self.position)
        group_id = self.group.group_id
        return NewToken(group_id, self.choice, self.position, token_id, finish, self.num_cached, logprobs)


def draws_of(plan: BatchPlan) -> list[TokenDraw]:
    """The draws of a plan: one per running choice, then the first tokens of each context that the plan ends."""
    draws = [
        TokenDraw(row, each.spec, each.choice, each.next_position, each.counts)
        for row, each in enumerate(plan.decoding)
    ]
    ended = (chunk.context for chunk in plan.chunks if chunk.ends_context)
    for row, context in enumerate(ended, len(plan.decoding)):
        draws += _draws_of_context(row, context)
    return draws


def _draws_of_context(row: int, context: PrefillContext) -> list[TokenDraw]:
    """Draws of the first token of each choice of a context; they differ only by the random number."""
    spec = context.group.spec
    num_cached = min(context.num_cached, spec.num_prompt_tokens)
    counts = Counter(context.forced) if spec.sampling.penalised else None
    return [
        TokenDraw(row, spec, choice, len(context.forced), counts, 0 if choice in context.begun else num_cached)
        for choice in context.choices
    ]


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: BLAKE2b of the counter."""
    digest = blake2b(_COUNTER.pack(seed & (2**64 - 1), choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample_tokens(logits: Tensor, draws: Sequence[TokenDraw]) -> list[NewToken]:
    """The token of each draw; ``logits`` is [rows, vocab].

    A draw from a row that is not finite ends with ``Finish.NOT_FINITE``: the maximum would be an arbitrary token.
    """
    if not draws:
        return []
    is_finite, likeliest = distributions.finite_argmax(logits)
    tokens = [likeliest[draw.row] if is_finite[draw.row] else NO_TOKEN for draw in draws]
    for places in _bounded_batches([not draw.is_plain and is_finite[draw.row] for draw in draws], logits):
        for place, token_id in zip(places, sample(logits, [draws[place] for place in places]), strict=True):
            tokens[place] = token_id
    logprobs_by_draw: dict[int, Logprobs] = {}
    asked = [draw.params.top_logprobs is not None and is_finite[draw.row] for draw in draws]
    for places in _bounded_batches(asked, logits):
        logprobs_by_draw |= zip(
            places, _logprobs_of(logits, [(draws[place], tokens[place]) for place in places]), strict=True
        )
    return [
        draw.token(token_id, logprobs_by_draw.get(place))
        for place, (draw, token_id) in enumerate(zip(draws, tokens, strict=True))
    ]


def _bounded_batches(is_wanted: Sequence[bool], logits: Tensor) -> Iterator[list[int]]:
    """The indices of the wanted draws, in bounded batches."""
    places = [place for place, wanted in enumerate(is_wanted) if wanted]
    size = max(1, (_MAX_ELEMENTS_CPU if logits.device.type == "cpu" else _MAX_ELEMENTS) // logits.shape[1])
    return (places[begin : begin + size] for begin in range(0, len(places), size))


def sample(logits: Tensor, draws: Sequence[TokenDraw]) -> list[int]:
    """A token for each draw from a finite row, after biases and penalties: the most likely or a random token."""
    wanted = _rows(logits, draws).float()  # a copy, which may be overwritten
    distributions.apply_biases_and_penalties(wanted, [draw.params for draw in draws], [draw.counts for draw in draws])
    random = [place for place, draw in enumerate(draws) if not draw.params.greedy]
    if not random:
        return _listed(wanted.max(dim=-1).indices)
    chosen = [draws[place] for place in random]
    numbers = [uniform(draw.params.seed, draw.choice, draw.position) for draw in chosen]
    params = [draw.params for draw in chosen]
    if len(random) == len(draws):
        return _listed(distributions.draw_by_cdf(distributions.probabilities(wanted, params), numbers))
    tokens = wanted.max(dim=-1).indices
    places = torch.tensor(random, device=logits.device)
    tokens[places] = distributions.draw_by_cdf(distributions.probabilities(wanted[places], params), numbers)
    return _listed(tokens)


def _listed(tokens: Tensor) -> list[int]:
    listed: list[int] = tokens.tolist()
    return listed


def _logprobs_of(logits: Tensor, chosen: Sequence[tuple[TokenDraw, int]]) -> Iterator[Logprobs]:
    """Log-probabilities before temperature, penalties and biases."""
    num_top = [draw.params.top_logprobs or 0 for draw, _ in chosen]
    token_ids = torch.tensor([token_id for _, token_id in chosen], device=logits.device)
    rows = distributions.logprobs(_rows(logits, [draw for draw, _ in chosen]), token_ids, max(num_top))
    for count, own, tokens, values in zip(num_top, *rows, strict=True):
        yield Logprobs(own, tuple(zip(tokens[:count], values[:count], strict=True)))


def _rows(logits: Tensor, draws: Sequence[TokenDraw]) -> Tensor:
    return logits.index_select(0, torch.tensor([draw.row for draw in draws], device=logits.device))
