"""From what was asked to the call that runs: defaults, limits, stop tokens, a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from torchrelay.common.errors import ContextLengthExceeded, InvalidRequest
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.gateway.core import PublishedModel
from torchrelay.gateway.inference.core import Ask
from torchrelay.gateway.inference.ranges import check_vocabulary


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the operator allows."""

    default_max_tokens: int
    max_choices: int


def sampling_of(ask: Ask, model: PublishedModel, num_prompt_tokens: int, bounds: Bounds) -> pb.Sampling:
    """How all attempts of the request sample and stop; the seed is drawn here, once, when none was given.

    A default ``max_tokens`` is cut to what the context leaves, a given one is not. Raises ``InvalidRequest``,
    ``ContextLengthExceeded``.
    """
    if ask.num_choices > bounds.max_choices:
        said = f"n is {ask.num_choices}: it must be at most {bounds.max_choices} here"
        raise InvalidRequest(said, field="n")
    vocab_size = model.version.shape.vocab_size
    check_vocabulary((token for token, _ in ask.logit_bias), vocab_size, "logit_bias")
    check_vocabulary(ask.stop_token_ids, vocab_size, "stop_token_ids")
    eos_token_ids = () if ask.ignore_eos else model.version.eos_token_ids
    return pb.Sampling(
        temperature=ask.temperature,
        top_p=ask.top_p,
        top_k=ask.top_k,
        min_p=ask.min_p,
        presence_penalty=ask.presence_penalty,
        frequency_penalty=ask.frequency_penalty,
        logit_bias=dict(ask.logit_bias),
        top_logprobs=ask.top_logprobs,
        seed=random.getrandbits(64) if ask.seed is None else ask.seed,
        max_tokens=_max_tokens(ask, model.version.shape.max_context_tokens, num_prompt_tokens, bounds),
        stop_token_ids=(*eos_token_ids, *ask.stop_token_ids),
        stop_strings=ask.stop,
        ignore_eos=ask.ignore_eos,
    )


def _max_tokens(ask: Ask, context: int, num_prompt_tokens: int, bounds: Bounds) -> int:
    room = context - num_prompt_tokens
    if room < 1:
        message = f"the prompt has {num_prompt_tokens} tokens; prompt and answer together may have {context}"
        raise ContextLengthExceeded(message, field=ask.prompt_field)
    if ask.max_tokens is None:
        return min(bounds.default_max_tokens, room)
    if ask.max_tokens > room:
        message = f"a prompt of {num_prompt_tokens} tokens and {ask.max_tokens} more are too many for {context}"
        raise ContextLengthExceeded(message, field=ask.max_tokens_field)
    return ask.max_tokens
