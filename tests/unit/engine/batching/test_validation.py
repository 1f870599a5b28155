"""Prompts at and beyond the limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.engine.harness import GREEDY, ModelOf, assert_idle, group_of, outputs, prompt_of, run
from torchrelay.common.errors import ContextLengthExceeded, InvalidRequest

CONTEXT = 512  # of the tiny checkpoints


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(1, 5), (1, CONTEXT - 1), (CONTEXT - 1, 1)])
def test_shortest_and_longest_prompts_are_exact(model_of: ModelOf, num_prompt_tokens: int, max_tokens: int) -> None:
    model = model_of("llama")
    prompt = prompt_of(num_prompt_tokens)
    instance = model.instance()
    instance.prefill(group_of(prompt, sampling=replace(GREEDY, max_tokens=max_tokens)))
    actual = outputs(run(instance))["r/0", 0]
    num_compared = min(max_tokens, 24)  # the reference is slow
    assert actual[:num_compared] == model.expected(prompt, num_compared)
    assert len(actual) == max_tokens
    assert_idle(instance)


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(CONTEXT, 1), (CONTEXT - 1, 2), (CONTEXT + 1, 1)])
def test_request_beyond_context_is_refused(model_of: ModelOf, num_prompt_tokens: int, max_tokens: int) -> None:
    instance = model_of("llama").instance()
    with pytest.raises(ContextLengthExceeded, match=f"exceed the context of {CONTEXT} tokens"):
        instance.prefill(group_of(prompt_of(num_prompt_tokens), sampling=replace(GREEDY, max_tokens=max_tokens)))
    assert_idle(instance)


def test_empty_prompt_and_unknown_tokens_are_refused(model_of: ModelOf) -> None:
    instance = model_of("llama").instance()
    for prompt in ((), (-1,), (1, 320), (1 << 40,)):
        with pytest.raises(InvalidRequest) as refused:
            instance.prefill(group_of(prompt))
        assert refused.value.field == "prompt"
    assert_idle(instance)
