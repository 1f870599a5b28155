"""From logits to the distribution that tokens are drawn from: pure functions over [rows, vocab], one row per draw.

Top-k, top-p and min-p each remove the tokens below some probability, so each is a *cutoff*. A row keeps the tokens that
reach the highest of its three cutoffs. Ties at a cutoff are all kept.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from torchrelay.engine.core import SamplingParams

_NUM_ORDERED: Final = 256  # most likely tokens to sort: enough for nearly every top-k and top-p; else all are sorted
# Far below every logit, and finite also when it is divided by the lowest temperature.
_FORBIDDEN: Final = -1e30
_BLOCK: Final = 32  # tokens summed at once: a running sum is not vectorised and would cost six times the rest


def finite_argmax(logits: Tensor) -> tuple[list[bool], list[int]]:
    """Returns for each row whether it can be sampled from, and its most likely token.

    The maximum is not finite if any logit is NaN or infinite, or all are minus infinity.
    """
    values, tokens = logits.max(dim=-1)
    return [math.isfinite(value) for value in values.tolist()], tokens.tolist()


def apply_biases_and_penalties(
    logits: Tensor,
    params: Sequence[SamplingParams],
    counts: Sequence[Mapping[int, int] | None],
    prompts: Sequence[array[int]],
) -> Tensor:
    """Applies biases, the repetition penalty (Keskar et al. 2019) and OpenAI's penalties, in place; fp32 ``logits``.

    ``counts`` has the token counts of each row's output so far, where penalties need them; ``prompts`` the distinct
    tokens of its prompt, where the repetition penalty needs them.
    """
    rows: list[int] = []
    tokens: list[int] = []
    biases: list[float] = []
    for row, each in enumerate(params):
        rows += [row] * len(each.logit_bias)
        tokens += [token for token, _ in each.logit_bias]
        biases += [bias for _, bias in each.logit_bias]
    if rows:
        _add(logits, np.asarray(rows), np.asarray(tokens), np.asarray(biases, np.float32))
    for row, (each, seen, prompt) in enumerate(zip(params, counts, prompts, strict=True)):
        if each.penalises_prompt:
            output = np.fromiter(seen or (), np.int64)
            penalised = torch.from_numpy(np.concatenate((np.frombuffer(prompt, np.int64), output))).to(logits.device)
            before = logits[row, penalised]
            factor = each.repetition_penalty
            # A token of both prompt and output is written twice, with the same value.
            logits[row, penalised] = torch.where(before > 0, before / factor, before * factor)
    for row, (each, seen) in enumerate(zip(params, counts, strict=True)):
        if each.penalised and seen:
            ids = np.fromiter(seen.keys(), np.int64, len(seen))
            times = np.fromiter(seen.values(), np.float32, len(seen))
            penalties = each.presence_penalty + each.frequency_penalty * times
            _add(logits, np.full(len(ids), row), ids, -penalties.astype(np.float32))
    return logits


def forbid_tokens(logits: Tensor, forbidden: Sequence[Iterable[int]]) -> Tensor:
    """Makes tokens of each row impossible, unless the row has no other possible token; in place, fp32 ``logits``."""
    vocab_size = logits.shape[1]
    pairs = [(row, token) for row, tokens in enumerate(forbidden) for token in tokens if token < vocab_size]
    if pairs:
        rows, tokens = torch.tensor(pairs, device=logits.device).unbind(1)
        logits[rows, tokens] = _FORBIDDEN
    return logits


def _add(logits: Tensor, rows: npt.NDArray[Any], tokens: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
    """Adds a value to each (row, token). NOTE: a pair twice would make the last bits depend on the order."""
    where = tuple(torch.from_numpy(each).to(logits.device) for each in (rows, tokens))
    logits.index_put_(where, torch.from_numpy(values).to(logits.device), accumulate=True)


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities, fp32 [rows, vocab], after temperature, then top-k, top-p and min-p; not normalised.

    Removed tokens have probability zero. Top-p keeps the most likely tokens until their sum reaches it, min-p the
    tokens at least that fraction as likely as the most likely token (Nguyen et al. 2024). Overwrites ``logits``, which
    are fp32 and finite; no row may be greedy.
    """
    temperatures = _column([each.temperature for each in params], logits.device)
    likely = logits.sub_(logits.amax(-1, keepdim=True)).div_(temperatures).softmax(-1)
    vocab_size = likely.shape[1]
    cutoff = _column([each.min_p for each in params], logits.device) * likely.amax(-1, keepdim=True)
    cut = [row for row, each in enumerate(params) if 0 < each.top_k < vocab_size or each.top_p < 1]
    if len(cut) == len(params):
        cutoff = torch.maximum(cutoff, _cutoff(likely, params, _NUM_ORDERED))
    elif cut:
        rows = torch.tensor(cut, device=logits.device)
        chosen = [params[row] for row in cut]
        cutoff[rows] = torch.maximum(cutoff[rows], _cutoff(likely[rows], chosen, _NUM_ORDERED))
    return likely.masked_fill_(likely < cutoff, 0.0) if cut or any(each.min_p for each in params) else likely


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]


