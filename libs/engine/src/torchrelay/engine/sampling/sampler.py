"""Sampling. The random number is f(seed, choice, position): independent of batch, worker and attempt."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrelay.engine.batching.sequences import BatchPlan, PrefillContext
from torchrelay.engine.core import (
    NO_TOKEN,
    Finish,
    GrammarState,
    GroupSpec,
    Logprobs,
    NewToken,
    SamplingParams,
    grammar_state,
)
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
    grammar: GrammarState | None = None  # after the output so far

    @property
    def params(self) -> SamplingParams:
        return self.group.sampling

    @property
    def is_plain(self) -> bool:
        """Whether the token is the most likely one as it is, which is computed for the whole batch at once."""
        params = self.params
        changes_logits = params.logit_bias or params.penalised or self.forbidden or self.grammar is not None
        return params.greedy and not changes_logits

    @property
    def forbidden(self) -> frozenset[int]:
        """The tokens that would end the output too early."""
        params = self.params
        return params.stop_token_ids if self.position < params.min_tokens else frozenset()

    def token(self, token_id: int, logprobs: Logprobs | None, *, is_finite: bool) -> NewToken:
        """The sampled token. Advances the grammar past it."""
        finish: Finish | None
        if token_id == NO_TOKEN:
            finish = Finish.NO_TOKEN_ALLOWED if is_finite else Finish.NOT_FINITE
        else:
            if self.grammar is not None and token_id not in self.params.stop_token_ids:
                self.grammar.advance(token_id)
            finish = self.params.finish_of(token_id, self.position, self.grammar)
        group_id = self.group.group_id
        return NewToken(group_id, self.choice, self.position, token_id, finish, self.num_cached, logprobs)


def draws_of(plan: BatchPlan) -> list[TokenDraw]:
    """The draws of a plan: one per running choice, then the first tokens of each context that the plan ends."""
    draws = [
        TokenDraw(row, each.spec, each.choice, each.next_position, each.counts, grammar=each.grammar)
        for row, each in enumerate(plan.decoding)
    ]
    for row, context in enumerate(plan.contexts_with_tokens, len(plan.decoding)):
        draws += _draws_of_context(row, context)
    return draws


def _draws_of_context(row: int, context: PrefillContext) -> list[TokenDraw]:
    """Draws of the first token of each choice of a context; they differ only by the random number."""
    spec = context.group.spec
    num_cached = min(context.num_cached, spec.num_prompt_tokens)
    counts = Counter(context.forced) if spec.sampling.penalised else None
    return [
        TokenDraw(
            row,
            spec,
            choice,
            len(context.forced),
            counts,
            0 if choice in context.begun else num_cached,
            grammar_state(spec.sampling, context.forced),
        )
        for choice in context.choices
    ]


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: BLAKE2b of the counter."""
    digest = blake2b(_COUNTER.pack(seed & (2**64 - 1), choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample_tokens(logits: Tensor, draws: Sequence[TokenDraw]) -> list[NewToken]:
    """The token of each draw; ``logits`` is [rows, vocab].

    A draw from a row that is not finite ends with ``Finish.NOT_FINITE``: the maximum would be an arbitrary token. A
    draw whose grammar allows no token ends with ``Finish.NO_TOKEN_ALLOWED``.
    """
    if not draws:
        return []
    is_finite, likeliest = distributions.finite_argmax(logits)
    tokens = [likeliest[draw.row] if is_finite[draw.row] else NO_TOKEN for draw in draws]
    for places in _bounded_batches([not draw.is_plain and is_finite[draw.row] for draw in draws], logits):
        for place, token_id in zip(places, sample(logits, [draws[place] for place in places]), strict=True):
            tokens[place] = token_id
    logprobs_by_draw: dict[int, Logprobs] = {}
    asked = [
        draw.params.top_logprobs is not None and token_id != NO_TOKEN
        for draw, token_id in zip(draws, tokens, strict=True)
    ]
    for places in _bounded_batches(asked, logits):
        logprobs_by_draw |= zip(
            places, _logprobs_of(logits, [(draws[place], tokens[place]) for place in places]), strict=True
        )
    return [
        draw.token(token_id, logprobs_by_draw.get(place), is_finite=is_finite[draw.row])
        for place, (draw, token_id) in enumerate(zip(draws, tokens, strict=True))
    ]


def num_rows_at_once(device: torch.device, vocab_size: int) -> int:
    """The rows of logits to process at once."""
    return max(1, (_MAX_ELEMENTS_CPU if device.type == "cpu" else _MAX_ELEMENTS) // vocab_size)


def _bounded_batches(is_wanted: Sequence[bool], logits: Tensor) -> Iterator[list[int]]:
    """The indices of the wanted draws, in bounded batches."""
    places = [place for place, wanted in enumerate(is_wanted) if wanted]
    size = num_rows_at_once(logits.device, logits.shape[1])
    return (places[begin : begin + size] for begin in range(0, len(places), size))


def sample(logits: Tensor, draws: Sequence[TokenDraw]) -> list[int]:
    """A token for each draw from a finite row, after biases and penalties: the most likely or a random token, of those
    that the grammar allows. NO_TOKEN if it allows none.
    """
    wanted = _rows(logits, draws).float()  # a copy, which may be overwritten
    distributions.apply_biases_and_penalties(
        wanted,
        [draw.params for draw in draws],
        [draw.counts for draw in draws],
        [draw.group.distinct_prompt_tokens for draw in draws],
    )
    distributions.forbid_tokens(wanted, [draw.forbidden for draw in draws])
    barred = apply_masks(wanted, draws)
    tokens = _chosen(wanted, draws)
    return [NO_TOKEN if row in barred else token_id for row, token_id in enumerate(tokens)]


def apply_masks(logits: Tensor, draws: Sequence[TokenDraw]) -> set[int]:
    """Sets the logits of the tokens that grammars do not allow to minus infinity; returns the rows without any other.

    Those rows stay as they are. ``logits`` has a row per draw.
    """
    rows, masks, barred = list[int](), list[npt.NDArray[np.bool_]](), set[int]()
    for row, draw in enumerate(draws):
        if draw.grammar is None:
            continue
        mask = _mask_of(draw.grammar, draw, logits.shape[1])
        if draw.grammar.error or not mask.any():
            barred.add(row)
            continue
        rows.append(row)
        masks.append(mask)
    if rows:
        is_barred = torch.from_numpy(~np.stack(masks)).to(logits.device)
        if len(rows) == len(draws):
            logits.masked_fill_(is_barred, -math.inf)
        else:
            index = torch.tensor(rows, device=logits.device)
            logits[index] = logits[index].masked_fill_(is_barred, -math.inf)
    return barred


def _mask_of(state: GrammarState, draw: TokenDraw, vocab_size: int) -> npt.NDArray[np.bool_]:
    """The tokens that may follow, [vocab_size]: the grammar's, and the stop tokens where the output may end."""
    assert draw.params.grammar is not None
    end_id = draw.params.grammar.end_id
    bits = np.unpackbits(np.frombuffer(state.allowed(), np.uint8), bitorder="little").view(np.bool_)
    mask = np.zeros(vocab_size, np.bool_)
    num_known = min(vocab_size, end_id)
    mask[:num_known] = bits[:num_known]
    if bits[end_id]:
        mask[[token_id for token_id in draw.params.stop_token_ids - draw.forbidden if token_id < vocab_size]] = True
    return mask


def _chosen(wanted: Tensor, draws: Sequence[TokenDraw]) -> list[int]:
    """The most likely or a random token of each row, fp32, which is overwritten."""
    random = [place for place, draw in enumerate(draws) if not draw.params.greedy]
    if not random:
        return _listed(wanted.max(dim=-1).indices)
    chosen = [draws[place] for place in random]
    numbers = [uniform(draw.params.seed, draw.choice, draw.position) for draw in chosen]
    params = [draw.params for draw in chosen]
    if len(random) == len(draws):
        return _listed(distributions.draw_by_cdf(distributions.probabilities(wanted, params), numbers))
    tokens = wanted.max(dim=-1).indices
    places = torch.tensor(random, device=wanted.device)
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
