"""Log-probabilities of a prompt's own tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchrelay.engine.batching.sequences import PrefillChunk
from torchrelay.engine.core import PromptLogprobs


def score(
    chunk: PrefillChunk, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], num_rows_at_once: int
) -> PromptLogprobs:
    """The logprobs of the tokens that follow the scored positions of a chunk.

    ``hidden`` has these positions after the last layer, [positions, hidden], of which ``logits_of`` gives the logits.
    """
    spec, begin = chunk.context.group.spec, chunk.begin + 1
    scores = PromptLogprobs(spec.group_id, begin, [], [], [], [])
    followers = torch.tensor(spec.prompt[begin : begin + len(hidden)], device=hidden.device)
    for row in range(0, len(hidden), num_rows_at_once):
        rows = slice(row, row + num_rows_at_once)
        logs = logits_of(hidden[rows]).log_softmax(dim=-1, dtype=torch.float32)
        chosen = logs.gather(1, followers[rows, None])
        values, likeliest = logs.topk(min(spec.sampling.prompt_logprobs or 0, logs.shape[1]))
        scores.chosen.extend(chosen.flatten().tolist())
        scores.ranks.extend(((logs > chosen).sum(1) + 1).tolist())
        scores.top_token_ids.extend(likeliest.flatten().tolist())
        scores.top.extend(values.flatten().tolist())
    return scores
