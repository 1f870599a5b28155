"""Greedy output equals transformers' generate, token id for token id, through the whole HTTP path and a hand-over."""

from __future__ import annotations

from itertools import product

import pytest

from tests.e2e.tenants import Tenant, reference
from tests.support.completions import complete, stream
from tests.support.platform import Platform

pytestmark = pytest.mark.e2e
PROMPT = [(7 * i) % 251 for i in range(1, 90)]
NUM_TOKENS = 24


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        *product(["llama", "qwen2", "qwen3"], [False, True]),
        *product(["mistral", "gemma2", "gemma3", "phi3", "mixtral", "qwen3-moe"], [True]),
    ],
)
def test_greedy_output_equals_transformers(platform: Platform, tenant: Tenant, family: str, tied: bool) -> None:
    model = tenant.model(family, tied)
    answer = complete(platform, tenant.key, model, PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = reference(tenant.checkpoint(family, tied), PROMPT, NUM_TOKENS)
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS


def test_concurrent_streams_of_many_lengths_are_exact(platform: Platform, tenant: Tenant) -> None:
    model = tenant.model("llama")
    lengths = (1, 2, 17, 64, 65)
    running = [
        stream(platform, tenant.key, model, PROMPT[:length], max_tokens=NUM_TOKENS, ignore_eos=True)
        for length in lengths
    ]
    states = [next(answer) for answer in running]  # all run concurrently
    for answer in running:
        for _ in answer:
            pass
    for state, length in zip(states, lengths, strict=True):
        assert state.token_ids == reference(tenant.checkpoint("llama"), PROMPT[:length], NUM_TOKENS)


def test_choices_differ_and_share_the_prompt(platform: Platform, tenant: Tenant) -> None:
    answer = complete(
        platform,
        tenant.key,
        tenant.model("llama"),
        PROMPT[:20],
        n=3,
        seed=3,
        temperature=1.0,
        max_tokens=12,
        ignore_eos=True,
    )
    outputs = [tuple(choice["token_ids"]) for choice in sorted(answer["choices"], key=lambda c: int(c["index"]))]
    assert len(set(outputs)) == 3 and all(len(output) == 12 for output in outputs)
    assert answer["usage"]["prompt_tokens"] == 20 and answer["usage"]["completion_tokens"] == 36
