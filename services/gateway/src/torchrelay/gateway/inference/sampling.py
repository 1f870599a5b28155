"""A request's parameters as the workers' sampling message: defaults, limits, stop tokens, seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from torchrelay.common.errors import ContextLengthExceeded, InvalidRequest
from torchrelay.common.sampling import shared_sampling
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.gateway.core import PublishedModel
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.gateway.inference.parameter_ranges import check_vocabulary


@dataclass(frozen=True, slots=True)
class GenerationBounds:
    """The operator's default and limit."""

    default_max_tokens: int
    max_choices: int


def sampling_of(
    params: GenerateParams,
    model: PublishedModel,
    num_prompt_tokens: int,
    bounds: GenerationBounds,
    grammar: str = "",
) -> pb.Sampling:
    """The sampling of all attempts of a request; a missing seed is drawn here, once.

    ``max_tokens`` is reduced to what the context leaves. Raises ``InvalidRequest``, ``ContextLengthExceeded``.
    """
    if params.num_choices > bounds.max_choices:
        field = params.num_choices_field
        raise InvalidRequest(f"{field} must be at most {bounds.max_choices}, not {params.num_choices}", field=field)
    vocab_size = model.version.shape.vocab_size
    check_vocabulary((token for token, _ in params.logit_bias), vocab_size, "logit_bias")
    check_vocabulary(params.stop_token_ids, vocab_size, "stop_token_ids")
    eos_token_ids = () if params.ignore_eos else model.version.eos_token_ids
    return pb.Sampling(
        **shared_sampling(params),
        logit_bias=dict(params.logit_bias),
        top_logprobs=params.top_logprobs,
        prompt_logprobs=params.prompt_logprobs,
        seed=random.getrandbits(64) if params.seed is None else params.seed,
        max_tokens=_max_tokens(params, model.version.shape.max_context_tokens, num_prompt_tokens, bounds),
        stop_token_ids=(*eos_token_ids, *params.stop_token_ids),
        stop_strings=params.stop,
        ignore_eos=params.ignore_eos,
        grammar=grammar,
    )


def _max_tokens(params: GenerateParams, context: int, num_prompt_tokens: int, bounds: GenerationBounds) -> int:
    num_left = context - num_prompt_tokens
    if num_left < 1:
        raise context_exceeded(num_prompt_tokens, context, params.prompt_field)
    if params.min_tokens > num_left:
        message = (
            f"{num_prompt_tokens} prompt and {params.min_tokens} output tokens (min_tokens) exceed the context length"
            f" of {context}"
        )
        raise ContextLengthExceeded(message, field="min_tokens")
    if params.max_tokens is None:
        return min(max(bounds.default_max_tokens, params.min_tokens), num_left)
    if params.min_tokens > params.max_tokens:
        message = f"min_tokens must be at most {params.max_tokens_field} ({params.max_tokens}), not {params.min_tokens}"
        raise InvalidRequest(message, field="min_tokens")
    return min(params.max_tokens, num_left)


def context_exceeded(num_prompt_tokens: int, context: int, field: str) -> ContextLengthExceeded:
    """The error of a prompt that leaves no space for output."""
    message = too_long(f"{num_prompt_tokens} tokens", context)
    return ContextLengthExceeded(message, field=field)


def too_long(length: str, context: int) -> str:
    """The message about a prompt of some ``length``.

    It has the words by which clients of OpenAI's and Anthropic's APIs know that they must shorten a conversation.
    """
    return f"prompt is too long: {length} > {context} maximum; this model's maximum context length is {context} tokens"