def _cutoff(likely: Tensor, params: Sequence[SamplingParams], num_ordered: int) -> Tensor:
    """[rows, 1]: the least probability that top-k and top-p keep, by the ``num_ordered`` top tokens if they suffice."""
    device, vocab_size = likely.device, likely.shape[1]
    top_k = [each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in params]
    num_ordered = min(vocab_size, max(num_ordered, *(k if k < vocab_size else 1 for k in top_k), 1))
    ordered = _descending(likely, num_ordered)
    last = torch.tensor(top_k, device=device)[:, None].clamp_(max=num_ordered) - 1
    cutoff = ordered.gather(1, last).masked_fill_(torch.tensor([[k == vocab_size] for k in top_k], device=device), 0.0)
    if all(each.top_p >= 1 for each in params):
        return cutoff
    top_p = torch.tensor([[each.top_p] for each in params], dtype=torch.float64, device=device)
    if min(top_k) < vocab_size:  # top-p applies to what top-k keeps
        likely, ordered = likely.masked_fill(likely < cutoff, 0.0), ordered.masked_fill(ordered < cutoff, 0.0)
    sums = ordered.cumsum(1, dtype=torch.float64)
    wanted = top_p * likely.sum(-1, keepdim=True, dtype=torch.float64)
    num_kept = (sums < wanted).sum(1, keepdim=True)  # before the token that reaches it
    reached = num_kept < num_ordered
    nucleus = ordered.gather(1, num_kept.clamp_(max=num_ordered - 1)).masked_fill_(top_p >= 1, 0.0)
    cutoff = torch.maximum(cutoff, nucleus)
    if num_ordered < vocab_size and not bool((reached | (top_p >= 1)).all()):
        short = (~reached & (top_p < 1)).flatten().nonzero().flatten()
        cutoff[short] = _cutoff(likely[short], [params[row] for row in short.tolist()], vocab_size)
    return cutoff


def _descending(values: Tensor, count: int) -> Tensor:
    """The ``count`` largest of each row, in order."""
    if count < values.shape[1] // 8 or values.device.type != "cpu":
        return values.topk(count).values
    # numpy's sort is ten times as fast as torch's on a CPU.
    return torch.from_numpy(np.flip(np.sort(values.numpy(), axis=-1), -1)[:, :count].copy())


def draw_by_cdf(likely: Tensor, numbers: Sequence[float]) -> Tensor:
    """A token of each row, int64 [rows], by its inverse cumulative distribution at a number in [0, 1).

    Tokens are ordered by id, not by probability: two tokens of nearly equal probability would swap places with the last
    bits of the logits, which depend on the batch.
    """
    num_rows, vocab_size = likely.shape
    blocks = F.pad(likely, (0, -vocab_size % _BLOCK)).view(num_rows, -1, _BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(1)
    uniform = torch.tensor(numbers, dtype=torch.float64, device=likely.device)[:, None]
    threshold = _strictly_below(sums[:, -1:], sums[:, -1:] * uniform)
    block = torch.searchsorted(sums, threshold, right=True)
    before = sums.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK))[:, 0].double().cumsum(1).add_(before)
    # These sums were added in another order than the sums of blocks: the last bits may differ.
    token = torch.searchsorted(inside, _strictly_below(inside[:, -1:], threshold), right=True)
    return (block * _BLOCK + token).flatten()


def _strictly_below(total: Tensor, threshold: Tensor) -> Tensor:
    """The threshold, kept below the total in spite of rounding: the first sum above it is the token."""
    return torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """The logprobs of ``tokens``, and for each row the ``num_top`` most likely tokens and their logprobs."""
    logs = logits.log_softmax(dim=-1, dtype=torch.float32)
    values, likeliest = logs.topk(min(num_top, logs.shape[1]))
    return logs.gather(1, tokens[:, None]).flatten().tolist(), likeliest.tolist(), values.tolist()
