"""Checks for groups that can never run here, made before anything is reserved."""

from __future__ import annotations

from torchrelay.common.errors import ContextLengthExceeded, InvalidRequest
from torchrelay.engine.core import GroupSpec, Pooling


def check_lengths(spec: GroupSpec, max_context_tokens: int) -> None:
    """Checks lengths and choices. Raises ``InvalidRequest`` (also ``ContextLengthExceeded``)."""
    if spec.num_prompt_tokens < 1 or not spec.choices:
        raise InvalidRequest("prompt must have at least one token, and the group at least one choice", field="prompt")
    if len({choice.choice for choice in spec.choices}) < len(spec.choices):
        raise InvalidRequest("choices must be distinct", field="choices")
    if spec.pooling is None:
        if any(len(choice.forced_output) >= spec.sampling.max_tokens for choice in spec.choices):
            raise InvalidRequest("forced_output must be shorter than max_tokens", field="max_tokens")
    elif len(spec.choices) > 1 or spec.choices[0].forced_output:
        raise InvalidRequest("an embedding has one choice, without forced_output", field="choices")
    if spec.num_prompt_tokens + spec.num_output_tokens > max_context_tokens:
        raise ContextLengthExceeded(
            f"{spec.num_prompt_tokens} prompt tokens and {spec.num_output_tokens} to generate exceed the context of"
            f" {max_context_tokens} tokens",
            field="max_tokens",
        )


def check_tokens(spec: GroupSpec, vocab_size: int) -> None:
    """Checks a group whose prompt is computed here. Raises ``InvalidRequest``."""
    forced = [token for choice in spec.choices for token in choice.forced_output]
    if len(spec.prompt) != spec.num_prompt_tokens:
        message = f"the prompt has {len(spec.prompt)} tokens, not {spec.num_prompt_tokens}"
        raise InvalidRequest(message, field="prompt")
    tokens = (*spec.prompt, *forced, 0)
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise InvalidRequest(f"token ids must be between 0 and {vocab_size - 1}", field="prompt")
    check_sampled_tokens(spec, vocab_size)


def check_output(spec: GroupSpec, has_head: bool, is_encoder: bool) -> None:
    """Checks that the model gives what the group asks for. Raises ``InvalidRequest``."""
    if spec.pooling is None and not has_head:
        raise InvalidRequest("the model has no head for tokens; it gives embeddings alone", field="pooling")
    computed = (Pooling.FIRST_TOKEN, Pooling.MEAN) if is_encoder else (Pooling.LAST_TOKEN,)
    if spec.pooling is not None and spec.pooling not in computed:
        kind = "an encoder" if is_encoder else "a decoder"
        raise InvalidRequest(f"pooling {spec.pooling.value} is not computed by {kind}", field="pooling")


def check_sampled_tokens(spec: GroupSpec, vocab_size: int) -> None:
    """Checks the token ids whose logits the sampler changes. Raises ``InvalidRequest``."""
    distinct = spec.distinct_prompt_tokens
    if distinct and not 0 <= min(distinct) <= max(distinct) < vocab_size:
        raise InvalidRequest(f"token ids must be between 0 and {vocab_size - 1}", field="prompt")
    if any(not 0 <= token < vocab_size for token, _ in spec.sampling.logit_bias):
        raise InvalidRequest(f"token ids of logit_bias must be between 0 and {vocab_size - 1}", field="logit_bias")
