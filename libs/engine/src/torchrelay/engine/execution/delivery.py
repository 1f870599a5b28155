"""From logits to tokens: samples, and moves every sequence of a batch on."""

from __future__ import annotations

from torch import Tensor

from torchrelay.engine.batching.scheduler import BatchScheduler
from torchrelay.engine.batching.sequences import BatchPlan
from torchrelay.engine.core import NewToken
from torchrelay.engine.sampling.sampler import draw_of_decoding, draws_of_context, sample_tokens


def deliver(scheduler: BatchScheduler, plan: BatchPlan, logits: Tensor) -> list[NewToken]:
    """The new tokens of a plan that was computed; ``logits`` has a row for each choice that ran, and then for each
    context that was ended.
    """
    for chunk in plan.chunks:
        scheduler.computed(chunk)
    ended = [chunk.context for chunk in plan.chunks if chunk.ends_context]
    draws = [draw_of_decoding(row, each) for row, each in enumerate(plan.decoding)]
    for row, context in enumerate(ended, len(plan.decoding)):
        draws += draws_of_context(row, context)
    tokens = sample_tokens(logits, draws)
    for decoding, token in zip(plan.decoding, tokens, strict=False):
        scheduler.advance(decoding, token)
    for context in ended:
        spec = context.group.spec
        goes_on = [token for token in tokens if token.group_id == spec.group_id and token.finish is None]
        first_tokens = {token.choice: token.token_id for token in goes_on}
        scheduler.start(context, {} if context.group.on_kv else first_tokens)
    return tokens
